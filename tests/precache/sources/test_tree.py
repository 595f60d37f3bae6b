"""Trees of class folders as sources: the tables of examples in the modules, links, permissions, warnings."""

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from precache.errors import SourceError
from precache.sources import tree
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from tests.command import run_here
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.tars import JPEG, put

TEXT = b"#!/bin/sh\nmv a b\n"


def lay(root: Path, *names: str) -> Path:
    """Write files of these names, which a scan takes for pictures if they have such extensions."""
    return put(root, dict.fromkeys(names, JPEG))


def rows_of(described: object) -> list[tuple[str, str]]:
    """Return the rows of the table in a docstring, which has two columns with some spaces between."""
    table = str(inspect.getdoc(described)).partition("\nRaises:")[0]
    lines = re.findall(r"^ {4}(\S.*)$", table, re.MULTILINE)
    _, *rows = [re.split(" {2,}", line) for line in lines]  # the first one is the head
    return [(first, second) for first, second in rows]


def plant(root: Path, names: str) -> int:
    """Make the tree of a table's row, pictures and empty folders, and return its class depth."""
    names, _, depth = names.partition(", depth ")
    for name in names.split():
        if name.endswith("/"):
            (root / name).mkdir(parents=True)
        else:
            put(root, {name if Path(name).suffix in (".csv", ".tar") else f"{name}.jpg": JPEG})
    return int(depth or 1)


def check_outcome(root: Path, depth: int, expected: str, describe: Callable[[Scan], list[str]]) -> None:
    """Check that what comes of a tree is what the row of a table says, with all warnings."""
    kinds = ("ignored", "warning", "error")
    clauses = [clause.split(": ", 1) for clause in expected.split("; ") if clause.startswith(kinds)]
    words = {kind: [clause[1] for clause in clauses if clause[0] == kind] for kind in kinds}
    outcome = [clause for clause in expected.split("; ") if not clause.startswith(kinds)]
    for message in words["error"]:
        with pytest.raises(SourceError, match=f"{re.escape(message)}(?! --class)"):
            scan_tree(root, depth)
        return
    scan = scan_tree(root, depth)
    assert describe(scan) == outcome
    ignored = [ignored.path.removesuffix(".jpg") for ignored in scan.ignored if ignored.path.endswith(".jpg")]
    assert ignored == [name for names in words["ignored"] for name in names.split()]
    warnings = [line for line in scan.warnings if "left out: " not in line]
    assert len(warnings) == len(words["warning"])
    for line, wanted in zip(warnings, words["warning"], strict=True):
        assert wanted in line
    left_out = [line for line in scan.warnings if "left out: " in line]
    assert all(repr(f"{name}.jpg") in "".join(left_out) for name in ignored)


@pytest.mark.parametrize(("names", "expected"), rows_of(tree.find_layout))
def test_splits_and_classes_are_those_of_the_table(names: str, expected: str, tmp_path: Path) -> None:
    def describe(scan: Scan) -> list[str]:
        classes: dict[str, dict[str, None]] = {}
        for sample in scan.samples:
            class_name = scan.classes[sample.label] if scan.classes else "no classes"
            classes.setdefault(sample.split, {})[class_name] = None
            assert f"/{class_name}/" in f"/{sample.path}" or not scan.classes
        return [f"{split}: {' '.join(names)}".removeprefix(": ") for split, names in classes.items()]

    depth = plant(tmp_path / "photos", names)
    (tmp_path / "photos/__MACOSX").mkdir(exist_ok=True)
    check_outcome(tmp_path / "photos", depth, expected, describe)


@pytest.mark.parametrize(("names", "expected"), rows_of(tree))
def test_samples_and_their_order_are_those_of_the_table(names: str, expected: str, tmp_path: Path) -> None:
    def describe(scan: Scan) -> list[str]:
        paths: dict[str, list[str]] = {}
        for sample in scan.samples:
            class_name = scan.classes[sample.label] if scan.classes else "no class"
            paths.setdefault(class_name, []).append(sample.path.removesuffix(".jpg"))
        return [f"{class_name}: {' '.join(names)}" for class_name, names in paths.items()]

    check_outcome(tmp_path, plant(tmp_path, names), expected, describe)


def test_entries_are_ignored_for_the_reasons_in_the_table(tmp_path: Path) -> None:
    lay(tmp_path, "cat/0.jpg", "dog/1.jpg")
    expected = {}
    for names, outcome in rows_of(tree.Entry):
        for text in names.split(", "):
            name, _, target = re.sub(r" \(.*\)", "", text).partition(" -> ")
            path = tmp_path / "cat" / name
            path.parent.mkdir(exist_ok=True)
            if target:
                path.symlink_to(target)
            elif name.endswith("/"):
                lay(path, "inner.jpg")
            else:
                path.write_bytes(TEXT if text.endswith("(text)") else JPEG)
            expected[f"cat/{name}".strip("/")] = outcome
    scan = scan_tree(tmp_path)
    outcomes = dict.fromkeys((sample.path for sample in scan.samples), "a picture")
    outcomes |= {ignored.path: ignored.reason for ignored in scan.ignored}
    searched = {str(Path(path).parent) for path in outcomes} - {"cat", "dog", "cat/b"}
    outcomes |= dict.fromkeys(searched, "a folder that is searched")
    assert {path: outcomes.get(path) for path in expected} == expected
    assert scan.scanned == len(scan.samples) + len(scan.ignored)


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "above/tree"
    lay(tmp_path, "above/tree/b/1.jpg", "above/x.jpg", "y.jpg", "far/z.jpg")
    links = {"a": ".", "c": "..", "d": "../..", "b/inner": "..", "self": "self", "b/gone.jpg": "gone.jpg"}
    followed = {"b/link.jpg": "../../x.jpg", "e": "../../far", "f": "e"}
    for name, target in {**links, **followed}.items():
        (tree / name).symlink_to(target)
    scan = scan_tree(tree)
    assert [s.path for s in scan.samples] == ["b/1.jpg", "b/link.jpg", "e/z.jpg", "f/z.jpg"]
    assert {i.path for i in scan.ignored} == links.keys()
    warnings = "\n".join(scan.warnings)
    assert "'f' is 'e'" in warnings, "one folder under two names"
    assert "'a', 'c', 'd'" in warnings, "links to folders above them"


def test_links_between_two_class_folders_are_followed_once(tmp_path: Path) -> None:
    lay(tmp_path, "a/1.jpg", "b/2.jpg")
    (tmp_path / "a/to-b").symlink_to("../b")
    (tmp_path / "b/to-a").symlink_to("../a")
    scan = scan_tree(tmp_path)
    assert [s.path for s in scan.samples] == ["a/1.jpg", "a/to-b/2.jpg", "b/2.jpg", "b/to-a/1.jpg"]
    assert {i.path for i in scan.ignored} == {"a/to-b/to-a", "b/to-a/to-b"}


def test_empty_classes_and_unread_formats_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tmp_path, *(f"a/{number}.jpg" for number in range(100)), "beside.jpg", "a/.hidden.jpg")
    put(tmp_path, {"a/y.jxl": b"\xff\x0a", "b/x.jxl": b"\xff\x0a"})
    for number in range(10):
        (tmp_path / f"c{number}\x1b").mkdir()
    empty, missed = scan_tree(tmp_path).warnings
    assert empty.startswith(f"{tmp_path}: class folders without a picture: 'b', 'c0\\x1b', 'c1\\x1b' and 8 ")
    assert missed.startswith(f"{tmp_path}: 3 files ")
    assert all(repr(name) in missed for name in ("a/y.jxl", "b/x.jxl", "beside.jpg"))
    for command in ("check .", f"convert . {tmp_path}.out --format shards --size 8 --max-rejects 1"):
        caplog.clear()
        run_here("precache", *command.split(), "--workers", 0, cwd=tmp_path)
        assert [line.replace(".: ", f"{tmp_path}: ", 1) for line in caplog.messages][:2] == [empty, missed]


def test_pictures_that_image_folder_does_not_list_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture = encode_image(Image.new("RGB", (9, 7), "red"))
    names = ["a/1.png", "a/2.GIF", "b/3.gif", "b/4.avif", "b/tmp"]
    put(tmp_path / "photos", dict.fromkeys(names, picture))
    counts = "1 without extension, 1 .avif, 2 .gif"
    for command in ("check photos", "convert photos out --format shards --size 8"):
        caplog.clear()
        assert run_here("precache", *command.split(), "--workers", 0, cwd=tmp_path).returncode == 0
        assert counts in caplog.messages[0]


def test_commands_count_deeper_pictures_and_name_those_without_class(tmp_path: Path) -> None:
    picture = encode_image(Image.new("RGB", (9, 7), "red"))
    files = ["photos/cat/1.png", "photos/cat/more/2.png", "photos/dog/tail/ears/3.png", "photos/cover.png"]
    put(tmp_path, dict.fromkeys(files, picture))
    commands = {
        "convert photos out --format shards --size 8 --workers 0": ("2 pictures lie deeper", "cover.png"),
        "check photos --workers 0": ("2 pictures lie deeper", "all 3 pictures"),
        "check photos --workers 0 --class-depth 2": ("1 picture lies deeper", "all 2 pictures"),
        "inspect out": ("ignored 1: ", "cover.png"),
    }
    for command, expected in commands.items():
        done = run_here("precache", *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(line in done.stdout + done.stderr for line in expected), command


@pytest.fixture
def unprivileged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder, and run the test without root's permissions."""
    if os.geteuid() != 0:
        yield tmp_path_factory.mktemp("tree")
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(("closed", "path"), [("tree/a", "tree/a"), ("linked", "tree/a/2.jpg")])
def test_folders_without_read_permission_are_errors(unprivileged: Path, closed: str, path: str) -> None:
    put(unprivileged, {"tree/a/1.jpg": JPEG, "linked/x.jpg": JPEG})
    (unprivileged / "tree/a/2.jpg").symlink_to(unprivileged / "linked/x.jpg")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(SourceError, match=f"^{unprivileged / path}: ") as raised:
            scan_tree(unprivileged / "tree")
        assert isinstance(raised.value.__cause__, PermissionError)
    finally:
        (unprivileged / closed).chmod(0o700)


def test_files_and_classes_may_have_any_name(tmp_path: Path) -> None:
    names = ("a-b", "A", "b c", "\u00fc \u540d", "latin\udcef", "n" * 120, "tab\t'\"", "astral\U0001f600")
    files = {f"{name}/{name}.jpg": JPEG + os.fsencode(name) for name in names}
    scan = scan_tree(put(tmp_path / "tree", files))
    assert scan.classes == tuple(sorted(names))
    assert {ref.path: scan.source.read(ref, 100) for ref in scan.samples} == files
    assert [scan.classes[ref.label] for ref in scan.samples] == sorted(names)
