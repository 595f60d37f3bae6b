"""Which text is a path, and which a URL."""

from pathlib import Path

import pytest

from precache.errors import SettingError
from precache.storage.urls import Url, locate


def test_a_text_is_a_path_or_a_url_or_refused_and_no_password_printed() -> None:
    for text, expected in (
        ("data/raw", Path("data/raw")),
        ("file:///data/my%20photos", Path("/data/my photos")),
        ("s3a://bucket//a//b/", Url("s3://bucket", "a/b")),
        ("az://account/container/a", Url("az://account/container", "a")),
        ("https://host:8000/a/b.tar", Url("https://host:8000", "a/b.tar")),
    ):
        assert locate(text) == locate(expected) == expected
    for text in ("ftp://host/a", "az://account", "s3://bucket/../other", "https://me:hunter2@host/data"):
        with pytest.raises(SettingError) as caught:
            locate(text)
        assert "hunter2" not in str(caught.value)
