"""Write down what loaders serve in a program, and send it a signal at one of its batches.

    python -m tests.loaders.examples.served FILE SIGNAL RANK SPLIT EPOCH BATCH MODULE ARGUMENTS...

runs MODULE as `python -m` does; each batch becomes a line of FILE, with the rank in the place of `{}`:
[split, epoch, number, ids]. Signal 0 sends none.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from loaders import Batch
from loaders.loader import Loader

Served = list[tuple[str, int, int, list[int]]]
"""Split, epoch, number of the batch, ids."""


@contextmanager
def writing_down(
    file: Path, signal: int = 0, split: str = "", place: tuple[int, int] = (0, 0)
) -> Iterator[None]:
    """Append a line to `file` for each batch; with `signal`, send it to this process at that batch."""
    take = Loader.take

    def take_and_note(self: Any, taken: tuple[int, int]) -> Batch:
        batch = take(self, taken)
        with open(file, "a") as opened:
            opened.write(json.dumps([self.spec.split, *taken, batch.ids[~batch.padding].tolist()]) + "\n")
        if signal and (self.spec.split, taken) == (split, place):
            os.kill(os.getpid(), signal)
        return batch

    with mock.patch.object(Loader, "take", take_and_note):
        yield


def read(file: Path, split: str = "train") -> Served:
    """What was written down of a split."""
    return [tuple(row) for row in map(json.loads, file.read_text().splitlines()) if row[0] == split]


def ids_of(served: Served, epoch: int) -> list[int]:
    """In the order served."""
    return [i for _, of, _, ids in served if of == epoch for i in ids]


if __name__ == "__main__":
    name, number, of_rank, of_split, of_epoch, of_batch, module, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    sys.argv = [module, *arguments]
    sent = int(number) if rank == of_rank else 0
    with writing_down(Path(name.format(rank)), sent, of_split, (int(of_epoch), int(of_batch))):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
