"""Connection to a Ray cluster, for converting and for reading; and what is to be the same on all its nodes.

The cluster is running already, see `precache/cluster/README.md`. Every node must have the versions of this
machine, since bytes and pixels would differ where libraries do, and must see its files at the same paths.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from precache.errors import (
    DatasetError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    SourceError,
    os_reason,
)
from precache.packages import install_command

_ANSWER_S = 5.0
# What a client of HTTP/2 sends first, its settings being none; a server answers with its own (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES, _SETTINGS = 9, 4


def imported() -> Any:
    """The package `ray`; MissingDependencyError without it."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"the engine ray needs the extra 'ray' ({error}); run: {install_command('ray')}"
        ) from error
    return ray


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Be connected to a cluster in the block, see `connect`; a connection from before stays."""
    is_new = connect(address)
    try:
        yield
    finally:
        if is_new:
            imported().shutdown()


def connect(address: str | None = None) -> bool:
    """Connect this process to a cluster that runs; False if it is connected already.

    Args:
        address: `HOST:PORT` of its head; None or "auto": RAY_ADDRESS of the environment, else the cluster
            that this machine is a node of.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: there is no cluster.
    """
    ray = imported()
    if ray.is_initialized():
        if address not in (None, "auto", there := ray.get_runtime_context().gcs_address):
            raise SettingError(f"address {address!r}: this process is connected to {there}; leave it out")
        return False
    address = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if address not in (None, "", "auto"):
        _check_answers(str(address))
    handler = signal.getsignal(signal.SIGTERM)
    printed: list[str] = []
    try:
        with _capture_stderr(printed):
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reasons = [*(line.rpartition("] ")[2] for line in printed[-1:]), " ".join(str(error).split())]
        raise _no_cluster(address or "auto", f"{'; '.join(reasons)}"[:400]) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own there
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        # else it prints the last lines of the log of each node that dies
        worker._worker_logs_enabled = False
    return True


@contextmanager
def _capture_stderr(printed: list[str]) -> Iterator[None]:
    """Add to `printed`, at the end of the block, the lines that C++ code wrote on descriptor 2 in it."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            printed += file.read().decode(errors="replace").splitlines()


def _check_answers(address: str) -> None:
    """Raise SettingError unless something like a cluster answers: Ray itself takes minutes to give up."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise _no_cluster(address, "expected auto or HOST:PORT, the address that 'ray start' printed")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", ""):
                connection.sendall(_PREFACE)
                answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
                if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS:
                    raise _no_cluster(address, "something else answers there")
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, os_reason(error)) from error


def _no_cluster(address: str, reason: str) -> SettingError:
    return SettingError(
        f"address {address!r}: no Ray cluster ({reason}); start one, run this on a node of it, or "
        f"name it in RAY_ADDRESS: precache/cluster/README.md says how"
    )


def live_nodes(cpus: int) -> dict[str, str]:
    """Id -> name of each node that has so many CPUs."""
    return {
        node["NodeID"]: _node_name(node["NodeManagerAddress"], node["NodeID"])
        for node in imported().nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= cpus
    }


def this_node() -> str:
    """The name for messages of the node that this process works on."""
    ray = imported()
    return _node_name(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


def _node_name(address: str, node_id: str) -> str:
    return f"node {address} ({node_id[:8]})"


def versions() -> dict[str, str]:
    """What must be the same on every node, since bytes and pixels depend on it."""
    import precache  # which imports this
    from precache.pictures.kinds import made_by  # which needs PIL, and `precache doctor` runs without

    return {"precache": precache.__version__, **made_by()}


def check_versions(node: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise SettingError unless `node` has, as `found`, the versions of the program that is `expected`."""
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise SettingError(
                f"{node}: {name} is {found.get(name, 'missing')} there but {expected.get(name, 'missing')} "
                f"where the program runs, so bytes or pixels would differ; install the same on every node"
            )


def check_readable(node: str, look: Callable[[], object]) -> None:
    """Call `look`, which reads on `node` what all of them have to see.

    Raises:
        SourceError, DatasetError: what `look` raised, with the node and a remedy.
    """
    try:
        look()
    except PrecacheError as error:
        kind = SourceError if isinstance(error, SourceError) else DatasetError
        raise kind(f"{node}: {error}; mount it on every node at the same path, for the same user") from error


def last_line(error: Exception) -> str:
    """What Ray's errors, which are long, say in the end."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]
