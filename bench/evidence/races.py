"""Every loader behind a stalled training stream: `python -m bench.evidence.races DATA RESULT --device cuda`.

A training that is busy reads its batches late: kernels that take a batch wait in the stream while the
loader goes on. What is not ordered by an event, be it a copy, an augmentation, a gather from the cache or
memory that is used again, then changes what those kernels see. Each loader runs idle, the device
synchronised at every batch, and stalled, `torch.cuda._sleep` before every batch; the sums of each picture
must be equal. On a CPU nothing can be stalled: there the two runs show that a loader repeats itself.
"""

import itertools
from pathlib import Path
from typing import Any

import click
import torch

from bench.evidence.feeds import FEEDS, Feed
from bench.evidence.programs import failure, feed_options, write_result
from bench.measure.fresh import run_fresh
from precache.console import commandline
from precache.errors import MissingDependencyError, SettingError

_BATCHES = 16  # of an epoch at most
_CACHE_EPOCHS = 3  # the first fills it
_STALL_CYCLES = 60_000_000  # some 30 ms

KINDS: dict[str, dict[str, Any]] = {
    "uint8": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, random crops": {"dtype": torch.bfloat16, "augment": "train"},
}

Sums = list[tuple[list[float], list[int]]]


@click.command(cls=commandline.Command)
@feed_options
def races(data: Path, result: Path, device: str, batch_size: int, size: int) -> None:
    """Compare the sums of stalled runs over DATA with those of idle ones, for each loader."""
    checks = []
    for feed in FEEDS:
        # one loader's broken device context must not fail the others
        try:
            checks += run_fresh(check_feed, feed, data, device, batch_size, size)
        except Exception as error:
            checks.append({"loader": feed.name, "kind": "", "error": failure(error)})
        print(checks[-1], flush=True)
    write_result(result, device, checks=checks)


def check_feed(feed: Feed, data: Path, device: str, batch_size: int, size: int) -> list[dict[str, Any]]:
    """Of each kind of batch: how many there were, and how many differ; or why it cannot run here."""
    found: list[dict[str, Any]] = []
    for name, kind in KINDS.items():
        check: dict[str, Any] = {"loader": feed.name, "kind": name}
        settings = {"device": device, "batch_size": batch_size, "size": size, **kind}
        try:
            check |= compare_runs(feed, data, **settings)
        except (MissingDependencyError, SettingError) as error:
            check["skipped"] = failure(error)
        except Exception as error:
            check["error"] = failure(error)
        found.append(check)
    return found


def compare_runs(feed: Feed, data: Path, **settings: Any) -> dict[str, Any]:
    """An idle run and a stalled one; where they differ, also a second idle one."""
    idle = picture_sums(feed, data, stalled=False, **settings)
    found = {
        "batches": len(idle),
        "differ": differing(idle, picture_sums(feed, data, stalled=True, **settings)),
    }
    if found["differ"]:
        # a decoder that does not repeat itself is no race
        found["differ idle"] = differing(idle, picture_sums(feed, data, stalled=False, **settings))
    return found


def differing(first: Sums, second: Sums) -> int:
    """How many batches are not the same in both runs."""
    return sum(one != other for one, other in itertools.zip_longest(first, second))


def picture_sums(feed: Feed, data: Path, *, stalled: bool, **settings: Any) -> Sums:
    """Of each batch: the sum of each picture, and the labels, by kernels on the training's stream."""
    on_gpu = torch.device(settings["device"]).type == "cuda"
    epochs, batches = (_CACHE_EPOCHS, None) if feed.reading.cache != "none" else (1, _BATCHES)
    found = []
    with feed.open(data, **settings) as loader:
        for _ in range(epochs):
            for batch in itertools.islice(loader, batches):
                if on_gpu and stalled:
                    torch.cuda._sleep(_STALL_CYCLES)  # type: ignore[no-untyped-call]
                elif on_gpu:
                    torch.cuda.synchronize()
                found.append((batch.images.double().sum((1, 2, 3)), batch.labels.clone()))
                del batch  # at once, while the kernels still wait
        if on_gpu:
            torch.cuda.synchronize()
    return [(sums.tolist(), labels.tolist()) for sums, labels in found]


if __name__ == "__main__":
    races()
