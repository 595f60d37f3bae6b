"""What each node must have in common with the machine that plans: asked here of folders that change."""

import os
import re
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from precache.conversion.journal import JOURNAL_NAME
from precache.engines import nodes_of
from precache.errors import DatasetError, PrecacheError, SourceError
from precache.pictures.reading import read_picture
from precache.storage import is_leftover


def empty(folder: Path) -> None:
    """As where nothing is mounted."""
    for path in folder.iterdir():
        path.unlink()


def close(folder: Path) -> None:
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda source, out: shutil.rmtree(source), SourceError, "{source}/1.jpg: disappeared"),
        (lambda source, out: empty(source), SourceError, "{source}/1.jpg: disappeared"),
        (lambda source, out: (source / "1.jpg").write_bytes(b""), SourceError, "1.jpg: changed while"),
        (lambda source, out: shutil.rmtree(out), DatasetError, "{out} is missing there, or another folder"),
        (lambda source, out: empty(out), DatasetError, "{out} is missing there, or another folder"),
        pytest.param(
            lambda source, out: close(out), DatasetError, "cannot read and write in {out} (Perm",
            marks=pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere"),
        ),
    ],
)  # fmt: skip
def test_a_folder_that_a_node_does_not_share_is_named_with_the_node(
    change: Callable[[Path, Path], None], kind: type[PrecacheError], said: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    picture = source / "1.jpg"
    picture.write_bytes(b"a picture")
    as_scanned = (picture.stat().st_size, picture.stat().st_mtime_ns)
    read = partial(read_picture, str(picture), as_scanned=as_scanned)
    with nodes_of("ray", out, JOURNAL_NAME, read) as nodes:
        (file,) = out.iterdir()
        assert is_leftover(file, [JOURNAL_NAME]), "a killed run leaves it to be tidied"
        nodes.check("node a")
        change(source, out)
        with pytest.raises(
            kind, match=rf"^node a: .*{re.escape(said.format(source=source, out=out))}.*mount"
        ):
            nodes.check("node a")
        if out.exists():
            out.chmod(stat.S_IRWXU)
    assert not out.exists() or list(out.iterdir()) == []
