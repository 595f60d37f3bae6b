"""Memory over epochs: `python -m bench.evidence.memory DATA RESULT --device cuda`.

On CUDA it is what is taken on the whole device, also by nvJPEG and DALI, which torch does not count; on a
CPU that of this process and those that it started. Run it alone.
"""

import gc
import os
from pathlib import Path
from typing import Any

import click
import torch

from bench.evidence.feeds import FEEDS, Feed
from bench.evidence.programs import failure, feed_options, write_result
from bench.measure.fresh import run_fresh, tree_bytes
from precache.console import commandline
from precache.errors import MissingDependencyError, SettingError

MAY_GROW_BYTES = 64 << 20
"""From the second epoch to the last; in the first, libraries allocate and caches fill."""


@click.command(cls=commandline.Command)
@feed_options
@click.option("--epochs", default=6, show_default=True)
def memory(data: Path, result: Path, device: str, batch_size: int, size: int, epochs: int) -> None:
    """Watch what each loader of DATA takes after every epoch."""
    checks = []
    for feed in FEEDS:
        check: dict[str, Any] = {"loader": feed.name}
        try:
            taken = run_fresh(epoch_bytes, feed, data, device, batch_size, size, epochs)
            check |= {"bytes": taken, "flat": is_flat(taken)}
        except (MissingDependencyError, SettingError) as error:
            check["skipped"] = failure(error)
        except Exception as error:
            check["error"] = failure(error)
        print(check, flush=True)
        checks.append(check)
    write_result(result, device, checks=checks)


def is_flat(taken: list[int]) -> bool:
    """Whether memory, in bytes after each of at least two epochs, has stopped growing."""
    return taken[-1] - taken[1] <= MAY_GROW_BYTES


def epoch_bytes(feed: Feed, data: Path, device: str, batch_size: int, size: int, epochs: int) -> list[int]:
    """Bytes taken after each epoch of random crops in bfloat16, as a training has them."""
    taken = []
    settings = {"device": device, "batch_size": batch_size, "size": size}
    with feed.open(data, dtype=torch.bfloat16, augment="train", **settings) as loader:
        for _ in range(epochs):
            for batch in loader:
                batch.images.sum()
            del batch
            gc.collect()
            taken.append(_taken_bytes(device))
    return taken


def _taken_bytes(device: str) -> int:
    if torch.device(device).type != "cuda":
        return tree_bytes(os.getpid())
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    memory()
