"""Where a plan runs: in processes of this machine, or on an existing Ray cluster.

An engine is a function with the signature of `run`. Enter `connected` first: it says in one line what is
missing for an engine, before anything is planned.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from precache.engines import connector, processes, ray
from precache.engines.processes import (
    KILLED,
    Nodes,
    Ticks,
    available_cpus,
    is_callback_error,
    mark_callback_errors,
    no_check,
    progress_counter,
    run,
    worker_count,
)
from precache.errors import SettingError, check_choice
from precache.storage.urls import Location

__all__ = [
    "ENGINES", "KILLED", "Nodes", "Ticks", "available_cpus", "connected", "is_callback_error",
    "mark_callback_errors", "nodes_of", "progress_counter", "run", "worker_count",
]  # fmt: skip

ENGINES: dict[str, Callable[..., Generator[Any, None, None]]] = {"local": processes.run, "ray": ray.run}


def connected(engine: str, address: str | None = None) -> AbstractContextManager[None]:
    """What `engine` needs for the duration of the block: for `ray`, a connection to the cluster at `address`.

    Raises:
        SettingError: there is no such engine, or no cluster there.
        MissingDependencyError: `ray` is not installed.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "ray":
        return connector.connected(address)
    if address is not None:
        raise SettingError(f"address {address!r} is for the engine ray; this one is {engine!r}")
    return nullcontext()


def nodes_of(
    engine: str, folder: Location, name: str, read: Callable[[], object]
) -> AbstractContextManager[Nodes]:
    """The nodes of an engine that writes into `folder`, see `precache.engines.ray.nodes_of`."""
    return nullcontext(Nodes(no_check)) if engine == "local" else ray.nodes_of(folder, name, read)
