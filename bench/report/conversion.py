"""Result of `bench convert`: what a conversion spends its time on, compared with other writers. Pure.

The `key` of a trial says what was measured: {"what": STAGES, "repeat"} for the seconds that each stage of one
worker took, {"what": WHOLE, "writer", "repeat"} for a conversion as a user runs it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import stats
from bench.report.loaders import other_cpu_share
from bench.report.result import Result, Row, Trial
from bench.report.stats import Estimate, disturbance, is_disturbed
from bench.report.words import machine_line, percent
from precache.reporting import human_bytes, quantity

QUESTION = "What limits converting?"
STAGES, WHOLE = "stages", "whole"
PRECACHE = "precache"
STAGE_NAMES = ("read", "decode", "resize", "encode", "statistics", "write")
"""Stages of a worker in their order; `encode` only where JPEGs are stored."""
_REMEDIES = {
    "decode": ": for large photographs, --decode scaled decodes less",
    "encode": ": --format shards does not encode",
}


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
) -> Result:
    """Make the result from trials.

    Args:
        settings: the `images` and `source_bytes` of the `source`, `recipe_flags`, `format`, and the
            `processes` that each writer has.
        trials: stages and whole conversions.
        skipped: what could not be measured, and why.
    """
    stages = [trial for trial in trials if trial.key["what"] == STAGES]
    stage_rows = _make_stage_rows(stages, settings["processes"])
    whole_rows = _make_whole_rows([trial for trial in trials if trial.key["what"] == WHOLE])
    slowest = max(stage_rows, key=lambda row: row.values["time_share"].median)
    rows = (*stage_rows, *whole_rows)
    return Result(
        command="convert",
        question=QUESTION,
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=rows,
        thing="stage, or whole conversion",
        columns=("converted_images_per_s", "time_share"),
        answer=_answer(machine, slowest, stage_rows, whole_rows, other_cpu_share(trials)),
        best=(rows.index(slowest),),
        bars="time_share",
        conditions=_describe_conditions(machine, settings, trials),
        skipped=dict(skipped),
    )


def _make_stage_rows(trials: Sequence[Trial], processes: int) -> list[Row]:
    """Make a row for each stage: its share of a worker's time, and images/s if it were the only stage."""
    rows = []
    for name in STAGE_NAMES:
        if f"{name}_s" not in trials[0].numbers:
            continue
        shares, rates = [], []
        for trial in trials:
            seconds = trial.numbers[f"{name}_s"]
            shares.append(seconds / _stages_s(trial))
            rates.append(processes * trial.numbers["images"] / seconds)
        rows.append(
            Row(
                name=name,
                key={"stage": name},
                values={
                    "time_share": stats.estimate(shares),
                    "converted_images_per_s": stats.estimate(rates),
                },
            )
        )
    return rows


def _stages_s(trial: Trial) -> float:
    """Seconds of all stages of a worker together."""
    return sum(trial.numbers.get(f"{name}_s", 0.0) for name in STAGE_NAMES)


def _make_whole_rows(trials: Sequence[Trial]) -> list[Row]:
    """Make a row for each writer, precache first, with the ratio of precache's images/s to the writer's."""
    rates: dict[str, list[float]] = {PRECACHE: []}
    for trial in sorted(trials, key=lambda trial: int(trial.key["repeat"])):
        rates.setdefault(trial.key["writer"], []).append(trial.images_per_s)
    rows: list[Row] = []
    for writer, values in rates.items():
        row = Row(
            name=f"{writer}, start-up included",
            key={"writer": writer, "peer": writer != PRECACHE},
            values={"converted_images_per_s": stats.estimate(values)},
            texts={"time_share": ""},  # a whole conversion is no share of a worker's time
        )
        if writer != PRECACHE:
            repeats = min(len(values), len(rates[PRECACHE]))
            rows[0].ratios[writer] = stats.ratio(rates[PRECACHE][:repeats], values[:repeats])
        rows.append(row)
    return rows


def _answer(
    machine: Mapping[str, str],
    slowest: Row,
    stage_rows: Sequence[Row],
    whole_rows: Sequence[Row],
    other_cpu: float | None,
) -> tuple[tuple[str, ...], ...]:
    """Say how fast converting is, what takes the time, how near the limit it is, and how others compare."""
    precache_row = whole_rows[0]
    rate = precache_row.values["converted_images_per_s"].median
    remedy = _REMEDIES.get(slowest.name, "")
    if slowest.name == "resize" and machine["pillow_flavour"] == "pillow":
        remedy = ": Pillow-SIMD resizes faster (precache/README.md has the command)"
    first = [
        f"Converting reaches {rate:,.0f} images/s, start-up included.",
        f"{slowest.name.capitalize()} takes {percent(slowest.values['time_share'].median)} of a worker's "
        f"time{remedy}.",
    ]
    rates = {row.name: row.values["converted_images_per_s"].median for row in stage_rows}
    together = 1 / sum(1 / value for value in rates.values())
    decoding = rates["decode"]
    limits = (
        f"That is {rate / decoding:.0%} of what decoding alone would reach ({decoding:,.0f}), and "
        f"{rate / together:.0%} of what workers would reach that never wait ({together:,.0f})."
    )
    paragraphs = [tuple(first), (limits,)]
    if is_disturbed(other_cpu):
        paragraphs.append((disturbance(other_cpu),))
    elif precache_row.ratios:
        paragraphs.append(tuple(_compare(writer, ratio) for writer, ratio in precache_row.ratios.items()))
    return tuple(paragraphs)


def _compare(writer: str, ratio: Estimate) -> str:
    if ratio.low <= 1 <= ratio.high:
        return f"{writer} is as fast, within noise ({ratio:.2f})."
    return f"precache converts {ratio:.2f} times as many images/s as {writer}."


def _describe_conditions(
    machine: Mapping[str, str], settings: Mapping[str, Any], trials: Sequence[Trial]
) -> tuple[str, ...]:
    repeats = settings["repeats"]
    was_warm = all(trial.numbers.get("page_cache_is_warm", 1.0) for trial in trials)
    conditions = [
        f"{machine_line(machine, ('python', 'pillow', 'simplejpeg'))}.",
        f"data: {settings['source']} ({quantity(settings['images'], 'picture')}, "
        f"{human_bytes(settings['source_bytes'])}).",
        f"{settings['recipe_flags']}, {quantity(settings['processes'], 'worker')}, page cache "
        f"{'warm' if was_warm else 'not warmed: larger than memory'}, "
        f"{f'medians of {repeats} runs, taking turns' if repeats > 1 else 'one run each'}.",
        f"Stages: of one worker alone, over {quantity(settings['stage_images'], 'picture')}; statistics are "
        f"checksums and the mean of the pixels.",
    ]
    versions = dict.fromkeys(trial.facts["version"] for trial in trials if "version" in trial.facts)
    if versions:
        conditions.append(f"peers: {', '.join(versions)}.")
    return tuple(conditions)
