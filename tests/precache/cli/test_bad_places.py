"""What the commands say of a place that is not of the kind that they take: one line, exit code 2."""

from pathlib import Path

import pytest

from tests.command import check_bad_input, run_here


@pytest.mark.parametrize(
    "arguments",
    [
        ("push", "s3://bucket/one", "s3://bucket/other"),
        ("pull", "s3://bucket/one", "s3://bucket/other"),
        ("export", "DATASET", "s3://bucket/tree"),
    ],
)
def test_a_url_in_the_place_of_a_folder_is_called_one(
    arguments: tuple[str, ...], converted: dict[str, Path], tmp_path: Path
) -> None:
    arguments = tuple(str(converted["shards"]) if word == "DATASET" else word for word in arguments)
    check_bad_input(run_here("precache", *arguments, cwd=tmp_path), "s3://bucket/", "is a URL; name a path")


@pytest.mark.parametrize("place", [".", "/"])
def test_a_page_that_would_be_a_folder_is_refused(
    place: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    done = run_here("precache", "inspect", converted["shards"], "--html", place, cwd=tmp_path)
    check_bad_input(done, "is a folder; name a file in it")
