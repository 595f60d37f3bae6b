"""Verdict on one loader: the stage that is the bottleneck, the trainer's waits, and the best change. Pure.

A loader works in stages: storage (reading), decode, collate, transfer (copying to the device); compute is the
trainer's step. `bottleneck` chooses the slowest stage, `_describe_bottleneck` writes a sentence on it, and
`advise` adds the change that gains most. `bench.report.gain` compares loaders with each other.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench.report.change import Basis, Change, ChangeKind
from bench.report.result import Row
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, at_most, exceeds
from bench.report.words import milliseconds, percent

RAW_TREE = "raw tree"
"""Name of data that is a raw image tree."""
SYNTHETIC = "synthetic"
"""Backend that serves noise."""
KEEPS_UP, WAITS, UNCLEAR, NO_TRAINER = "keeps up", "waits", "unclear", "no trainer"
"""Verdicts of `judge`; UNCLEAR: the trainer keeps up in some runs and waits in others."""
COLD_FETCH = "cold fetch"
"""Name of the stall that a cold cache adds."""
BUSY_SHARE = 0.95
"""Share of all cores, averaged over a run, from which on no CPU time is left for another worker."""
ALL_BUSY = "All cores were busy"
"""Beginning of a finding that is left out where the trainer does not wait."""
# Stages are timed on other pictures than the whole loader, and in threads: their times differ by this share.
_PROBE_ERROR = 0.2
_MIN_SHOWN_S = 5e-5  # shorter waits would be printed as 0.0 ms
_STALL_OF_STAGE = {"storage": "fetch", "decode": "prep", "collate": "prep", "transfer": "transfer"}
_WORD_OF_STAGE = {"decode": "decoding", "collate": "collating", "transfer": "the transfer"}


def judge(fed_ratio: Estimate | None) -> str:
    """Judge whether the trainer waits for the loader: KEEPS_UP, WAITS, UNCLEAR or NO_TRAINER.

    Args:
        fed_ratio: images/s with the loader over images/s on a batch that stays on the device, repeat by
            repeat; None without a trainer.
    """
    if fed_ratio is None:
        return NO_TRAINER
    if 1 - fed_ratio.median < NEGLIGIBLE_SHARE:
        return KEEPS_UP
    if 1 - fed_ratio.high < NEGLIGIBLE_SHARE:
        return UNCLEAR
    return WAITS


def lost_share(fed_ratio: Estimate) -> float:
    """Share, 0 to 1, of the trainer's own rate that is lost when the loader feeds it."""
    return max(0.0, 1 - fed_ratio.median)


def training_rate(row: Row) -> Estimate:
    """Images/s of training: of the fed trainer, or of the loader alone where there was no trainer."""
    return row.values.get("fed_images_per_s") or row.values["loader_images_per_s"]


def reads_tree(row: Row) -> bool:
    """Whether a row's loader reads a raw tree; of several trees the names have the folder, too."""
    return str(row.key["data"]).startswith(RAW_TREE)


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


def explain(rows: Sequence[Row], workers: int, batch_size: int, cpus: int, rest: dict[int, str]) -> list[Row]:
    """Add stages, stalls, bottleneck, advice and findings to the rows of one trainer.

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
            rates["compute"] = row.values["trainer_images_per_s"].median
        if row.key.get("backend") == SYNTHETIC:  # noise needs no advice
            explained.append(replace(row, stages=rates))
            continue
        changes = find_changes(row, [other for other in rows if other is not row], workers, cpus)
        slowest = bottleneck(row, parts)
        with_advice = replace(
            row,
            stages=rates,
            stalls=find_stalls(row, stage_seconds(row, rest[position], cold=False), batch_size),
            bottleneck=slowest,
            changes=tuple(changes),
        )
        explained.append(
            replace(with_advice, advice=advise(with_advice), findings=tuple(describe(with_advice)))
        )
    return explained


def stage_seconds(row: Row, rest: str, *, cold: bool = True) -> dict[str, Estimate]:
    """Split the loader's seconds per image by stage.

    Args:
        row: row of the loader.
        rest: stage to which the time belongs that no timed stage explains.
        cold: whether storage is that of a cold disk, where that is slower.
    """
    whole = _seconds(row.values["loader_images_per_s"])
    timed = {
        "storage": "read_images_per_s",
        "decode": "decode_images_per_s",
        "transfer": "transfer_images_per_s",
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
        parts["storage"] = Estimate(slow.median - whole.median, slow.low - whole.high, slow.high - whole.low)
    return parts


def bottleneck(row: Row, parts: dict[str, Estimate]) -> str:
    """Name the slowest stage; empty where two are within noise, or where the parts contradict the whole.

    Args:
        row: row of the loader.
        parts: seconds per image by stage, from `stage_seconds`.
    """
    trainer = row.values.get("trainer_images_per_s")
    if trainer is not None:
        verdict, supply_rate = judge(row.values.get("fed_ratio")), supply(row)
        if supply_rate.low > trainer.high:
            return "compute" if verdict == KEEPS_UP else ""
        if supply_rate.high >= trainer.low or (verdict == KEEPS_UP and not reads_slower_cold(row)):
            return ""
    first, *others = sorted(parts, key=lambda name: -parts[name].median)
    if others and parts[first].low <= parts[others[0]].high * (1 + _PROBE_ERROR):
        return ""
    return first


def find_stalls(row: Row, warm_parts: dict[str, Estimate], batch_size: int) -> dict[str, float]:
    """Split the seconds per batch that the trainer waits into "fetch" (storage), "prep" and "transfer".

    The wait with a warm cache is split in proportion to the loader's stages; it is "fetch or prep" where
    storage and the rest were not timed separately. COLD_FETCH is what a cold cache would add, where that is
    beyond noise.

    Args:
        row: row of the loader.
        warm_parts: seconds per image by stage, from `stage_seconds` with `cold=False`.
        batch_size: samples of a batch.
    """
    if "trainer_images_per_s" not in row.values or "fed_images_per_s" not in row.values:
        return {}
    trainer, fed = row.values["trainer_images_per_s"].median, row.values["fed_images_per_s"].median
    stalls = {"fetch": 0.0, "prep": 0.0, "transfer": 0.0}
    wait_s = max(0.0, batch_size / fed - batch_size / trainer)
    total = sum(part.median for part in warm_parts.values())
    for stage, part in warm_parts.items():
        stall = " or ".join(_STALL_OF_STAGE[name] for name in stage.split(" or "))
        stalls[stall] = stalls.get(stall, 0.0) + wait_s * part.median / total
    if reads_slower_cold(row):
        cold_s = batch_size / min(trainer, row.values["cold_images_per_s"].median)
        stalls[COLD_FETCH] = cold_s - batch_size / min(trainer, row.values["loader_images_per_s"].median)
    return stalls


def predict(row: Row) -> float | None:
    """Predict images/s of the fed trainer: the slowest of loader, trainer and transfer.

    Returns:
        Images/s with a warm cache; None where there was no trainer.
    """
    if "trainer_images_per_s" not in row.values:
        return None
    names = ("loader_images_per_s", "trainer_images_per_s", "transfer_images_per_s")
    return min(row.values[name].median for name in names if name in row.values)


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
        limits = [row.values["loader_images_per_s"].high * cpus / workers]
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


def advise(row: Row) -> str:
    """Write a sentence on the bottleneck, and one on the change that gains most beyond noise."""
    sentence = _describe_bottleneck(row, row.bottleneck)
    if row.bottleneck == "compute":
        return sentence
    best = best_changes(row)
    parts = [f"{_name_change(change)} gave {change.images_per_s:,.0f}" for change in best]
    if len(best) > 1:
        sentence += f" Faster, and the same within noise: {'; '.join(parts)}."
    elif best:
        sentence += f" {parts[0]}."
    untried = [change for change in row.changes if change.basis == Basis.BOUND]
    reachable = [change for change in untried if change.images_per_s.high > reachable_rate(row).high]
    for change in reachable:
        sentence += f" {_name_change(change)} would give {change.images_per_s:,.0f}: not tried."
    if not best and not reachable:
        sentence += " No change that is known here would make it faster."
    return sentence


def _name_change(change: Change) -> str:
    """Name a change as the subject of a sentence."""
    if change.kind == ChangeKind.WORKERS:
        return f"{change.arguments['num_workers']} workers, one per CPU,"
    if change.kind == ChangeKind.CONVERT:
        return f"Converting to {change.arguments['data']}"
    return f"Backend {change.arguments['backend']} on {change.arguments['data']}"


def _describe_bottleneck(row: Row, slowest: str) -> str:
    """Write the sentence that names the bottleneck."""
    supply_rate, trainer = supply(row), row.values.get("trainer_images_per_s")
    against = f" against {trainer.median:,.0f} of the trainer" if trainer is not None else ""
    files = ""
    if "cold_images_per_s" in row.values:
        is_cold = supply_rate is row.values["cold_images_per_s"]
        files = " from a cold disk" if is_cold else " with the files in memory"
    if slowest == "compute" and trainer is not None:
        return (
            f"the trainer itself is the bottleneck: it takes {trainer.median:,.0f} images/s and the "
            f"loader could give {supply_rate.median:,.0f}{files}. Only a faster step would help."
        )
    keeps_up_alone = trainer is not None and supply_rate.low > trainer.high
    if slowest == "" and keeps_up_alone and judge(row.values.get("fed_ratio")) == WAITS:
        return (
            f"no single stage is the bottleneck{files}: the loader alone reaches {supply_rate.median:,.0f} "
            f"images/s{against}, and yet the trainer waits, because batches come unevenly or both share "
            f"the CPUs."
        )
    if slowest == "":
        rate = f"{supply_rate.median:,.0f} images/s{against}"
        return f"no stage stands out as the bottleneck{files}, within noise: {rate}."
    names = " or ".join(_WORD_OF_STAGE.get(stage, stage) for stage in slowest.split(" or "))
    verb = "is the bottleneck" if trainer is not None else "takes most of the loader's time"
    text = f"{names} {verb}{files}: {supply_rate.median:,.0f} images/s{against}"
    if slowest.startswith("storage or "):
        without = "" if "cold_images_per_s" in row.values else " without --cold"
        text += f"; the files were not in memory before, so the two were not timed apart{without}"
    return f"{text}."


def describe(row: Row) -> list[str]:
    """Write further sentences on a row: waits, prediction, stalls, spikes, limits of the machine."""
    findings = []
    values, verdict = row.values, judge(row.values.get("fed_ratio"))
    if "wait_share" in values and "busy_share" in values:
        findings.append(
            f"The trainer waited {percent(values['wait_share'].median)} of the time, and the accelerator was "
            f"busy {percent(values['busy_share'].median)}; MLPerf Storage asks for 90%."
        )
    predicted = predict(row)
    if predicted is not None and "fed_images_per_s" in values:
        measured = values["fed_images_per_s"].median
        off = measured / predicted - 1
        findings.append(f"Predicted {predicted:,.0f} images/s, measured {measured:,.0f} ({off:+.0%}).")
    if "first_step_s" in values and row.batches is not None and row.batches.step_s:
        first, usual = milliseconds(values["first_step_s"].median), milliseconds(median(row.batches.step_s))
        findings.append(f"The first step took {first}, the others {usual} (median).")
    waits = [
        f"{name} {milliseconds(seconds)}"
        for name, seconds in row.stalls.items()
        if name != COLD_FETCH and seconds >= _MIN_SHOWN_S
    ]
    if waits and verdict != KEEPS_UP:
        findings.append(f"A batch waited for {', '.join(waits)}.")
    if COLD_FETCH in row.stalls:
        findings.append(
            f"From a cold disk each batch would take {milliseconds(row.stalls[COLD_FETCH])} more."
        )
    if row.batches is not None:
        findings += row.batches.findings
    if row.activity is not None:
        for flag in row.activity.flags:
            if verdict != KEEPS_UP or not flag.startswith(ALL_BUSY):
                findings.append(flag)
    return findings


def describe_busy_cores(cpu_share: float) -> str | None:
    """Write the sentence for cores that are always busy; None where they are not."""
    if cpu_share < BUSY_SHARE:
        return None
    return f"{ALL_BUSY} ({cpu_share:.0%} on average): more workers will not help, less work per sample will."


def _seconds(rate: Estimate) -> Estimate:
    """Seconds per image of a rate in images/s."""
    return Estimate(1 / rate.median, 1 / rate.high, 1 / rate.low)
