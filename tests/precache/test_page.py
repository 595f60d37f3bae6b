"""The skeleton that every page of the project shares."""

from pathlib import Path

import pytest

from precache import page
from precache.errors import SettingError

HOSTILE = "<b>&\"'"


def test_text_is_escaped_wherever_it_is_given() -> None:
    shown = page.document(
        HOSTILE,
        page.paragraphs([HOSTILE])
        + page.facts({HOSTILE: [HOSTILE]})
        + page.folded(HOSTILE, "")
        + page.table([HOSTILE], [[HOSTILE]])
        + page.with_code(f"`{HOSTILE}`"),
    )
    assert "<b>" not in shown
    assert "prefers-color-scheme: dark" in shown
    assert shown.count("&lt;b&gt;&amp;") == 8


def test_a_page_is_written_whole_or_an_error_names_the_file(tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", page.document("caf\udce9", ""))
    assert rb"caf\udce9" in (tmp_path / "page.html").read_bytes()
    with pytest.raises(SettingError, match=r"no/page\.html: cannot be written"):
        page.write(tmp_path / "no" / "page.html", "")
