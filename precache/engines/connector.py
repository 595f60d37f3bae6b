"""Connect to a Ray cluster, to convert or to read, and check that its nodes agree with this machine.

The cluster is running already, see `precache/cluster/README.md`. Every node needs this machine's versions of
packages, because others may give other bytes and pixels, and must see its files at the same paths.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from precache.errors import (
    DatasetError,
    MissingDependencyError,
    PrecacheError,
    SettingError,
    SourceError,
    os_reason,
)
from precache.packages import install_command
from precache.pictures.kinds import decoder_versions

_ANSWER_S = 5.0
# The first bytes of an HTTP/2 client, without settings; a server answers with its own (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES, _SETTINGS = 9, 4


def import_ray() -> Any:
    """Return the package `ray`; MissingDependencyError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"the engine ray needs the extra 'ray' ({error})", remedy=f"run: {install_command('ray')}"
        ) from error
    return ray


@contextmanager
def cluster_connection(address: str | None = None) -> Iterator[None]:
    """Connect to a cluster for the block, see `connect`; an earlier connection stays afterwards."""
    is_new = connect(address)
    try:
        yield
    finally:
        if is_new:
            import_ray().shutdown()


def connect(address: str | None = None) -> bool:
    """Connect this process to a running cluster, unless it is connected already.

    Args:
        address: `HOST:PORT` of its head; None or "auto": RAY_ADDRESS of the environment, else the cluster
            that this machine is a node of.

    Returns:
        Whether the connection is new.

    Raises:
        MissingDependencyError: Ray is not installed.
        SettingError: there is no cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        current_address = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", current_address):
            raise SettingError(
                f"address {address!r}: this process is connected to {current_address}", remedy="leave it out"
            )
        return False
    address = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address
    if address not in (None, "", "auto"):
        _check_answers(str(address))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise _no_cluster_error(address or "auto", " ".join(str(error).split())[:400]) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # `ray.init` installs a handler of its own
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        # so that Ray does not print the last lines of the log of each node that dies
        worker._worker_logs_enabled = False
    return True


def _check_answers(address: str) -> None:
    """Raise SettingError unless an HTTP/2 server, as a cluster has, answers: Ray takes minutes to give up."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise _no_cluster_error(address, "expected auto or HOST:PORT, the address that 'ray start' printed")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", ""):
                connection.sendall(_PREFACE)
                answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
                if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS:
                    raise _no_cluster_error(address, "something else answers there")
    except (OSError, OverflowError) as error:
        raise _no_cluster_error(address, os_reason(error)) from error


def _no_cluster_error(address: str, reason: str) -> SettingError:
    return SettingError(
        f"address {address!r}: no Ray cluster ({reason})",
        remedy="start one, run this on a node of it, or name it in RAY_ADDRESS: "
        "precache/cluster/README.md says how",
    )


def live_nodes(cpus: int) -> dict[str, str]:
    """Return id -> name of each live node that has at least so many CPUs."""
    return {
        node["NodeID"]: _node_name(node["NodeManagerAddress"], node["NodeID"])
        for node in import_ray().nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= cpus
    }


def this_node() -> str:
    """Return the name, for messages, of the node that this process runs on."""
    ray = import_ray()
    return _node_name(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


def _node_name(address: str, node_id: str) -> str:
    return f"node {address} ({node_id[:8]})"


def versions() -> dict[str, str]:
    """Return the versions that bytes and pixels depend on, which must be the same on every node."""
    import precache  # here, because it imports this module

    return {"precache": precache.__version__, **decoder_versions()}


class Origin(NamedTuple):
    """Program that asks nodes to do something: its working folder and its `versions`."""

    folder: str
    versions: dict[str, str]

    @classmethod
    def here(cls, installed: dict[str, str]) -> "Origin":
        """Describe this program, with the versions `installed` here."""
        return cls(os.getcwd(), installed)


def enter_node(origin: Origin, installed: Mapping[str, str]) -> str:
    """Prepare this worker for what `origin` asks for; return the name of its node.

    Relative paths begin in the folder of `origin` from then on.

    Raises:
        SettingError: the versions `installed` on this node are others.
    """
    with suppress(OSError):  # what is missing without it is found by `check_readable`
        os.chdir(origin.folder)
    node, expected = this_node(), origin.versions
    for name in sorted({*expected, *installed}):
        if expected.get(name) != installed.get(name):
            raise SettingError(
                f"{node}: {name} is {installed.get(name, 'missing')} there but "
                f"{expected.get(name, 'missing')} where the program runs, so bytes or pixels would differ",
                remedy="install the same on every node",
            )
    return node


def check_readable(node: str, read: Callable[[], object]) -> None:
    """Call `read`, which reads on `node` a file that every node must see.

    Raises:
        SourceError, DatasetError: the error of `read`, with the node and a remedy.
    """
    try:
        read()
    except PrecacheError as error:
        kind = SourceError if isinstance(error, SourceError) else DatasetError
        raise kind(
            f"{node}: {error}", remedy="mount it on every node at the same path, for the same user"
        ) from error


def last_line(error: Exception) -> str:
    """Return the last line of one of Ray's long error messages, which holds the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]
