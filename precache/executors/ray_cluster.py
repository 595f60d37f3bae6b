"""The connection to a Ray cluster, and its nodes."""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from precache.errors import MissingDependencyError, SettingError
from precache.executors.ray_node import node_name
from precache.packages import install_extra

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
            f"the engine ray needs the extra 'ray' ({error}); run: {install_extra('ray')}"
        ) from error
    return ray


@contextmanager
def connected(ray: Any, address: str | None = None) -> Iterator[None]:
    """Be connected to a cluster for the duration of the block; a connection that is there already is used.

    Args:
        ray: the package.
        address: `HOST:PORT` of its head; None or "auto": RAY_ADDRESS of the environment, else the cluster
            that this machine is a node of.

    Raises:
        SettingError: there is none.
    """
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise SettingError(f"address {address!r}: this process is connected to {there}; leave it out")
        yield
        return
    address = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if address not in (None, "", "auto"):
        _check_answers(str(address))
    of_signal = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    try:
        with _hushed(said):
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reasons = [*(line.rpartition("] ")[2] for line in said[-1:]), " ".join(str(error).split())]
        raise _no_cluster(address or "auto", f"{'; '.join(reasons)}"[:400]) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, of_signal)  # Ray has put its own there
    try:
        worker = ray._private.worker
        if hasattr(worker, "_worker_logs_enabled"):
            # else it prints the last lines of the log of each node that dies
            worker._worker_logs_enabled = False
        yield
    finally:
        ray.shutdown()


def live_nodes(ray: Any, cpus: int) -> dict[str, str]:
    """Id -> name of each node that has so many CPUs."""
    return {
        node["NodeID"]: node_name(node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= cpus
    }


@contextmanager
def _hushed(said: list[str]) -> Iterator[None]:
    """Keep what C++ code prints on descriptor 2 off the terminal for the duration of the block.

    Args:
        said: gets its lines at the end.
    """
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said += file.read().decode(errors="replace").splitlines()


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
        raise _no_cluster(address, getattr(error, "strerror", None) or str(error)) from error


def _no_cluster(address: str, reason: str) -> SettingError:
    return SettingError(
        f"address {address!r}: no Ray cluster ({reason}); start one, or run the command on a node of it: "
        f"precache/cluster/README.md says how"
    )
