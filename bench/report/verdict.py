"""Verdict on one loader: the stage that is the bottleneck, the trainer's waits, and the best change. Pure.

A loader works in stages: storage (reading), decode, collate, transfer (copying to the device); compute is the
trainer's step. `bottleneck` chooses the slowest stage, `best_changes` the changes that gain most.
`bench.report.gain` compares loaders with each other, and `bench.report.sentences` says it in words.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from bench.report.change import Basis, Change, ChangeKind
from bench.report.result import RAW, Activity, Row, Stage, Stall
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, at_most, exceeds

SYNTHETIC = "synthetic"
"""Backend that serves noise."""
BUSY_SHARE = 0.95
"""Share of all cores, averaged over a run, from which on no CPU time is left for another worker."""
_GPU_MEMORY_LIMIT = 0.9
_SWAP_LIMIT_BYTES = 1 << 20
# Stages are timed on other pictures than the whole loader, and in threads: their times differ by this share.
_PROBE_ERROR = 0.2
_STALL_OF_STAGE = {
    Stage.STORAGE: Stall.FETCH,
    Stage.DECODE: Stall.PREP,
    Stage.COLLATE: Stall.PREP,
    Stage.STORAGE_OR_DECODE: Stall.FETCH_OR_PREP,
    Stage.STORAGE_OR_COLLATE: Stall.FETCH_OR_PREP,
    Stage.TRANSFER: Stall.TRANSFER,
}


class Verdict(str, Enum):
    """Whether a trainer waits for its loader; UNCLEAR: it keeps up in some runs and waits in others."""

    KEEPS_UP = "keeps up"
    WAITS = "waits"
    UNCLEAR = "unclear"
    NO_TRAINER = "no trainer"


class Limit(str, Enum):
    """Resource of the machine that was used up."""

    GPU_MEMORY = "GPU memory"
    CORES = "cores"
    SWAP = "swap"


def judge(fed_ratio: Estimate | None) -> Verdict:
    """Judge whether the trainer waits for the loader.

    Args:
        fed_ratio: images/s with the loader over images/s on a batch that stays on the device, repeat by
            repeat; None without a trainer.
    """
    if fed_ratio is None:
        return Verdict.NO_TRAINER
    if 1 - fed_ratio.median < NEGLIGIBLE_SHARE:
        return Verdict.KEEPS_UP
    if 1 - fed_ratio.high < NEGLIGIBLE_SHARE:
        return Verdict.UNCLEAR
    return Verdict.WAITS


def lost_share(fed_ratio: Estimate) -> float:
    """Share, 0 to 1, of the trainer's own rate that is lost when the loader feeds it."""
    return max(0.0, 1 - fed_ratio.median)


def training_rate(row: Row) -> Estimate:
    """Images/s of training: of the fed trainer, or of the loader alone where there was no trainer."""
    return row.values.get("fed_images_per_s") or row.values["loader_images_per_s"]


def reads_tree(row: Row) -> bool:
    """Whether a row's loader reads a raw tree."""
    return row.data_kind == RAW


def reads_slower_cold(row: Row) -> bool:
    """Whether the loader is slower from a cold disk, beyond noise."""
    cold = row.values.get("cold_images_per_s")
    return cold is not None and cold.high < row.values["loader_images_per_s"].low


def supply(row: Row) -> Estimate:
    """Upper bound of images/s that reach the trainer: the slowest of loader, cold disk and transfer."""
    rates = [row.values["loader_images_per_s"]]
    if reads_slower_cold(row):
        rates.append(row.values["cold_images_per_s"])
    if "transfer_images_per_s" in row.values:
        rates.append(row.values["transfer_images_per_s"])
    return min(rates, key=lambda rate: rate.median)


def reachable_rate(row: Row) -> Estimate:
    """Images/s of training, from a cold disk where that is slower."""
    rate = training_rate(row)
    if reads_slower_cold(row):
        return min(rate, supply(row), key=lambda estimate: estimate.median)
    return rate


def fed_limit(row: Row) -> Estimate | None:
    """Images/s that a fed trainer reaches at most: the slowest of loader, trainer and transfer, each alone.

    Returns:
        Images/s with a warm cache; None where there was no trainer.
    """
    if "trainer_images_per_s" not in row.values:
        return None
    names = ("loader_images_per_s", "trainer_images_per_s", "transfer_images_per_s")
    return at_most(min(row.values[name].high for name in names if name in row.values))


def explain(
    rows: Sequence[Row], workers: int, batch_size: int, cpus: int, rest: dict[int, Stage]
) -> list[Row]:
    """Add stages, stalls, bottleneck and changes to the rows of one trainer.

    Args:
        rows: rows with the same trainer, batch size and number of workers.
        workers: workers of each loader.
        batch_size: samples of a batch.
        cpus: CPUs of this machine.
        rest: by the position of a row, the stage to which the loader's time belongs that no timed stage
            explains.
    """
    explained = []
    for position, row in enumerate(rows):
        parts = stage_seconds(row, rest[position])
        rates = {name: 1 / part.median for name, part in parts.items()}
        if "trainer_images_per_s" in row.values:
            rates[Stage.COMPUTE] = row.values["trainer_images_per_s"].median
        if row.key.get("backend") == SYNTHETIC:  # noise needs no advice
            explained.append(replace(row, stages=rates))
            continue
        changes = find_changes(row, [other for other in rows if other is not row], workers, cpus)
        explained.append(
            replace(
                row,
                stages=rates,
                stalls=find_stalls(row, stage_seconds(row, rest[position], cold=False), batch_size),
                bottleneck=bottleneck(row, parts),
                changes=tuple(changes),
            )
        )
    return explained


def stage_seconds(row: Row, rest: Stage, *, cold: bool = True) -> dict[Stage, Estimate]:
    """Split the loader's seconds per image by stage.

    Args:
        row: row of the loader.
        rest: stage to which the time belongs that no timed stage explains.
        cold: whether storage is that of a cold disk, where that is slower.
    """
    whole = _seconds(row.values["loader_images_per_s"])
    timed = {
        Stage.STORAGE: "read_images_per_s",
        Stage.DECODE: "decode_images_per_s",
        Stage.TRANSFER: "transfer_images_per_s",
    }
    parts = {stage: _seconds(row.values[name]) for stage, name in timed.items() if name in row.values}
    remainder = Estimate(
        whole.median - sum(part.median for part in parts.values()),
        whole.low - sum(part.high for part in parts.values()),
        whole.high - sum(part.low for part in parts.values()),
    )
    if remainder.median > 0:
        parts[rest] = remainder
    if cold and reads_slower_cold(row):
        slow = _seconds(row.values["cold_images_per_s"])
        parts[Stage.STORAGE] = Estimate(
            slow.median - whole.median, slow.low - whole.high, slow.high - whole.low
        )
    return parts


def bottleneck(row: Row, parts: dict[Stage, Estimate]) -> Stage | None:
    """Choose the slowest stage; None where two are within noise.

    It is LAUNCHING where that costs more than waiting for batches.

    Args:
        row: row of the loader.
        parts: seconds per image by stage, from `stage_seconds`.
    """
    if _launching_costs_most(row):
        return Stage.LAUNCHING
    trainer = row.values.get("trainer_images_per_s")
    if trainer is not None:
        verdict, supply_rate = judge(row.values.get("fed_ratio")), supply(row)
        if supply_rate.low > trainer.high:
            return Stage.COMPUTE if verdict == Verdict.KEEPS_UP else None
        if supply_rate.high >= trainer.low or (verdict == Verdict.KEEPS_UP and not reads_slower_cold(row)):
            return None
    first, *others = sorted(parts, key=lambda name: -parts[name].median)
    if others and parts[first].low <= parts[others[0]].high * (1 + _PROBE_ERROR):
        return None
    return first


def _launching_costs_most(row: Row) -> bool:
    """Whether training loses more by steps that launching makes longer than by waiting for batches."""
    values = row.values
    if "launch_ratio" not in values or values["launch_ratio"].low <= 1:
        return False
    wait_share, fed_ratio = values["wait_share"].median, values["fed_ratio"].median
    longer_share = 1 - wait_share - fed_ratio  # what steps take longer than alone, of the training's time
    return longer_share > max(wait_share, NEGLIGIBLE_SHARE)


def find_stalls(row: Row, warm_parts: dict[Stage, Estimate], batch_size: int) -> dict[Stall, float]:
    """Split the seconds per batch that the trainer waits, in proportion to the loader's stages, cache warm.

    COLD_FETCH is what a cold cache adds at least, since no batch comes sooner than the loader alone reads it.

    Args:
        row: row of the loader.
        warm_parts: seconds per image by stage, from `stage_seconds` with `cold=False`.
        batch_size: samples of a batch.
    """
    if "trainer_images_per_s" not in row.values or "fed_images_per_s" not in row.values:
        return {}
    fed = row.values["fed_images_per_s"].median
    stalls = dict.fromkeys((Stall.FETCH, Stall.PREP, Stall.TRANSFER), 0.0)
    wait_s = row.values["wait_share"].median * batch_size / fed  # without what steps take longer than alone
    total = sum(part.median for part in warm_parts.values())
    for stage, part in warm_parts.items():
        stall = _STALL_OF_STAGE[stage]
        stalls[stall] = stalls.get(stall, 0.0) + wait_s * part.median / total
    if reads_slower_cold(row):
        cold_s = batch_size / row.values["cold_images_per_s"].high
        if (more_s := cold_s - batch_size / row.values["fed_images_per_s"].low) > 0:
            stalls[Stall.COLD_FETCH] = more_s
    return stalls


def more_workers_can_help(workers: int, cpus: int, cpu_share: float | None) -> bool:
    """Whether a loader has CPU time for another worker.

    Args:
        workers: workers that it has.
        cpus: CPUs that it may use.
        cpu_share: share of all cores, 0 to 1, that was busy meanwhile; None where not sampled.
    """
    return 0 < workers < cpus and (cpu_share is None or cpu_share < BUSY_SHARE)


def find_changes(row: Row, others: Sequence[Row], workers: int, cpus: int) -> list[Change]:
    """List changes to a row's loader: each loader that was measured beside it, and a worker per CPU."""
    changes = []
    for other in others:
        arguments = {name: other.key[name] for name in ("backend", "data")}
        if arguments["backend"] == SYNTHETIC:
            continue
        converts = not reads_tree(other) and arguments["data"] != row.key["data"]
        kind = ChangeKind.CONVERT if converts else ChangeKind.LOADER
        changes.append(Change(kind, reachable_rate(other), Basis.MEASURED, arguments))
    cpu_share = row.activity.mean.get("cpu_share") if row.activity is not None else None
    if more_workers_can_help(workers, cpus, cpu_share):
        # no loader gains more than its workers do, or feeds a trainer faster than it takes batches
        alone = "cold_images_per_s" if reads_slower_cold(row) else "loader_images_per_s"
        limits = [row.values[alone].high * cpus / workers]
        for name in ("trainer_images_per_s", "transfer_images_per_s"):
            if name in row.values:
                limits.append(row.values[name].high)
        changes.append(Change(ChangeKind.WORKERS, at_most(min(limits)), Basis.BOUND, {"num_workers": cpus}))
    return changes


def best_changes(row: Row) -> list[Change]:
    """List the measured changes that are faster than the row beyond noise, the fastest first.

    Only those are listed that no other one exceeds beyond noise: where there are several, none is the best.
    """
    now = reachable_rate(row)
    gaining = [change for change in row.changes if exceeds(change.images_per_s, now)]
    gaining.sort(key=lambda change: -change.images_per_s.median)
    return [change for change in gaining if change.images_per_s.high >= gaining[0].images_per_s.low]


def find_limits(activity: Activity) -> dict[Limit, float]:
    """Find what was used up: shares, 0 to 1, of GPU memory and of cores, and bytes that were swapped."""
    used = {
        Limit.GPU_MEMORY: activity.peak.get("gpu_memory_share", 0.0),
        Limit.CORES: activity.mean.get("cpu_share", 0.0),
        Limit.SWAP: 0.0,
    }
    swapped = activity.series.get("swap_bytes_per_s", ())
    for before_s, time_s, rate in zip((0.0, *activity.time_s), activity.time_s, swapped, strict=False):
        used[Limit.SWAP] += (time_s - before_s) * rate
    limits = {Limit.GPU_MEMORY: _GPU_MEMORY_LIMIT, Limit.CORES: BUSY_SHARE, Limit.SWAP: _SWAP_LIMIT_BYTES}
    return {limit: amount for limit, amount in used.items() if amount >= limits[limit]}


def _seconds(rate: Estimate) -> Estimate:
    """Seconds per image of a rate in images/s."""
    return Estimate(1 / rate.median, 1 / rate.high, 1 / rate.low)
