"""Which text is a path, and which a URL."""

from pathlib import Path

import pytest

from precache.errors import SettingError
from precache.storage.urls import Url, is_url, locate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data/raw", Path("data/raw")),
        ("file:///data/my%20photos", Path("/data/my photos")),
        ("s3://bucket", Url("s3://bucket")),
        ("s3a://bucket//a//b/", Url("s3://bucket", "a/b")),
        ("GS://bucket/a", Url("gs://bucket", "a")),
        ("az://account/container/a", Url("az://account/container", "a")),
        ("https://host:8000/a/b.tar", Url("https://host:8000", "a/b.tar")),
    ],
)
def test_a_text_is_a_path_or_a_url(text: str, expected: Path | Url) -> None:
    assert locate(text) == expected
    assert locate(expected) == expected


@pytest.mark.parametrize(
    "text",
    ["ftp://host/a", "s3://", "az://account", "s3://bucket/../other", "https://host/a?token=1",
     "file://host/a", "https://me:hunter2@host/data"],
)  # fmt: skip
def test_what_is_no_url_is_refused_and_no_password_printed(text: str) -> None:
    assert is_url(text)
    with pytest.raises(SettingError) as caught:
        locate(text)
    assert "hunter2" not in str(caught.value)


def test_a_url_that_went_through_a_path_is_refused() -> None:
    with pytest.raises(SettingError, match="pass URLs as text"):
        locate(Path("s3://bucket/set"))


def test_names_are_joined_and_taken_apart() -> None:
    url = Url("s3://bucket", "sets/caltech")
    assert str(url / "train.tar.gz") == "s3://bucket/sets/caltech/train.tar.gz"
    assert (url / "train.tar.gz").suffix == ".gz"
    assert (url / "a/b").parent == url / "a"
    assert (url.name, Url("s3://bucket").name, Url("s3://bucket").suffix) == ("caltech", "bucket", "")
