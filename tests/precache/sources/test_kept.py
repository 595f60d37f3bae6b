import fcntl
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from precache import convert
from precache.errors import DatasetError, SourceError
from precache.plan import ConvertPlan
from precache.recipe import Recipe
from precache.sources import Scanning, folders, kept
from precache.sources.base import Samples, Scan
from precache.sources.kept import kept_path
from precache.sources.tree import scan_tree
from tests.command import ROOT, run
from tests.conftest import small_recipe
from tests.precache.sources.test_walk import JPEG, assert_same, put

converting = sys.modules["precache.convert"]  # `precache.convert` is the function
_LONG_AGO = 1_000_000_000
_FOLDERS = 8


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_WORTH_S", 0.0)


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    """Class folders that were last written to long ago, as most."""
    pictures = [path.read_bytes() for path in sorted(raw_tree.glob("*/*.jpg"))[:6]]
    for number in range(_FOLDERS):
        folder = tmp_path / f"tree/class{number}"
        for place, content in enumerate(pictures):
            put(folder / f"{place}.jpg", content)
        put(folder / ".hidden")
        (folder / "inner").mkdir()
        os.utime(folder, (_LONG_AGO, _LONG_AGO))
    return tmp_path / "tree"


class Listing:
    """Notes which class folders are listed; fails at the one named `fails_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_at = ""
        self.listed: list[str] = []
        self._real = folders.sorted_entries
        monkeypatch.setattr(folders, "sorted_entries", self)

    def __call__(self, folder: folders.Folder) -> list[folders.Entry]:
        name = Path(folder).name  # type: ignore[arg-type]
        if name == self.fails_at:
            raise SourceError(f"{name}: the disk is away for a moment")
        self.listed.append(name)
        return self._real(folder)

    def interrupt(self, tree: Path, file: Path, at: str = "class7") -> None:
        """A scan that ends at the folder `at`, and is kept."""
        self.fails_at = at
        with pytest.raises(SourceError, match="away for a moment"):
            scan_tree(tree, 1, Scanning(kept=file))
        assert file.exists()
        self.fails_at = ""
        self.listed.clear()


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Listing:
    return Listing(monkeypatch)


def scan_on(tree: Path, file: Path, *, recalled: bool = True) -> Scan:
    """The scan goes on; it finds what a new one finds, and leaves nothing behind."""
    scan = scan_tree(tree, 1, Scanning(kept=file))
    assert scan.recalled == recalled
    assert not file.exists()
    assert_same(replace(scan, recalled=False), scan_tree(tree))
    return scan


def names(*numbers: int) -> list[str]:
    return [f"class{number}" for number in numbers]


def test_a_scan_that_is_killed_goes_on(tree: Path, tmp_path: Path, listing: Listing) -> None:
    code = (
        "import os, signal, sys\n"
        "from precache.sources import folders\n"
        "from precache.sources import Scanning, kept\n"
        "from precache.sources.tree import scan_tree\n"
        "from pathlib import Path\n"
        "real, kept._WORTH_S = folders.sorted_entries, 0.0\n"
        "def entries(folder):\n"
        "    if str(folder).endswith('class6'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(folder)\n"
        "folders.sorted_entries = entries\n"
        "scan_tree(sys.argv[1], 1, Scanning(kept=Path(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "file")]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    scan_on(tree, tmp_path / "file")
    assert listing.listed[:2] == names(6, 7)


def test_only_what_was_written_to_since_is_listed_again(tree: Path, tmp_path: Path, listing: Listing) -> None:
    listing.interrupt(tree, tmp_path / "file")
    put(tree / "class0/new.jpg")
    os.utime(tree / "class0", (_LONG_AGO, _LONG_AGO))  # as whoever copies a folder with its times does
    (tree / "class1/3.jpg").unlink()
    (tree / "class2/3.jpg").rename(tree / "class2/4.txt")
    (tree / "class3").rename(tree / "class03")
    (tree / "class4/2.jpg").rename(tree / "class4/x")
    shutil.copytree(tree / "class5", tmp_path / "copy")
    shutil.rmtree(tree / "class5")
    (tmp_path / "copy").rename(tree / "class5")
    scan_on(tree, tmp_path / "file")
    assert listing.listed[:7] == ["class0", "class03", *names(1, 2, 4, 5, 7)]


def test_what_may_change_without_its_folder_is_always_listed_again(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    put(tmp_path / "elsewhere.jpg")
    (tree / "class1/link.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (tree / "class2/gone.jpg").symlink_to(tmp_path / "gone.jpg")
    put(tree / "class3/by its start", JPEG)
    put(tree / "class4/notes", b"text")
    for number in range(1, 5):
        os.utime(tree / f"class{number}", (_LONG_AGO, _LONG_AGO))
    listing.interrupt(tree, tmp_path / "file")
    (tmp_path / "elsewhere.jpg").unlink()
    put(tmp_path / "gone.jpg")
    (tree / "class3/by its start").write_bytes(b"text")
    (tree / "class4/notes").write_bytes(JPEG)
    scan_on(tree, tmp_path / "file")
    assert listing.listed[:5] == names(1, 2, 3, 4, 7)


def test_a_folder_that_was_just_written_to_is_listed_again(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    """A file that comes in the same tick of its clock leaves no trace."""
    os.utime(tree / "class2")
    listing.interrupt(tree, tmp_path / "file")
    scan_on(tree, tmp_path / "file")
    assert listing.listed[:2] == names(2, 7)


def test_a_scan_may_end_again_and_again(tree: Path, tmp_path: Path, listing: Listing) -> None:
    for at in ("class2", "class5", "class7"):
        listing.interrupt(tree, tmp_path / "file", at)
    scan_on(tree, tmp_path / "file")
    assert listing.listed[:1] == names(7)


def test_a_quick_scan_leaves_no_file(
    tree: Path, tmp_path: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_WORTH_S", 10.0)
    with pytest.raises(AssertionError, match="exists"):
        listing.interrupt(tree, tmp_path / "file")


def test_nothing_is_believed_behind_damage(tree: Path, tmp_path: Path, listing: Listing) -> None:
    file = tmp_path / "file"
    listing.interrupt(tree, file)
    whole = file.read_bytes()
    for cut in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:cut])
        scan_on(tree, file, recalled=whole[:cut].count(b"\n") > 1)
        changed = bytearray(whole)
        changed[cut] ^= 1
        file.write_bytes(changed)
        scan = scan_tree(tree, 1, Scanning(kept=file))
        assert_same(replace(scan, recalled=False), scan_tree(tree))
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("other", ["root", "depth"])
def test_another_scan_takes_nothing_of_it(tree: Path, tmp_path: Path, listing: Listing, other: str) -> None:
    listing.interrupt(tree, tmp_path / "file")
    if other == "root":
        shutil.copytree(tree, tmp_path / "copy")
        assert not scan_tree(tmp_path / "copy", 1, Scanning(kept=tmp_path / "file")).recalled
    else:
        put(tree / "class0/inner/1.jpg")
        assert not scan_tree(tree, 2, Scanning(kept=tmp_path / "file")).recalled


@pytest.mark.parametrize("what", ["text", "link", "folder", "locked"])
def test_a_file_of_somebody_else_stays_as_it_is(tree: Path, tmp_path: Path, what: str) -> None:
    file, content = tmp_path / "file", b"mine\n"
    (tmp_path / "theirs").write_bytes(content)
    if what == "link":
        file.symlink_to("theirs")
    elif what == "folder":
        file.mkdir()
    else:
        file.write_bytes(content if what == "text" else b"")
    with (tmp_path / "theirs" if what == "folder" else file).open() as held:
        if what == "locked":
            fcntl.flock(held, fcntl.LOCK_EX)
        scan = scan_tree(tree, 1, Scanning(kept=file))
    assert_same(scan, scan_tree(tree))
    assert os.path.lexists(file)
    assert (tmp_path / "theirs").read_bytes() == content
    assert file.is_dir() or file.read_bytes() == (b"" if what == "locked" else content)


def test_a_picture_rewritten_in_its_place_ends_the_conversion_and_is_named(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    """Its folder does not show it: the picture does, when it is read."""
    out, recipe = tmp_path / "out", small_recipe("shards")
    listing.interrupt(tree, kept_path(out))
    picture = tree / "class1/2.jpg"
    picture.write_bytes(picture.read_bytes() + b"\0")
    with pytest.raises(SourceError, match=r"class1/2\.jpg: changed while it was converted"):
        convert(tree, out, recipe, workers=0)
    with pytest.raises(DatasetError, match="another source tree, or one that changed since"):
        convert(tree, out, recipe, workers=0)
    manifest = convert(tree, out, recipe, workers=0, overwrite=True).manifest
    assert manifest == convert(tree, tmp_path / "other", recipe, workers=0).manifest


def test_a_conversion_goes_on_from_a_scan_and_writes_the_same(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    out, recipe = tmp_path / "out", small_recipe("shards")
    listing.interrupt(tree, kept_path(out))
    manifest = convert(tree, out, recipe, workers=0).manifest
    assert listing.listed[:1] == names(7)
    assert manifest == convert(tree, tmp_path / "other", recipe, workers=0).manifest
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tree", "out", "other", ".out.precache-lock", ".other.precache-lock"}


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"update": True}])
def test_a_dataset_that_is_there_is_compared_with_a_whole_scan(
    tree: Path, tmp_path: Path, listing: Listing, options: dict[str, bool]
) -> None:
    """Else a picture that was rewritten since would pass for the one that was converted."""
    out, recipe = tmp_path / "out", small_recipe("shards")
    convert(tree, out, recipe, workers=0)
    listing.interrupt(tree, kept_path(out))
    picture = tree / "class1/2.jpg"
    content = bytearray(picture.read_bytes())
    content[-1] ^= 1
    picture.write_bytes(content)
    if options:
        assert convert(tree, out, recipe, workers=0, **options).published
    else:
        with pytest.raises(DatasetError, match=r"1 source picture changed since.*class1/2\.jpg"):
            convert(tree, out, recipe, workers=0)
    assert set(names(*range(_FOLDERS))) <= set(listing.listed)


def test_what_another_process_has_converted_meanwhile_is_not_compared_with_what_was_kept(
    tree: Path, tmp_path: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, recipe = tmp_path / "out", small_recipe("shards")
    listing.interrupt(tree, kept_path(out))
    plan = converting.plan_conversion

    def meanwhile(samples: Samples, recipe: Recipe) -> ConvertPlan:
        monkeypatch.setattr(converting, "plan_conversion", plan)
        convert(tree, out, recipe, workers=0)
        return plan(samples, recipe)

    monkeypatch.setattr(converting, "plan_conversion", meanwhile)
    with pytest.raises(DatasetError, match="another process has begun"):
        convert(tree, out, recipe, workers=0)
    assert not convert(tree, out, recipe, workers=0).published


def test_with_a_list_of_splits_the_scan_is_whole(tree: Path, tmp_path: Path, listing: Listing) -> None:
    out, recipe = tmp_path / "out", small_recipe("shards")
    listing.interrupt(tree, kept_path(out))
    (tmp_path / "list").write_text("class0/0.jpg,train\n")
    convert(tree, out, recipe, workers=0, split_list=tmp_path / "list")
    assert set(names(*range(_FOLDERS))) <= set(listing.listed)  # not all of it is read


def test_an_unfinished_conversion_is_gone_on_with_from_a_whole_scan(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    out, recipe = tmp_path / "out", small_recipe("shards")

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, recipe, workers=0, on_progress=stop)
    listing.interrupt(tree, kept_path(out))
    convert(tree, out, recipe, workers=0)
    assert set(names(*range(_FOLDERS))) <= set(listing.listed)


def test_a_destination_in_the_source_leaves_nothing_in_it(
    tree: Path, tmp_path: Path, listing: Listing
) -> None:
    before = sorted(tree.rglob("*"))
    listing.fails_at = "class7"
    with pytest.raises(SourceError, match="away for a moment"):
        convert(tree, tree / "out", small_recipe("shards"), workers=0)
    assert sorted(tree.rglob("*")) == before


def test_the_command_goes_on_and_leaves_nothing(tree: Path, tmp_path: Path, listing: Listing) -> None:
    listing.interrupt(tree, kept_path(tmp_path / "out"))
    done = run("precache", "convert", tree, tmp_path / "out", "--format", "shards", "--size", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not kept_path(tmp_path / "out").exists()
