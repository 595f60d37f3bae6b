"""Parsing of paths and URLs."""

from pathlib import Path

import pytest

from precache.errors import SettingError
from precache.storage.urls import Url, locate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data/raw", Path("data/raw")),
        ("file:///data/my%20photos", Path("/data/my photos")),
        ("s3a://bucket//a//b/", Url("s3://bucket", "a/b")),
        ("az://account/container/a", Url("az://account/container", "a")),
        ("https://host:8000/a/b.tar", Url("https://host:8000", "a/b.tar")),
    ],
)
def test_locate_parses_paths_and_urls(text: str, expected: Path | Url) -> None:
    assert locate(text) == locate(expected) == expected


@pytest.mark.parametrize("text", ["ftp://host/a", "az://account", "s3://bucket/../other"])
def test_locate_refuses_unknown_and_incomplete_urls(text: str) -> None:
    with pytest.raises(SettingError, check=lambda error: error.path == text):
        locate(text)


def test_locate_refuses_a_password_without_printing_it() -> None:
    with pytest.raises(SettingError) as raised:
        locate("https://me:hunter2@host/data")
    assert "hunter2" not in str(raised.value)
