"""What is said before anything is planned: no cluster, no Ray, nodes that lack a folder."""

import http.server
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from precache import engines
from precache.conversion.journal import JOURNAL_NAME
from precache.engines import nodes_of
from precache.errors import DatasetError, PrecacheError, SourceError
from precache.pictures.reading import read_picture
from precache.storage import is_leftover
from tests.cloud.storages import listening
from tests.command import check_bad_input, run_here


@pytest.mark.parametrize("address", ["nonsense", "closed", "web"])
def test_an_address_without_a_cluster_is_refused_in_one_line_and_soon(
    address: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself tries for minutes."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests may have a cluster
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
    start_s = time.monotonic()
    with listening(http.server.BaseHTTPRequestHandler, log_message=lambda *_: None) as web:
        address = {"closed": closed, "web": web.removeprefix("http://")}.get(address, address)
        command = ["convert", raw_tree, "out", "--format", "shards", "--engine", "ray", "--address", address]
        result = run_here("precache", *command, cwd=tmp_path)
    check_bad_input(result, repr(address), "no Ray cluster", "precache/cluster/README.md")
    assert time.monotonic() - start_s < 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "address", "said"), [("ray", None, r"precache\[ray\]"), ("local", "auto", "engine ray")]
)
def test_an_engine_that_cannot_be_used_says_why(
    engine: str, address: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrecacheError, match=said):
        engines.connected(engine, address)


def empty(folder: Path) -> None:
    """As where nothing is mounted."""
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda source, out: empty(source), SourceError, "{source}/1.jpg: disappeared"),
        (lambda source, out: (source / "1.jpg").write_bytes(b""), SourceError, "1.jpg: changed while"),
        (lambda source, out: shutil.rmtree(out), DatasetError, "{out} is missing there, or another folder"),
        (lambda source, out: empty(out), DatasetError, "{out} is missing there, or another folder"),
        pytest.param(
            lambda source, out: out.chmod(stat.S_IRUSR | stat.S_IXUSR), DatasetError, "{out} (Perm",
            marks=pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere"),
        ),
    ],
)  # fmt: skip
def test_a_folder_that_a_node_does_not_share_is_named_with_the_node(
    change: Callable[[Path, Path], None], kind: type[PrecacheError], said: str, tmp_path: Path
) -> None:
    """Asked here of folders that change."""
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
        pattern = rf"^node a: .*{re.escape(said.format(source=source, out=out))}.*mount"
        with pytest.raises(kind, match=pattern):
            nodes.check("node a")
        if out.exists():
            out.chmod(stat.S_IRWXU)
    assert not out.exists() or list(out.iterdir()) == []
