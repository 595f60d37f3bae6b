"""The skeleton that every page of the project shares."""

import re
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
    assert shown.count("&lt;b&gt;&amp;") == 8


def test_a_page_needs_no_network_and_follows_the_readers_colours() -> None:
    shown = page.document("title", "")
    assert "prefers-color-scheme: dark" in shown
    assert not re.search(r"https?://|url\(|<script|<link", shown)


def test_words_stand_left_and_numbers_right() -> None:
    shown = page.table(["loader", "images/s", "why"], [["shards", "1,200", "run `make`"]])
    assert re.findall(r'<td( class="words")?>', shown) == [' class="words"', "", ' class="words"']
    assert "run <code>make</code>" in shown


@pytest.mark.parametrize(("share", "width"), [(0, "0.0%"), (0.31, "31.0%"), (2, "100.0%")])
def test_a_bar_is_as_wide_as_its_share(share: float, width: str) -> None:
    assert f"width:{width}" in page.bar(share)


def test_a_page_is_written_whole_or_an_error_names_the_file(tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", page.document("caf\udce9", ""))
    assert rb"caf\udce9" in (tmp_path / "page.html").read_bytes()
    with pytest.raises(SettingError, match=r"no/page\.html: cannot be written"):
        page.write(tmp_path / "no" / "page.html", "")
