"""The machines of a cluster: which versions and folders each must share with this one, and how fast each is.

Bytes would differ where libraries do, and what is written into a folder that is not shared is lost. So
every node is checked before the first task; a worker on a node that joins later checks it itself.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from precache.errors import DatasetError, PrecacheError, SettingError, SourceError
from precache.storage import open_new, read_regular, temporary_path
from precache.storage.urls import Location, Url

_MOUNT = "mount it on every node at the same path"


def no_check(node: str) -> None:
    """A check of nodes that accepts every one."""


@dataclass(slots=True)
class Nodes:
    """What an engine needs that runs on other machines.

    Attributes:
        check: called with the name of a node, on it, before its first task: raises what is wrong with it.
        units: by the names of nodes, the units that each has done; filled by the engine.
    """

    check: Callable[[str], None]
    units: dict[str, int] = field(default_factory=dict)
    _start_s: float = field(default_factory=time.perf_counter)

    @property
    def units_per_s(self) -> dict[str, float]:
        """`units` over the time since this was made."""
        elapsed_s = time.perf_counter() - self._start_s
        return {name: units / elapsed_s for name, units in self.units.items()}


@contextmanager
def nodes_of(engine: str, folder: Location, name: str, read: Callable[[], object]) -> Iterator[Nodes]:
    """The nodes of an engine that writes into `folder`, where a small file shows them that it is shared.

    At a URL there is no such file: the first shard shows whether a node can write there.

    Args:
        name: of a file in `folder`; the small file is named as a leftover of writing it.
        read: reads a sample; raises a SourceError where the source cannot be read.
    """
    if engine == "local":
        yield Nodes(no_check)
        return
    if isinstance(folder, Url):
        yield Nodes(_Expected(versions(), None, read).check)
        return
    probe = temporary_path(Path(os.path.abspath(folder)) / name)
    with open(open_new(probe), "wb") as file:
        file.write(probe.name.encode())
    try:
        yield Nodes(_Expected(versions(), probe, read).check)
    finally:
        probe.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """What must be the same on every node, since bytes depend on it."""
    import precache  # which imports this
    from precache.pictures.kinds import made_by  # which needs PIL, and `precache doctor` runs without

    return {"precache": precache.__version__, **made_by()}


@dataclass(frozen=True, slots=True)
class _Expected:
    """What every node must have as the machine that plans has it.

    Attributes:
        versions: of what the bytes depend on, by name.
        probe: a file in the folder that is written to, which holds its own name; None at a URL.
        read: as of `nodes_of`.
    """

    versions: dict[str, str]
    probe: Path | None
    read: Callable[[], object]

    def check(self, node: str) -> None:
        """Raise what is wrong with this machine, whose name in messages is `node`.

        Raises:
            SettingError: versions differ.
            DatasetError: the folder that is written to is another one here, or cannot be written to.
            SourceError: a sample cannot be read here.
        """
        found = versions()
        for name in sorted({*self.versions, *found}):
            if self.versions.get(name) != found.get(name):
                there, expected = found.get(name, "missing"), self.versions.get(name, "missing")
                raise SettingError(
                    f"{node}: {name} is {there} there but {expected} where the command runs, so bytes would "
                    f"differ; install the same on every node"
                )
        if self.probe is not None:
            _check_folder(node, self.probe)
        try:
            self.read()
        except PrecacheError as error:
            raise SourceError(f"{node}: {error}; if it is not mounted there, {_MOUNT}") from error


def _check_folder(node: str, probe: Path) -> None:
    folder, written = probe.parent, temporary_path(probe)
    try:
        is_shared = read_regular(probe) == probe.name.encode()
        os.close(open_new(written))
        written.unlink()
    except FileNotFoundError:
        is_shared = False
    except OSError as error:
        raise DatasetError(
            f"{node}: cannot read and write in {folder} ({error.strerror}); {_MOUNT}, for the same user"
        ) from error
    if not is_shared:
        raise DatasetError(f"{node}: {folder} is missing there, or another folder; {_MOUNT}")
