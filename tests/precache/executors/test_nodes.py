"""What each node must have in common with the machine that plans: asked here of folders that change."""

import os
import re
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from precache.conversion.journal_header import JOURNAL_NAME
from precache.errors import DatasetError, PrecacheError, SourceError
from precache.executors import nodes_of
from precache.pictures.reading import read_picture
from precache.storage import is_leftover


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "1.jpg").write_bytes(b"a picture")
    return tmp_path / "source"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def empty(folder: Path) -> None:
    """As where nothing is mounted."""
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda source, out: shutil.rmtree(source), SourceError, "cannot see {source} (No such file or "),
        (lambda source, out: empty(source), SourceError, "{source} holds something else there than here"),
        (lambda source, out: shutil.rmtree(out), DatasetError, "{out} is not there, or another folder"),
        (lambda source, out: empty(out), DatasetError, "{out} is not there, or another folder"),
        (lambda source, out: (source / "1.jpg").write_bytes(b""), SourceError, "1.jpg: changed while"),
    ],
)
def test_a_folder_that_a_node_does_not_share_is_named_with_the_node(
    change: Callable[[Path, Path], None], kind: type[PrecacheError], said: str, source: Path, folder: Path
) -> None:
    picture = source / "1.jpg"
    as_scanned = (picture.stat().st_size, picture.stat().st_mtime_ns)
    read = partial(read_picture, str(picture), as_scanned=as_scanned)
    with nodes_of("ray", folder, JOURNAL_NAME, [source], read) as nodes:
        nodes.check("node a")
        change(source, folder)
        with pytest.raises(kind, match=rf"^node a: .*{re.escape(said.format(source=source, out=folder))}"):
            nodes.check("node a")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_a_node_cannot_write_to_is_named(source: Path, folder: Path) -> None:
    with nodes_of("ray", folder, JOURNAL_NAME, [source], lambda: None) as nodes:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(DatasetError, match=rf"^node a: cannot write to {folder} \(Permission denied\)"):
            nodes.check("node a")
        folder.chmod(stat.S_IRWXU)


def test_the_file_that_nodes_look_for_goes_with_the_run_and_is_known_as_a_leftover(
    source: Path, folder: Path
) -> None:
    with nodes_of("ray", folder, JOURNAL_NAME, [source], lambda: None) as nodes:
        nodes.check("node a")
        (file,) = folder.iterdir()
        assert is_leftover(file, [JOURNAL_NAME])
    assert list(folder.iterdir()) == []
