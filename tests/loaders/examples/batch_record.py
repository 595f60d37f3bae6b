"""Run a program, record the batches that its loaders serve, and send it a signal at one of them.

    python -m tests.loaders.examples.batch_record FILE SIGNAL RANK SPLIT EPOCH BATCH MODULE ARGUMENTS...

runs MODULE as `python -m` does. Each batch becomes a line of FILE, in whose name `{}` stands for the rank:
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

ServedBatches = list[tuple[str, int, int, list[int]]]
"""Split, epoch, number of the batch and ids of each batch."""


@contextmanager
def record_batches(
    file: Path, signal: int = 0, split: str = "", at_step: tuple[int, int] = (0, 0)
) -> Iterator[None]:
    """Append a line to `file` for each batch that is served in the block.

    Args:
        signal: number of the signal that this process gets at one batch; 0: none.
        split: split of that batch.
        at_step: its epoch and number.
    """
    take = Loader._take

    def take_and_record(self: Any, step: tuple[int, int]) -> Batch:
        batch = take(self, step)
        with open(file, "a") as opened:
            ids = batch.ids[~batch.padding].tolist()
            opened.write(json.dumps([self.spec.split, *step, ids]) + "\n")
        if signal and (self.spec.split, step) == (split, at_step):
            os.kill(os.getpid(), signal)
        return batch

    with mock.patch.object(Loader, "_take", take_and_record):
        yield


def read(file: Path, split: str = "train") -> ServedBatches:
    """Read the recorded batches of a split."""
    return [tuple(row) for row in map(json.loads, file.read_text().splitlines()) if row[0] == split]


def ids_of(batches: ServedBatches, epoch: int) -> list[int]:
    """Ids of an epoch in the order in which they were served."""
    return [i for _, batch_epoch, _, ids in batches if batch_epoch == epoch for i in ids]


if __name__ == "__main__":
    file_name, number, signalled_rank, split, epoch, batch, module, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    sys.argv = [module, *arguments]
    sent = int(number) if rank == signalled_rank else 0
    with record_batches(Path(file_name.format(rank)), sent, split, (int(epoch), int(batch))):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
