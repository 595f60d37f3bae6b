"""Links, names of tests and figures in the documents lead to what is in the repository."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image

from precache import Recipe, convert
from tests.command import ROOT
from tests.faults.runner import ATTACKS

PROMISES = (ROOT / "precache/promises.md").read_text()
DOCUMENTS = [
    path for name in (".", "precache", "loaders", "bench", "tests") for path in (ROOT / name).glob("*.md")
]
DOCUMENTS += [path for name in ("precache", "bench") for path in (ROOT / name).glob("*/*.md")]
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
ATTACK = re.compile(r"`faults\[(\w+)\]`")
# pyproject.toml: packages at the beginning of a string, before a version
PACKAGE = re.compile(r"\"([a-z0-9-]+)(?:\[[a-z0-9,]*\])?[><=]=?\d")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_promise_names_a_test_or_an_attack() -> None:
    promises = re.split(r"^### ", PROMISES, flags=re.MULTILINE)[1:]
    assert len(promises) > 30
    for promise in promises:
        section = re.split(r"^## ", promise, flags=re.MULTILINE)[0]
        assert TEST.search(section) or ATTACK.search(section), section


def test_every_test_and_attack_of_the_promises_exists() -> None:
    tests = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert set(TEST.findall(PROMISES)) <= tests
    assert set(ATTACK.findall(PROMISES)) <= ATTACKS.keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not heading or heading in headings(target), link


@pytest.mark.parametrize("package", ["precache", "loaders", "bench"])
def test_every_dependency_that_a_guide_lists_is_one(package: str) -> None:
    guide = (ROOT / package / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]*) \|", guide.split("\n## Dependencies\n")[1], re.MULTILINE)
    names = [name for row in rows[2:] for name in re.sub(r" \(extra [^)]*\)", "", row).split(", ")]
    assert names
    assert set(names) <= set(PACKAGE.findall((ROOT / "pyproject.toml").read_text()))


def test_the_readme_repeats_figures_of_the_page_of_results() -> None:
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "bench/results/README.md"))
    table = readme[readme.index("| loader, images/s |") :].partition("\n\n")[0]
    assert table in page
    number, verdict = r"([+-]\d\.\d+)", "(within noise|as good|worse|better)"
    difference = re.compile(rf"{number} \({number}\s+to\s+{number}\),\s+{verdict}")
    measured = {
        (*(f"{float(value):+.1f}" for value in values), conclusion)
        for *values, conclusion in difference.findall(page)
    }
    repeated = difference.findall(readme)
    assert len(repeated) == 4
    assert set(repeated) <= measured


def test_architecture_names_every_file_that_a_plain_jpeg_passes(tmp_path: Path) -> None:
    """Files with a function that runs once more, or more often, for each further picture."""
    before = calls_in("precache", lambda: convert_tree(tmp_path, 20))
    further = calls_in("precache", lambda: convert_tree(tmp_path, 40)) - before
    assert files_of(further, 20) == linked_files("**A picture**, once", "No other file runs for each plain")


def convert_tree(folder: Path, pictures: int) -> Path:
    """Convert so many JPEGs, and return the folder of the dataset."""
    tree, dataset = folder / f"{pictures}-pictures", folder / f"{pictures}-shards"
    (tree / "a").mkdir(parents=True)
    for number in range(pictures):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(tree / f"a/{number}.jpg")
    convert(tree, dataset, Recipe(format="shards", size=32), workers=0)
    return dataset


def files_of(calls: Counter[tuple[str, str, int]], least: int) -> set[str]:
    """Return the files with a function that was called so often."""
    return {file for (file, _, _), count in calls.items() if count >= least}


def linked_files(start: str, end: str) -> set[str]:
    """Return the files that ARCHITECTURE links to between these two texts."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return set(re.findall(r"\]\(([^)]+)\)", text[text.index(start) : text.index(end)]))


def calls_in(package: str, run: Callable[[], None]) -> Counter[tuple[str, str, int]]:
    """Return how often each function of a package, as file, name and line, runs in any thread of `run`."""
    calls: Counter[tuple[str, str, int]] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code, root = frame.f_code, f"{ROOT}/"
        if event == "call" and code.co_filename.startswith(f"{root}{package}"):
            calls[code.co_filename.removeprefix(root), code.co_name, code.co_firstlineno] += 1

    profile = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(profile)
        threading.setprofile(profile)
    return calls
