"""What the documents name is there."""

import re
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.faults.runner import ATTACKS

PROMISES = (ROOT / "precache/promises.md").read_text()
DOCUMENTS = [
    path for name in (".", "precache", "loaders", "bench", "tests") for path in (ROOT / name).glob("*.md")
]
DOCUMENTS += [path for name in ("precache", "bench") for path in (ROOT / name).glob("*/*.md")]


def test_every_promise_names_the_tests_and_attacks_that_hold_it() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| what happens", "| ---"))]
    assert len(promises) > 30
    assert all(re.search(r"`test_\w+\.py::test_\w+`|`faults\[\w+\]`", row) for row in promises)
    there = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PROMISES)) <= there
    assert set(re.findall(r"`faults\[(\w+)\]`", PROMISES)) <= ATTACKS.keys()


def headings(path: Path) -> set[str]:
    """What a link into this page may name behind its #."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not link.startswith("https://"):
            assert target.exists(), link
            assert not heading or heading in headings(target), link


def test_the_readme_draws_the_conclusions_of_its_page_of_results() -> None:
    number, verdict = r"([+-]\d\.\d+)", "(within noise|as good|worse|better)"
    page = (ROOT / "bench/results/README.md").read_text()
    rows = re.findall(rf"\| {number} \({number} to {number}\), {verdict} \|", page)
    found = {(*(f"{float(value):+.1f}" for value in row[:3]), row[3]) for row in rows}
    readme = re.findall(
        rf"\| (\**){number}\**, {verdict} \| {number} to {number} \|", (ROOT / "README.md").read_text()
    )
    assert len(readme) == 3
    for bold, difference, said, low, high in readme:
        assert (difference, low, high, said) in found
        assert bool(bold) == (said in ("worse", "better")), "in bold: what is not within noise"
