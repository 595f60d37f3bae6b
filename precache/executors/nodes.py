"""The machines of a cluster: what each must have in common with the one that plans, and what each has done.

Bytes would differ where libraries do, and a folder that is not shared is found empty, or filled, by one
machine alone. So every node is asked before the first task; a worker on one that joins later asks itself.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from precache.errors import DatasetError, PrecacheError, SettingError, SourceError
from precache.storage import open_new, read_regular, temporary_path
from precache.storage.urls import Location, Url


def unasked(node: str) -> None:
    """The check of nodes of which nothing is expected."""


@dataclass(slots=True)
class Nodes:
    """For an engine that runs on other machines.

    Attributes:
        check: called with the name of a node, on it, before its first task: raises what is wrong with it.
        units: by the names of nodes, the units that each has done; filled by the engine.
    """

    check: Callable[[str], None]
    units: dict[str, int] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.perf_counter)

    @property
    def units_per_s(self) -> dict[str, float]:
        """`units` over the time since this was made."""
        took_s = time.perf_counter() - self._began_s
        return {name: units / took_s for name, units in self.units.items()}


@dataclass(frozen=True, slots=True)
class Shared:
    """What every node must have as the machine has it that made this.

    Attributes:
        versions: of what decides over bytes, by name.
        probe: a file in the folder that is written to, by its absolute path; None at a URL.
        token: what it holds.
        sources: (absolute path, `_fingerprint`) of each folder and file that is read.
        read: reads a sample; raises a SourceError where that cannot be.
    """

    versions: dict[str, str]
    probe: Path | None
    token: bytes
    sources: tuple[tuple[str, str], ...]
    read: Callable[[], object]

    def check(self, node: str) -> None:
        """Raise what is wrong with this machine, which messages call `node`.

        Raises:
            SettingError: versions differ.
            DatasetError: the folder that is written to is another one here, or cannot be written to.
            SourceError: the source is.
        """
        here = versions()
        for name in sorted({*self.versions, *here}):
            if self.versions.get(name) != here.get(name):
                there, at_home = here.get(name, "missing"), self.versions.get(name, "missing")
                raise SettingError(
                    f"{node}: {name} is {there} there and {at_home} where the command runs, so bytes would "
                    f"differ; install the same on every node"
                )
        if self.probe is not None:
            self._check_destination(node, self.probe)
        for path, fingerprint in self.sources:
            try:
                found = _fingerprint(path)
            except OSError as error:
                raise SourceError(f"{node}: cannot see {path} ({error.strerror}); {_MOUNT}") from error
            if found != fingerprint:
                raise SourceError(f"{node}: {path} holds something else there than here; {_MOUNT}")
        try:
            self.read()
        except PrecacheError as error:
            raise SourceError(f"{node}: {error}") from error

    def _check_destination(self, node: str, probe: Path) -> None:
        folder = probe.parent
        try:
            same = read_regular(probe) == self.token
        except FileNotFoundError:
            same = False
        except OSError as error:
            raise DatasetError(f"{node}: cannot read {folder} ({error.strerror}); {_MOUNT}") from error
        if not same:
            raise DatasetError(f"{node}: {folder} is not there, or another folder than here; {_MOUNT}")
        own = temporary_path(probe)
        try:
            os.close(open_new(own))
            own.unlink()
        except OSError as error:
            raise DatasetError(
                f"{node}: cannot write to {folder} ({error.strerror}); mount it for writing, by the same user"
            ) from error


_MOUNT = "mount it on every node at the same path"


def versions() -> dict[str, str]:
    """What must be the same on every node: bytes depend on it."""
    import precache  # which imports this
    from precache.pictures.codecs import made_by  # which needs PIL, and `precache doctor` runs without

    return {"precache": precache.__version__, **made_by()}


@contextmanager
def nodes_of(
    engine: str, folder: Location, name: str, sources: Sequence[Location], read: Callable[[], object]
) -> Iterator[Nodes]:
    """The nodes of an engine that writes into `folder`, which holds a file for them during the block.

    At a URL there is none: whether a node can write there, its first shard tells.

    Args:
        name: of a file in `folder`; the file of the block is named as one that was left of writing it.
        sources: folders and files that are read.
        read: see `Shared`.
    """
    if engine == "local":
        yield Nodes(unasked)
        return
    if isinstance(folder, Url):
        yield Nodes(Shared(versions(), None, b"", _seen(sources), read).check)
        return
    folder = Path(os.path.abspath(folder))
    probe = temporary_path(folder / name)
    token = probe.name.encode()
    with open(open_new(probe), "wb") as file:
        file.write(token)
    try:
        yield Nodes(Shared(versions(), probe, token, _seen(sources), read).check)
    finally:
        probe.unlink(missing_ok=True)


def _seen(sources: Sequence[Location]) -> tuple[tuple[str, str], ...]:
    """Of what lies in folders: what is at a URL every node sees, or its first picture tells."""
    paths = [os.path.abspath(place) for place in sources if not isinstance(place, Url)]
    return tuple((path, _fingerprint(path)) for path in paths)


def _fingerprint(path: str) -> str:
    """Of a folder the names in it, of a file its size."""
    if os.path.isdir(path):
        names = sorted(os.fsencode(name) for name in os.listdir(path))
        return f"{len(names)} names, {hashlib.sha256(bytes(1).join(names)).hexdigest()}"
    return f"{os.stat(path).st_size} bytes"
