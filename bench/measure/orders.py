"""How fast orders are computed: those of version 1, which are listed, beside those of version 2.

    python -m bench.measure.orders
    python -m bench.measure.orders --samples 1000000000 --shards 600000 --ranks 1024 --nodes 128 --batches 15000

ids/s: of all batches of one rank, per second of CPU time of the one thread that computes them. First batch:
how long it takes from a new order on, and how much memory. Version 1 is left out of more samples than
`--most-listed`. The two take turns.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

import click
import numpy as np
import torch
from rich.table import Table

from bench.machine.hardware import describe_machine
from bench.machine.others import OtherProcesses
from loaders.order import WINDOW_SHARDS, EpochOrder, Order
from loaders.orders.keyed_order import KeyedOrder
from precache.console.tables import new_console

Make: TypeAlias = Callable[[], Order]


def make_orders(
    kind: str, shard_samples: np.ndarray, batch_size: int, ranks: int, nodes: int
) -> tuple[Make, Make]:
    """What makes the order of one rank in the middle, of version 1 and of version 2."""
    rank = ranks // 2
    samples = int(shard_samples.sum())
    starts = np.concatenate(([0], np.cumsum(shard_samples)))

    def listed() -> Order:
        return EpochOrder(
            ids=np.arange(samples),
            shard_samples=tuple(shard_samples.tolist()),
            kind=kind,
            seed=0,
            batch_size=batch_size,
            last="partial",
            rank=rank,
            world_size=ranks,
        )

    def keyed() -> Order:
        return KeyedOrder(
            shard_starts=starts,
            kind=kind,
            seed=0,
            batch_size=batch_size,
            last="partial",
            window_shards=WINDOW_SHARDS,
            rank=rank,
            world_size=ranks,
            nodes=nodes,
        )

    return listed, keyed


def ids_per_s(order: Order, epoch: int, batches: int | None) -> float:
    """Of one rank's batches of an epoch, at most as many as given."""
    start_s = time.thread_time()
    ids = sum(len(share.positions) for share in islice(order.batches(epoch), batches))
    return ids / max(1e-9, time.thread_time() - start_s)


def first_batch(make: Make) -> tuple[float, float]:
    """Seconds until the first batch of an epoch is there, and what it takes at most, in MiB."""
    start_s = time.perf_counter()
    next(iter(make().batches(1)))
    took_s = time.perf_counter() - start_s
    tracemalloc.start()
    try:
        next(iter(make().batches(1)))
        return took_s, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def compare(makes: tuple[Make, Make], repeats: int, batches: int | None, *, lists: bool) -> list[list[str]]:
    """A row for each version, of which the first is left out unless it `lists`."""
    asked = {version: make for version, make in enumerate(makes, 1) if lists or version > 1}
    rates: dict[int, list[float]] = {version: [] for version in asked}
    for turn in range(repeats):
        for version, make in asked.items():
            rates[version].append(ids_per_s(make(), turn, batches))
    rows = []
    for version, make in asked.items():
        rate = statistics.median(rates[version])
        took_s, memory_mib = first_batch(make)
        rows.append([
            str(version),
            f"{rate / 1e6:,.1f} ({min(rates[version]) / 1e6:,.1f}-{max(rates[version]) / 1e6:,.1f})",
            f"{rate / statistics.median(rates[1]):.2f}" if lists else "-",
            f"{took_s * 1000:,.0f} ms",
            f"{memory_mib:,.0f} MiB",
        ])  # fmt: skip
    return rows


@click.command()
@click.option("--samples", default=10_000_000, show_default=True)
@click.option("--shards", default=6000, show_default=True)
@click.option("--batch-size", default=256, show_default=True)
@click.option("--ranks", default=1, show_default=True, help="On all nodes.")
@click.option("--nodes", default=1, show_default=True, help="With as many ranks each.")
@click.option("--batches", type=int, help="Of an epoch, at most.  [default: all]")
@click.option("--most-listed", default=50_000_000, show_default=True, help="Samples of version 1.")
@click.option("--repeats", default=5, show_default=True, help="Turns.")
def main(repeats: int, batches: int | None, most_listed: int, **asked: int) -> None:
    """Compute the orders of both versions, and compare."""
    samples, shards, batch_size, ranks, nodes = (
        asked[name] for name in ("samples", "shards", "batch_size", "ranks", "nodes")
    )
    for name, value in {**asked, "repeats": repeats, "batches": 1 if batches is None else batches}.items():
        if value < 1:
            raise click.BadParameter(
                f"must be positive, got {value}", param_hint=f"--{name.replace('_', '-')}"
            )
    if ranks % nodes or shards > samples:
        raise click.UsageError("--ranks must be a multiple of --nodes, and --shards at most --samples")
    others = OtherProcesses()
    sizes = np.full(shards, samples // shards)
    sizes[: samples % shards] += 1
    table = Table(box=None)
    for title in ("order", "version", "million ids/s", "beside version 1", "first batch", "memory"):
        table.add_column(title, justify="left" if title == "order" else "right")
    for kind in ("full", "window"):
        makes = make_orders(kind, sizes, batch_size, ranks, nodes)
        for row in compare(makes, repeats, batches, lists=samples <= most_listed):
            table.add_row(kind, *row)
    console = new_console()
    console.print(table)
    machine = describe_machine(torch.device("cpu"))
    share = others.share()
    busy = "" if share is None else f"; other processes took {share:.0%} of the CPUs"
    console.print(
        f"{samples:,} samples in {shards:,} shards, batch {batch_size}, rank {ranks // 2} of {ranks}, nodes: "
        f"{nodes}, median (range) of {repeats} turns; {machine['cpu']}, one thread, numpy {np.__version__}, "
        f"{machine['date']}{busy}"
    )


if __name__ == "__main__":
    main()
