"""Engines that run a plan: processes of this machine, or an existing Ray cluster.

An engine is a function with the signature of `processes.run`. Enter `engine_connection` first: its error says
in one line what an engine lacks, before anything is planned.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from precache.engines import connector, processes, ray
from precache.engines.cpus import available_cpus
from precache.engines.processes import KILLED, Ticks, run, worker_count
from precache.errors import SettingError, check_choice

__all__ = [
    "ENGINES", "KILLED", "Ticks", "available_cpus", "engine_connection", "run", "worker_count",
]  # fmt: skip

ENGINES: dict[str, Callable[..., Generator[Any, None, None]]] = {"local": processes.run, "ray": ray.run}


def engine_connection(engine: str, address: str | None = None) -> AbstractContextManager[None]:
    """Return a context manager that connects `engine`: `ray` to the cluster at `address`, `local` to nothing.

    Raises:
        SettingError: there is no such engine, or no cluster there.
        MissingDependencyError: `ray` is not installed.
    """
    check_choice("engine", engine, ENGINES)
    if engine == "ray":
        return connector.cluster_connection(address)
    if address is not None:
        raise SettingError(f"address {address!r} is for the engine ray; this one is {engine!r}")
    return nullcontext()
