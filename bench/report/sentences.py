"""Sentences on values: the verdict on a loader, the gain of another, the choice of a grid. Pure.

    describe_row          a row of `bench loaders`: bottleneck, changes, waits, spikes, limits of the machine
    answer                what today's loader does and what to do, measured or predicted
    describe_choice       the number of workers and the batch size to choose
    describe_conditions   the conditions under which figures hold
    next_step             the line to type next

The values are from `bench.report.verdict`, `gain`, `grid` and `spikes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from bench.report.change import Basis, Change, ChangeKind
from bench.report.gain import (
    TODAY_BACKEND,
    Gain,
    epochs_to_pay,
    find_gain,
    is_real_loader,
    is_usual_backend,
    saved_share,
)
from bench.report.grid import point_of
from bench.report.result import Row, Stage, Stall, Trial, is_emulated, name_data
from bench.report.stats import NEGLIGIBLE_SHARE, Batches, is_disturbed, quotient
from bench.report.verdict import (
    SYNTHETIC,
    Limit,
    Verdict,
    best_changes,
    fed_limit,
    find_limits,
    judge,
    lost_share,
    reachable_rate,
    reads_tree,
    supply,
    training_rate,
)
from bench.report.words import duration, machine_line, milliseconds, percent
from precache.reporting import human_bytes, quantity

TODAY = "ImageFolder and DataLoader"
"""Name of the baseline in sentences."""
LINE = "`loaders.build`"
"""Name of what replaces the baseline on the same tree, in sentences."""
_STAGES = {
    Stage.STORAGE: "storage",
    Stage.DECODE: "decoding",
    Stage.COLLATE: "collating",
    Stage.STORAGE_OR_DECODE: "storage or decoding",
    Stage.STORAGE_OR_COLLATE: "storage or collating",
    Stage.TRANSFER: "the transfer",
}
_MIN_SHOWN_S = 5e-5  # shorter waits would be printed as 0.0 ms
_DEFAULTS = {"shuffle": "auto", "cache": None, "compiled": False, "amp": "off"}
"""Settings that the conditions name only where they have another value."""


def describe_row(row: Row) -> tuple[str, ...]:
    """Write sentences on a row of `bench loaders`: bottleneck and changes, waits, spikes, limits."""
    if row.key["backend"] == SYNTHETIC:  # noise needs no advice
        return ()
    sentences = [_describe_verdict(row), *_describe_waits(row)]
    if row.batches is not None:
        sentences += describe_batches(row.batches, row.key["workers"])
    keeps_up = judge(row.values.get("fed_ratio")) == Verdict.KEEPS_UP
    for limit, amount in (find_limits(row.activity) if row.activity is not None else {}).items():
        if not (limit == Limit.CORES and keeps_up):
            sentences.append(_describe_limit(limit, amount))
    return tuple(sentences)


def _describe_limit(limit: Limit, amount: float) -> str:
    """Write what was used up, and what to do; `amount` is that of `find_limits`."""
    if limit == Limit.GPU_MEMORY:
        return f"GPU memory was filled to {amount:.0%}: a larger batch or picture may not fit."
    if limit == Limit.CORES:
        busy = f"All cores were busy ({amount:.0%} on average)"
        return f"{busy}: more workers will not help, less work per sample will."
    swapped = f"The machine swapped {human_bytes(amount)} in and out"
    return f"{swapped}: use less memory, as fewer workers or smaller batches do."


def _describe_verdict(row: Row) -> str:
    """Write a sentence on the bottleneck, and one on the change that gains most beyond noise."""
    sentence = _describe_bottleneck(row)
    if row.bottleneck == Stage.COMPUTE:
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


def _describe_bottleneck(row: Row) -> str:
    """Write the sentence that names the bottleneck."""
    slowest, supply_rate, trainer = row.bottleneck, supply(row), row.values.get("trainer_images_per_s")
    against = f" against {trainer.median:,.0f} of the trainer" if trainer is not None else ""
    files = ""
    if "cold_images_per_s" in row.values:
        is_cold = supply_rate is row.values["cold_images_per_s"]
        files = " from a cold disk" if is_cold else " with the files in memory"
    if slowest == Stage.COMPUTE and trainer is not None:
        return (
            f"the trainer itself is the bottleneck: it takes {trainer.median:,.0f} images/s and the "
            f"loader could give {supply_rate.median:,.0f}{files}. Only a faster step would help."
        )
    if slowest == Stage.LAUNCHING:
        ratio, p95_ratio = row.values["launch_ratio"].median, row.values["launch_p95_ratio"].median
        return (
            f"launching is the bottleneck: beside this loader it takes {ratio:.2f} times as long as alone "
            f"(95th percentile: {p95_ratio:.2f} times), which costs more than waiting for batches: "
            f"{training_rate(row).median:,.0f} images/s{against}."
        )
    keeps_up_alone = trainer is not None and supply_rate.low > trainer.high
    if slowest is None and keeps_up_alone and judge(row.values.get("fed_ratio")) == Verdict.WAITS:
        return (
            f"no single stage is the bottleneck{files}: the loader alone reaches {supply_rate.median:,.0f} "
            f"images/s{against}, and yet the trainer waits, because batches come unevenly or both share "
            f"the CPUs."
        )
    if slowest is None:
        rate = f"{supply_rate.median:,.0f} images/s{against}"
        return f"no stage stands out as the bottleneck{files}, within noise: {rate}."
    verb = "is the bottleneck" if trainer is not None else "takes the largest part of the loader's time"
    is_apart = slowest not in (Stage.STORAGE_OR_DECODE, Stage.STORAGE_OR_COLLATE)
    text = f"{_STAGES[slowest]} {verb}{files * is_apart}: {supply_rate.median:,.0f} images/s{against}"
    if not is_apart:
        without = "" if "cold_images_per_s" in row.values else " without --cold"
        text += f"; the files were not in memory before, so the two were not timed apart{without}"
    return f"{text}."


def _describe_waits(row: Row) -> Iterator[str]:
    """Write what the trainer got, beside what it could get at most, and what its batches waited for."""
    values = row.values
    if "wait_share" in values and "busy_share" in values:
        yield (
            f"The trainer waited {percent(values['wait_share'].median)} of the time, and the accelerator was "
            f"busy {percent(values['busy_share'].median)}; MLPerf Storage asks for 90%."
        )
    limit = fed_limit(row)
    if limit is not None and "fed_images_per_s" in values:
        fed = f"{values['fed_images_per_s'].median:,.0f}"
        yield f"Loader, transfer and trainer alone allow {limit:,.0f} images/s; together they give {fed}."
    if "first_step_s" in values and row.batches is not None and row.batches.step_s:
        first, usual = milliseconds(values["first_step_s"].median), milliseconds(median(row.batches.step_s))
        yield f"The first step took {first}, the others {usual} (median)."
    waits = [
        f"{stall.value} {milliseconds(seconds)}"
        for stall, seconds in row.stalls.items()
        if stall != Stall.COLD_FETCH and seconds >= _MIN_SHOWN_S
    ]
    if waits and judge(values.get("fed_ratio")) != Verdict.KEEPS_UP:
        yield f"A batch waited for {', '.join(waits)}."
    if Stall.COLD_FETCH in row.stalls:
        more = milliseconds(row.stalls[Stall.COLD_FETCH])
        yield f"From a cold disk each batch would take at least {more} more."


def describe_batches(batches: Batches, workers: int) -> list[str]:
    """Write sentences on spikes and on first batches of epochs.

    Args:
        workers: number of workers of the loader.
    """
    sentences = []
    spikes = batches.wait_spikes
    if spikes.batches:
        mean = milliseconds(fmean(batches.wait_s[batch] for batch in spikes.batches))
        if spikes.period is None:
            slow = f"{len(spikes.batches):,} of {quantity(len(batches.wait_s), 'batch', 'batches')}"
            sentences.append(f"{slow} waited far longer than the others: {mean} on average.")
        else:
            cause = f"not the number of workers ({workers}): look for what happens at that distance"
            if spikes.period == workers:
                cause = "as many as the loader has workers: it cannot keep up"
            sentences.append(f"Every {spikes.period} batches the trainer waits {mean} on average, {cause}.")
    if batches.step_spikes.batches:
        slow = quantity(len(batches.step_spikes.batches), "batch", "batches")
        limit = milliseconds(batches.step_spikes.above_s or 0.0)
        sentences.append(f"{slow} had a step of more than {limit}.")
    if batches.first_wait_s is not None:
        more = milliseconds(batches.first_wait_s)
        sentences.append(f"The first batch of an epoch waits {more} more than others do (median).")
    return sentences


def answer(
    rows: Sequence[Row],
    *,
    accelerator: str,
    images: int | None,
    repeats: int,
    other_cpu: float | None,
    gpu_price: float | None = None,
    today: Row | None = None,
) -> list[str]:
    """Write what today's loader does and what to do, from rows of one trainer.

    Args:
        rows: rows that were measured or predicted with the same trainer.
        accelerator: description of what is fed.
        images: pictures of an epoch; None where not known.
        repeats: number of runs that the ranges are over.
        other_cpu: share of the CPUs that other processes took; None where not known.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
        today: see `find_gain`.
    """
    gain, real_rows = find_gain(rows, today), [row for row in rows if is_real_loader(row)]
    today = gain.today
    if today is None:
        return _answer_without_today(real_rows, accelerator, repeats, other_cpu)
    if judge(today.values.get("fed_ratio")) == Verdict.KEEPS_UP:  # a busy machine can only lower the ratio
        start = _describe_today(today, accelerator, already=True)
        return [f"{start}: neither another loader nor converting gains anything."]
    others = [row for row in real_rows if row is not today]
    reason = _reason_for_no_winner(gain, today, others, repeats, other_cpu)
    if reason:
        return [f"{_describe_today(today, accelerator)}.", reason]
    sentences = [f"{_describe_today(today, accelerator)}.", *_list_steps(gain, images)]
    if not gain.converted and not all(reads_tree(row) for row in real_rows):
        sentences.append("Converting gains no more.")
    if gpu_price is not None and "busy_share" in today.values:
        speedup = training_rate(gain.best[0]).median / training_rate(today).median
        sentences.append(
            f"At ${gpu_price:,.2f} an hour, what costs $100 today then costs ${100 / speedup:,.0f}: "
            f"${gpu_price * (1 - 1 / speedup):,.2f} saved of every hour."
        )
    return sentences


def _answer_without_today(
    real_rows: Sequence[Row], accelerator: str, repeats: int, other_cpu: float | None
) -> list[str]:
    """Write what the fastest loaders do; what all do, where no winner can be named."""
    reason = _reason_for_no_comparison(repeats, other_cpu) if len(real_rows) > 1 else ""
    least = 0.0 if reason else max(training_rate(row).low for row in real_rows)
    named = [row for row in real_rows if training_rate(row).high >= least]
    return [
        *(f"{_describe_today(row, accelerator)}." for row in named),
        *filter(None, [reason]),
        f"What {TODAY} do was not measured: backend imagefolder on the raw tree measures it.",
    ]


def _reason_for_no_comparison(repeats: int, other_cpu: float | None) -> str:
    """Say why no loader is called faster than another, whatever was measured; empty where one may be."""
    if disturbed := disturbance(other_cpu):
        return disturbed
    return "One run of each names no winner: use --repeats 2 or more." if repeats < 2 else ""


def _reason_for_no_winner(
    gain: Gain, today: Row, others: Sequence[Row], repeats: int, other_cpu: float | None
) -> str:
    """Say why no loader is named as faster than today's; empty where one is."""
    if not others:
        return disturbance(other_cpu) or "No other loader was measured."
    if reason := _reason_for_no_comparison(repeats, other_cpu):
        return reason
    if gain.best:
        return ""
    if all(training_rate(row).high < training_rate(today).low for row in others):
        return "No other loader here is faster."
    if any(training_rate(row).low <= training_rate(today).high for row in others):
        return f"The ranges of {repeats} runs overlap, so no loader wins."
    return f"No other loader here is faster by {NEGLIGIBLE_SHARE:.0%} or more."


def _describe_today(today: Row, accelerator: str, *, already: bool = False) -> str:
    """Say what the baseline does, without a full stop; every answer begins with it."""
    subject, adverb = source_name(today), "already " if already else ""
    plural = today.key["backend"] == TODAY_BACKEND
    if "busy_share" not in today.values:
        verb = "deliver" if plural else "delivers"
        return f"{subject} {adverb}{verb} {training_rate(today).median:,.0f} images/s"
    verb = "keep" if plural else "keeps"
    share = today.values["busy_share"]
    busy = percent(share.median)
    if today.basis == Basis.PREDICTED:
        busy = f"{percent(share.low)} to {percent(share.high)}"
    return f"{subject} {adverb}{verb} {accelerator} busy {busy} of the time"


def _list_steps(gain: Gain, images: int | None) -> list[str]:
    """Write a sentence for each step that gains: changing the line, then converting."""
    today, line = gain.today, gain.line
    assert today is not None
    sentences = []
    if line is not None:
        sentences.append(f"Replace them by {source_name(line)}: {_effect(line, today)}.")
    if not gain.converted:
        return sentences
    # what is said of several holds for each of them
    best = min(gain.converted, key=lambda row: training_rate(row).low)
    names = " or ".join(f"{source_name(row)} ({_cost(row)})" for row in gain.converted)
    too = ", too" if line is not None else ""
    sentences.append(f"Convert to {names}{too}: {_effect(best, today)}.")
    conversions = [row.values["convert_s"].high for row in gain.converted if "convert_s" in row.values]
    if "busy_share" in best.values and len(conversions) == len(gain.converted) and images is not None:
        # the slowest conversion and the smallest gain: a bound
        slowest_s = max(conversions)
        count = epochs_to_pay(slowest_s, images, training_rate(today).high, training_rate(best).low)
        pays = "does not pay" if count is None else f"pays within {quantity(count, 'epoch')}"
        sentences.append(f"Converting {pays}.")
    return sentences


def source_name(row: Row) -> str:
    """Name of what the row trains from, as sentences call it: `loaders.build`, or converted data."""
    backend, data = row.key["backend"], row.key["data"]
    if backend == TODAY_BACKEND:
        return TODAY
    if reads_tree(row):
        return LINE if backend == "pytorch" else f"{LINE} with backend {backend}"
    return str(data) if is_usual_backend(row) else f"{data} for backend {backend}"


def _cost(row: Row) -> str:
    """Time and disk that converting takes once, like '24.2 s, 286 MiB'."""
    seconds, stored = row.values.get("convert_s"), row.values.get("stored_bytes")
    if seconds is None:
        time = "time not measured"
    else:
        time = seconds.text(duration) if row.basis == Basis.PREDICTED else duration(seconds.median)
    return time if stored is None else f"{time}, {human_bytes(stored.median)}"


def _times(speedup: float) -> str:
    """Write a speedup as '3.5 times' or '12 times'."""
    return f"{speedup:.1f} times" if speedup < 10 else f"{speedup:.0f} times"


def _effect(row: Row, today: Row) -> str:
    """Say what training with the row gains over today, without a full stop; what is predicted, at least."""
    gain, rate = quotient(training_rate(row), training_rate(today)), training_rate(row)
    is_bound = row.basis == Basis.PREDICTED
    speedup = gain.low if is_bound else gain.median
    least = "at least " if is_bound else ""
    if "busy_share" not in row.values:
        return f"{rate.median:,.0f} images/s, {_times(speedup)} as many"
    busy = row.values["busy_share"].low if is_bound else row.values["busy_share"].median
    faster = f"training is {least}{_times(speedup)} as fast"
    return f"the trainer is busy {least}{percent(busy)} of the time, and {faster}"


def describe_choice(loader: str, chosen: Row, best: Row) -> str:
    """Write the sentence that says which point to choose."""
    rate, best_rate = training_rate(chosen).median, training_rate(best).median
    text = f"{loader}: choose {point_of(chosen).words}: {rate:,.0f} images/s"
    if chosen is not best:
        text += f", {rate / best_rate:.0%} of the best ({best_rate:,.0f} with {point_of(best).words})"
    ratio = chosen.values.get("fed_ratio")
    verdict = judge(ratio)
    if verdict == Verdict.NO_TRAINER or ratio is None:
        return f"{text}."
    if verdict == Verdict.KEEPS_UP:
        return f"{text}; the trainer does not wait."
    if verdict == Verdict.UNCLEAR:
        return f"{text}; the trainer may wait: the runs disagree."
    lost = f"it gets {lost_share(ratio):.0%} fewer images/s than alone"
    return f"{text}; the trainer waits with every number of workers: {lost}."


def name_row(key: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Name of a loader in tables, with 'ours', because `pytorch` and `webdataset` are libraries, too."""
    backend, data = key["backend"], key["data"]
    if backend == TODAY_BACKEND:
        name = "imagefolder (torchvision)"
    elif backend == SYNTHETIC:
        name = "synthetic (noise)"
    elif data == backend:
        name = f"{backend} (ours)"
    else:
        name = f"{backend} (ours, {data})"
    name += _name_point(key, settings)
    if len(settings["trainers"]) > 1:
        name += f", fed to {key['trainer']}"
    return name


def _name_point(key: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Name workers and batch size where rows differ in them."""
    text = ""
    if len(settings["workers"]) > 1:
        text += f", {quantity(key['workers'], 'worker')}"
    if len(settings["batch_sizes"]) > 1:
        text += f", batch {key['batch_size']:,}"
    return text


def name_loader(backend: str, data: str) -> str:
    """Name of a loader in sentences: 'shards', or 'dali on shards'."""
    return backend if backend == data else f"{backend} on {data}"


def describe_saving(row: Row, today: Row, gpu_price: float | None) -> str:
    """Say what a row saves of an hour of training with today's loader, in minutes and dollars."""
    if row is today:
        return "what people have today"
    if row.key["backend"] == SYNTHETIC:
        return ""
    saved = saved_share(row, today)
    now, then = training_rate(today), training_rate(row)
    if "fed_ratio" not in row.values:
        return f"{_times(then.median / now.median)} as many" if saved is not None else ""
    if saved is None:
        return "slower than today" if then.high < now.low else "as today, within noise"
    money = "" if gpu_price is None else f", ${saved * gpu_price:,.2f} an hour"
    return f"saves {60 * saved:.0f} of 60 min{money}"


def name_accelerator(row: Row, settings: Mapping[str, Any]) -> str:
    """Name of what the row's loader feeds, in sentences."""
    trainer = row.key["trainer"]
    if is_emulated(trainer) and "trainer_images_per_s" in row.values:
        return f"an emulated accelerator of {row.values['trainer_images_per_s'].median:,.0f} images/s"
    on_cpu = str(settings.get("device", "cpu")) == "cpu"
    return f"{trainer} on this CPU" if on_cpu else "this accelerator"


def describe_launch_limit(row: Row) -> list[str]:
    """Say that launching alone takes longer than the device of the row's trainer; empty where it does not."""
    share = row.values.get("launch_share")
    if share is None or share.median < 1 - NEGLIGIBLE_SHARE:
        return []
    return [f"Launching limits this trainer to {row.values['trainer_images_per_s'].median:,.0f} images/s."]


def describe_trainer(name: str, launches: int) -> str:
    """Name a trainer; an emulated one with the operations that each of its steps launches from Python."""
    if not is_emulated(name):
        return name
    return f"{name} with {quantity(launches, 'launch', 'launches')} a step"


def describe_conditions(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    trials: Sequence[Trial],
    repeats: int,
) -> tuple[str, ...]:
    """Write the conditions under which the figures of `bench loaders` hold, a sentence each.

    Args:
        repeats: number of runs of the loader that has the fewest.
    """
    trainers: dict[str, str] = {}
    for row in rows:
        if "trainer_images_per_s" in row.values:
            rate = row.values["trainer_images_per_s"].median
            name = describe_trainer(row.key["trainer"], settings["launches"])
            trainers.setdefault(row.key["trainer"], f"{name} ({rate:,.0f} images/s)")
    folders = dict.fromkeys(
        f"{path} ({quantity(data['samples'], 'picture')})" for path, data in settings["data"].items()
    )
    sizes = " and ".join(f"{size:,}" for size in settings["batch_sizes"])
    workers = ", ".join(map(str, settings["workers"]))
    was_warm = all(trial.numbers.get("page_cache_is_warm", 1.0) for trial in trials)
    unusual = [
        f"{name} {settings[name]}"
        for name, default in _DEFAULTS.items()
        if settings.get(name, default) != default
    ]
    work = [
        f"trainer {', '.join(trainers.values())}" if trainers else "no trainer",
        f"batch {sizes} of {settings['size']}x{settings['size']}",
        f"augment {settings['augment']}",
        *unusual,
        f"{workers} worker{'' if workers == '1' else 's'}",
        f"page cache {'warm' if was_warm else 'not warmed: larger than memory'}",
        f"medians of {repeats} runs, taking turns" if repeats > 1 else "one run each",
    ]
    sentences = [machine_line(machine)]
    if folders:
        sentences.append(f"data: {', '.join(folders)}")
    sentences += [", ".join(work), "ours: this project's loaders, by their --backend names"]
    refused = next((trial.facts["refused"] for trial in trials if "refused" in trial.facts), "")
    if refused:
        sentences.append(
            f"a training with ImageFolder stops at a picture that Pillow cannot open, as {refused}; here the "
            f"next picture was served instead"
        )
    sentences += dict.fromkeys(note for data in settings["data"].values() for note in data.get("notes", ()))
    return tuple(f"{sentence}." for sentence in sentences)


def next_step(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Write the line that a reader would type next; empty where there is nothing to do."""
    real_rows = [row for row in rows if is_real_loader(row) and row.key["trainer"] == rows[0].key["trainer"]]
    gain = find_gain(real_rows)
    if gain.today is None:
        return ""
    if judge(gain.today.values.get("fed_ratio")) == Verdict.KEEPS_UP:
        return ""
    paths = {name_data(path, settings): path for path in settings["data"]}
    if gain.best and gain.best[0].key["data"] in paths:
        backend, data = gain.best[0].key["backend"], gain.best[0].key["data"]
        chosen = "" if is_usual_backend(gain.best[0]) else f", backend={backend!r}"
        return f"Next: loaders.build({paths[data]!r}{chosen}) in your training code."
    if all(reads_tree(row) for row in real_rows) and gain.today.key["data"] in paths:
        return f"Next: 'bench recommend {paths[gain.today.key['data']]}' says what converting would bring."
    return ""


def disturbance(share: float | None, then: str = ", so no winner is named") -> str:
    """Write the sentence that other processes took CPU time; empty where they took little.

    Args:
        share: share of the CPUs that other processes took, 0 to 1; None where not known.
        then: consequence, which is added to the sentence.
    """
    if share is None or not is_disturbed(share):
        return ""
    return (
        f"Other processes took {share:.0%} of the CPUs while this was measured: they slowed the "
        f"measurements, and not all of them equally{then}. Measure again on a quiet machine."
    )
