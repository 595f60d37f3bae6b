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
        ("s3://bucket/a/b/", Url("s3://bucket", "a/b")),
        ("s3a://bucket//a//b", Url("s3://bucket", "a/b")),
        ("GS://bucket/a", Url("gs://bucket", "a")),
        ("az://account/container/a", Url("az://account/container", "a")),
        ("https://host:8000/a/b.tar", Url("https://host:8000", "a/b.tar")),
    ],
)
def test_a_text_is_a_path_or_a_url(text: str, expected: Path | Url) -> None:
    assert locate(text) == expected
    assert locate(expected) == expected


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("ftp://host/a", "unknown kind of URL 'ftp'"),
        ("s3://", "not a complete URL"),
        ("az://account", "not a complete URL"),
        ("s3://bucket/../other", "not a complete URL"),
        ("https://host/a?token=1", "? or #"),
        ("file://host/a", "names a host"),
    ],
)
def test_what_is_no_url_is_refused_by_name(text: str, mention: str) -> None:
    assert is_url(text)
    with pytest.raises(SettingError) as caught:
        locate(text)
    assert mention in str(caught.value)


def test_a_password_is_refused_and_never_printed() -> None:
    with pytest.raises(SettingError) as caught:
        locate("https://me:hunter2@host/data")
    assert "hunter2" not in str(caught.value)


def test_names_are_joined_and_taken_apart() -> None:
    url = Url("s3://bucket", "sets/caltech")
    assert str(url / "train-00000.tar") == "s3://bucket/sets/caltech/train-00000.tar"
    assert (url / "train.tar.gz").suffix == ".gz"
    assert (url / "a/b").parent == url / "a"
    assert (url.name, Url("s3://bucket").name, Url("s3://bucket").suffix) == ("caltech", "bucket", "")
