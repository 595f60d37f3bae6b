"""A tree that is read slowly, so that a test can kill the readers meanwhile; and a program that converts it.

    python -m tests.precache.engines.slow MARKS precache-arguments...

Workers of a cluster import this file themselves.
"""

import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from precache.sources.base import SampleRef, Scan
from precache.sources.tree import TreeSource

SECONDS = 0.03


@dataclass(frozen=True)
class SlowSource:
    """A tree of which each picture takes `SECONDS` to read.

    Attributes:
        source: the tree.
        marks: folder in which each process that reads has a file, named by its id, with the id of its node.
        deadly: path of a picture that kills its reader, as the kernel does when memory runs out.
    """

    source: TreeSource
    marks: Path
    deadly: str = ""

    @property
    def root(self) -> Path:
        return self.source.root

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.source.paths

    def scan(self) -> Scan:
        scan = self.source.scan()
        return replace(scan, source=replace(self, source=scan.source))

    def where(self, ref: SampleRef) -> str:
        return self.source.where(ref)

    def read(self, ref: SampleRef, max_pixels: int) -> Any:
        mark = self.marks / str(os.getpid())
        if not mark.exists():
            mark.with_suffix(".new").write_text(_node_id())
            mark.with_suffix(".new").rename(mark)
        if ref.path == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SECONDS)
        return self.source.read(ref, max_pixels)


def _node_id() -> str:
    if "ray" not in sys.modules:
        return ""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def readers(marks: Path) -> dict[int, str]:
    """Return process id -> node id of the processes that have read a picture."""
    return {int(mark.name): mark.read_text() for mark in marks.iterdir() if not mark.suffix}


if __name__ == "__main__":
    from precache.cli import commandline
    from precache.cli.main import main

    def open_slow(path: str, *options: object) -> Any:
        # imported by this name, because workers cannot unpickle a class of __main__
        slow = importlib.import_module("tests.precache.engines.slow")
        return slow.SlowSource(TreeSource(Path(path), 1), Path(sys.argv[1]))

    with mock.patch("precache.conversion.convert.open_source", open_slow):
        sys.exit(commandline.run(main, "precache", sys.argv[2:]))
