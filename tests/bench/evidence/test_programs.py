"""The programs of the steps, as far as they run without a GPU."""

from pathlib import Path

import pytest
import torch

from bench.evidence.feeds import FEEDS, Feed
from bench.evidence.gpu_tests import read_report
from bench.evidence.memory import MAY_GROW_BYTES, epoch_bytes, is_flat
from bench.evidence.races import KINDS, check_feed, differing, picture_sums
from loaders import BACKENDS

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
<testcase classname="tests.a" name="test_one" time="0.1" />
<testcase classname="tests.a" name="test_two"><failure message="assert 1&#10; == 2">trace</failure></testcase>
<testcase classname="tests.b" name="test_three"><skipped message="no GPU">x</skipped></testcase>
<testcase classname="tests.b" name="test_four"><error message="fixture failed">trace</error></testcase>
</testsuite></testsuites>
"""


@pytest.fixture(scope="module")
def data(raw_tree: Path, converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "mixed").symlink_to(raw_tree)
    for name in ("shards", "webdataset"):
        (folder / f"mixed-{name}").symlink_to(converted[name])
    (folder / "mixed-squares").symlink_to(converted["shards"])
    return folder


def feed(name: str) -> Feed:
    (found,) = (feed for feed in FEEDS if feed.name == name)
    return found


def test_every_backend_and_cache_is_among_the_feeds() -> None:
    assert {feed.backend for feed in FEEDS} == set(BACKENDS)
    assert {feed.reading.cache for feed in FEEDS} == {"none", "ram", "device"}


@pytest.mark.parametrize("name", ["shards", "shards, cache device", "synthetic"])
def test_a_loader_repeats_itself(data: Path, name: str) -> None:
    checks = check_feed(feed(name), data, "cpu", 16, 32)
    assert [check["kind"] for check in checks] == list(KINDS)
    epochs = 3 if "cache" in name else 1
    assert all((check["batches"], check["differ"]) == (5 * epochs, 0) for check in checks)


def test_a_loader_that_cannot_run_here_is_left_out_with_the_reason(data: Path) -> None:
    checks = check_feed(feed("nvjpeg of a raw tree"), data, "cpu", 16, 32)
    assert all("decodes on a GPU" in check["skipped"] for check in checks)


def test_a_loader_that_fails_is_an_error_of_its_own(tmp_path: Path) -> None:
    checks = check_feed(feed("shards"), tmp_path, "cpu", 16, 32)
    assert all(str(tmp_path) in check["error"] for check in checks)


def test_a_batch_with_other_pixels_order_or_labels_differs(data: Path) -> None:
    settings = {"device": "cpu", "batch_size": 16, "size": 32}
    sums = picture_sums(feed("shards"), data, stalled=False, **settings)
    assert differing(sums, sums) == 0
    (pictures, labels), *others = sums
    assert differing(sums, [([pictures[0] + 1, *pictures[1:]], labels), *others]) == 1
    assert differing(sums, [(pictures[::-1], labels), *others]) == 1
    assert differing(sums, [(pictures, [labels[0] + 1, *labels[1:]]), *others]) == 1
    assert differing(sums, others) == len(sums)


def test_memory_is_watched_after_every_epoch(data: Path) -> None:
    taken = epoch_bytes(feed("shards"), data, "cpu", 16, 32, 3)
    assert len(taken) == 3
    assert min(taken) > 0


def test_memory_may_fill_up_in_the_first_epoch_alone() -> None:
    assert is_flat([0, 10 * MAY_GROW_BYTES, 11 * MAY_GROW_BYTES])
    assert not is_flat([0, 10 * MAY_GROW_BYTES, 10 * MAY_GROW_BYTES, 11 * MAY_GROW_BYTES + 1])


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert read_report(tmp_path / "junit.xml") == {
        "passed": 1,
        "failed": {"tests.a::test_two": "assert 1 == 2", "tests.b::test_four": "fixture failed"},
        "skipped": {"tests.b::test_three": "no GPU"},
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [feed.name for feed in FEEDS])
def test_no_loader_races_with_a_stalled_stream(data: Path, name: str) -> None:
    for check in check_feed(feed(name), data, "cuda", 16, 32):
        assert check.get("differ", 0) == 0
        assert "error" not in check
