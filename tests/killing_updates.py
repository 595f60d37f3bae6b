"""Kill an update at its N-th call of the system, for every N. Run as a script: it forks.

    python -m tests.killing_updates TREE FOLDER [FIRST STEP]

Prints how many moments there were; an AssertionError says at which one something was lost. The update is the
second one, so that it has files of the first to remove; it adds, removes, changes and rejects pictures.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from precache import convert, open_dataset, verify
from tests.killing import contents, in_a_fork, recipe


def update(tree: Path, out: Path, workers: int = 0) -> None:
    convert(tree, out, recipe(16), workers=workers, update=True, max_rejects=0.5)


def grow(tree: Path, times: int) -> None:
    """Change the tree, another way each time: a picture gone, one changed, one broken, a new class."""
    classes = sorted(path for path in tree.iterdir() if path.is_dir())
    pictures = sorted(path for path in classes[0].iterdir() if path.suffix == ".jpg")
    pictures[0].unlink()
    shutil.copy(sorted(classes[1].iterdir())[0], pictures[1])
    (classes[0] / f"broken-{times}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(times))
    shutil.copytree(classes[1], tree / f"00{times}.new")


def attack(tree: Path, folder: Path, first: int = 1, step: int = 1) -> int:
    """Kill at each call, or each `step`th from `first` on, then run the same command; the last call."""
    folder.mkdir()
    before, out, whole_run = folder / "before", folder / "out", folder / "expected"
    update(tree, before)
    grow(tree, 1)
    update(tree, before)
    old = open_dataset(before)
    assert len(old.manifest.updates) == 1
    grow(tree, 2)
    shutil.copytree(before, whole_run)
    update(tree, whole_run)
    expected, was = contents(whole_run), contents(before)
    for moment in range(first, 10_000, step):
        shutil.copytree(before, out)
        whole = in_a_fork(partial(update, tree, out), moment)
        for file in old.manifest.files:
            assert (out / file.name).read_bytes() == was[file.name], f"call {moment}: {file.name}"
        assert verify(out) == [], f"call {moment}"
        assert open_dataset(out).digest in (old.digest, open_dataset(whole_run).digest), f"call {moment}"
        assert whole or in_a_fork(partial(update, tree, out))
        assert contents(out) == expected, f"call {moment}: {sorted(contents(out))}"
        assert {path.name for path in folder.iterdir()} == {"before", "out", "expected"}, f"call {moment}"
        shutil.rmtree(out)
        if whole:
            return moment
    raise AssertionError("it does not end")


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # what is killed loses no page of the system's cache
    print(attack(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))
