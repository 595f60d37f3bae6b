"""What is said before anything is planned: no cluster, no Ray, an unknown engine; and what a cluster did."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from precache import engines
from precache.cli.convert import lines_of_nodes
from precache.errors import PrecacheError
from tests.command import ROOT, check_bad_input, run_here


@pytest.fixture(scope="module")
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *arguments: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999999", "closed", "web"])
def test_an_address_without_a_cluster_is_refused_in_one_line_and_soon(
    address: str, web_server: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself tries for minutes."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests may have a cluster
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
    address = {"closed": closed, "web": web_server}.get(address, address)
    command = ["convert", raw_tree, "out", "--format", "shards", "--engine", "ray", "--address", address]
    start_s = time.monotonic()
    result = run_here("precache", *command, cwd=tmp_path)
    check_bad_input(result, repr(address), "no Ray cluster", "precache/cluster/README.md")
    assert time.monotonic() - start_s < 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "address", "said"),
    [
        ("ray", None, r"the engine ray needs the extra 'ray'.*precache\[ray\]"),
        ("rai", None, "unknown engine 'rai'; choose from: local, ray"),
        ("local", "auto", "address 'auto' is for the engine ray; this one is 'local'"),
    ],
)
def test_an_engine_that_cannot_be_used_says_why(
    engine: str, address: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrecacheError, match=said):
        engines.connected(engine, address)


def test_ray_is_imported_for_its_engine_alone() -> None:
    code = "import sys, precache.cli.main, precache.engines; sys.exit('ray' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_of_many_nodes_the_slowest_are_named() -> None:
    lines = lines_of_nodes({f"node {number}": 1000.0 + number for number in range(100, 0, -1)})
    assert lines[0] == "node 1: 1,001 images/s"
    assert lines[16:] == ["84 other nodes: 1,017 to 1,100 images/s"]
    assert lines_of_nodes({}) == []
