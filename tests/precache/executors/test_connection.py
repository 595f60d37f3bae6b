"""What is said before anything is planned: no cluster, no Ray, an engine that there is not."""

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

from precache import executors
from precache.commands.running import lines_of_nodes
from precache.errors import MissingDependencyError, SettingError
from tests.command import ROOT, check_bad_input, run_here


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *arguments: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "address", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:99999999", "closed", "web"]
)
def test_an_address_without_a_cluster_is_said_in_one_line_and_soon(
    address: str, web_server: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself tries for minutes."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests may have a cluster
    address = {"closed": f"127.0.0.1:{closed_port()}", "web": web_server}.get(address, address)
    command = ["convert", raw_tree, "out", "--format", "shards", "--engine", "ray", "--address", address]
    start_s = time.monotonic()
    result = run_here("precache", *command, cwd=tmp_path)
    check_bad_input(result, repr(address), "no Ray cluster", "precache/cluster/README.md")
    assert time.monotonic() - start_s < 30
    assert list(tmp_path.iterdir()) == []


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingDependencyError, match=r"the engine ray needs the extra 'ray'.*precache\[ray\]"
    ):
        executors.connected("ray")


def test_an_unknown_engine_is_named_with_the_choices() -> None:
    with pytest.raises(SettingError, match="unknown engine 'rai'; choose from: local, ray"):
        executors.connected("rai")


def test_an_address_for_this_machine_is_refused() -> None:
    with pytest.raises(SettingError, match="address 'auto' is for the engine ray; this one is 'local'"):
        executors.connected("local", "auto")


def test_ray_is_imported_for_its_engine_alone() -> None:
    code = "import sys, precache.cli, precache.executors; sys.exit('ray' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_of_many_nodes_the_slowest_are_named() -> None:
    lines = lines_of_nodes({f"node {number}": 1000.0 + number for number in range(100, 0, -1)})
    assert lines[0] == "node 1: 1,001 images/s"
    assert lines[16:] == ["84 other nodes: 1,017 to 1,100 images/s"]
    assert lines_of_nodes({}) == []
