"""Result of `bench recommend`: the answer, the pictures that cannot be read, and the lines to paste. Pure.

`bench.report.forecast` predicts the figures, and `bench.report.sentences` writes the sentences about gains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report.forecast import (
    HELD,
    MODEL_ERROR,
    RISK,
    SAMPLE,
    Inputs,
    choose_format,
    find_inputs,
    find_profiles,
    fits_memory,
    predict,
    stored_size,
)
from bench.report.gain import TODAY_BACKEND, find_gain
from bench.report.loaders import TRAINER, other_cpu_share
from bench.report.result import Result, Row, Trial, is_emulated
from bench.report.sentences import answer, describe_trainer, source_name
from bench.report.stats import is_disturbed
from bench.report.verdict import Verdict, judge, reads_tree
from bench.report.words import machine_line, number
from precache.errors import shell_command
from precache.recipe import Recipe
from precache.reporting import quantity

QUESTION = "What would another loader, or converting, bring?"
RULE = (
    "In general: convert to shards where there is disk enough, to webdataset where the disk is slow or "
    "small, and not at all where loaders.build is fast enough on the tree."
)
COLUMNS = (
    *("busy_share", "fed_images_per_s", "loader_images_per_s", "cold_images_per_s"),
    *("stored_bytes", "convert_s"),
)
_VERSIONS = ("python", "torch", "pillow", "simplejpeg")
_INDENT = "    "
_DTYPE = (
    "dtype='uint8' is what was measured, as a GPU gets it and normalises: there, give device='cuda' instead. "
    "Without either, the CPU normalises to float32, which takes its time."
)
_USUAL_REJECTS = 0.01
"""Share of damaged pictures that `precache convert` allows by default."""


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
    changes: Mapping[str, Any] | None = None,
    folders: Mapping[str, str] | None = None,
) -> Result:
    """Make the result for a whole tree from trials on a sample.

    Args:
        settings: settings of a recommendation, see `bench.measure.recommend`.
        trials: trials on the sample.
        skipped: loaders that could not be measured, and why.
        changes: fields of `Inputs` with other values, for which a second prediction ('what if') is made.
        folders: folder that each format would be converted to; by default data/FORMAT.
    """
    profiles, inputs = find_profiles(settings, trials), find_inputs(settings, trials)
    rows = predict(profiles, inputs)
    other_cpu = other_cpu_share(trials)
    sample = next(trial for trial in trials if trial.key["kind"] == SAMPLE)
    paragraphs = [tuple(_answer(rows, inputs, settings, trials))]
    has_today = any(row.key["backend"] == TODAY_BACKEND for row in rows)
    if unread := _describe_unread(sample, has_today=has_today):
        paragraphs.append(tuple(unread))
    best = _best_row(rows, other_cpu)
    shown, best_rows = list(rows), [best] if best is not None else []
    if changes:
        other = replace(inputs, **changes)
        what_if = [
            replace(row, name=f"{row.name}, what if", key={**row.key, "what_if": True})
            for row in predict(profiles, other)
        ]
        sentences = [f"What if: {_describe_inputs(other)}. No such prediction was tried: it extrapolates."]
        if not is_disturbed(other_cpu):
            sentences += _answer(what_if, other, settings, trials)
        paragraphs.append(tuple(sentences))
        best = _best_row(what_if, other_cpu)
        shown += what_if
        best_rows += [best] if best is not None else []
    return Result(
        command="recommend",
        question=QUESTION,
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(shown),
        thing="from",
        columns=COLUMNS,
        answer=tuple(paragraphs),
        best=tuple(
            position for position, row in enumerate(shown) if any(row is other for other in best_rows)
        ),
        bars="busy_share",
        conditions=tuple(_conditions(machine, settings, rows, inputs, sample, trials)),
        next_step="\n".join(_next_steps(rows, settings, sample, other_cpu, folders or {})),
        skipped=dict(skipped),
    )


def _answer(
    rows: Sequence[Row], inputs: Inputs, settings: Mapping[str, Any], trials: Sequence[Trial]
) -> list[str]:
    """Write what to do: first change the line, then convert."""
    turns = sum(trial.key["kind"] == TRAINER for trial in trials)
    return answer(
        rows,
        accelerator=inputs.accelerator(settings["trainer"]),
        images=inputs.train_images,
        repeats=max(2, turns),  # also what one turn predicts has a range
        other_cpu=other_cpu_share(trials),
        today=rows[0],
    )


def _best_row(rows: Sequence[Row], other_cpu: float | None) -> Row | None:
    """Row to convert to; None where converting gains nothing or other processes keep the machine busy."""
    return None if is_disturbed(other_cpu) else choose_format(rows)


def _describe_unread(sample: Trial, *, has_today: bool) -> list[str]:
    """Write which pictures of the sample could not be read, by which reader, and what follows from it.

    Args:
        sample: trial that read the sample.
        has_today: whether ImageFolder could be measured.

    Returns:
        Sentences; none where all pictures could be read.
    """
    numbers, sentences = sample.numbers, []
    if numbers["damaged"]:
        sentences.append(
            f"precache cannot read {numbers['damaged']:,.0f} of the {numbers['taken']:,.0f} pictures that "
            f"were tried, first {sample.facts['damaged']}. They are left out here; a conversion leaves out "
            f"as many as --max-rejects allows, and loaders.build skips them with Reading(on_error='skip')."
        )
    if numbers["undecodable"]:
        sentences.append(
            f"{numbers['undecodable']:,.0f} of them may be intact, for this Pillow has no decoder of their "
            f"kind: first {sample.facts['undecodable']}."
        )
    if "refused" in sample.facts:
        sentences.append(sample.facts["refused"])
        if has_today:
            sentences.append("It was measured on the others.")
    return sentences


def _allowed_rejects(sample: Trial, images: int) -> float | None:
    """Share of damaged pictures, 0 to 1, that a conversion has to allow; None where the default is enough.

    It is two standard deviations above the share in the sample, or just that share if all pictures were read.
    """
    damaged, tried = sample.numbers["damaged"], sample.numbers["taken"]
    bound = damaged if tried >= images else damaged + 2 * math.sqrt(damaged)
    share = min(1.0, math.ceil(100 * bound / tried) / 100)
    return share if share > _USUAL_REJECTS else None


def _build_line(path: object, settings: Mapping[str, Any], *, skips_damaged: bool = False) -> str:
    """Write the call of `loaders.build` that serves what was measured, to be pasted.

    Args:
        path: dataset or tree to load.
        settings: settings with `batch_size`, `size`, `device` and `trainer`.
        skips_damaged: whether the loader has to skip damaged pictures.
    """
    words = [repr(str(path)), f"batch_size={settings['batch_size']}", f"size={settings['size']}"]
    words.append("augment='train'")
    if settings["device"] != "cpu":
        words.append(f"device={settings['device']!r}")
    elif _serves_uint8(settings):
        words.append("dtype='uint8'")
    if skips_damaged:
        words.append("reading=loaders.Reading(on_error='skip')")
    return f"loaders.build({', '.join(words)})"


def _serves_uint8(settings: Mapping[str, Any]) -> bool:
    """Whether the timed batches were uint8 on the CPU, as a GPU gets them: no real trainer took them."""
    trainer = str(settings["trainer"])
    return bool(settings["device"] == "cpu" and (trainer == "none" or is_emulated(trainer)))


def _next_steps(
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    sample: Trial,
    other_cpu: float | None,
    folders: Mapping[str, str],
) -> list[str]:
    """Write lines to paste, each below its purpose; none where nothing gains or the machine was busy."""
    gain, best = find_gain(rows, rows[0]), _best_row(rows, other_cpu)
    if is_disturbed(other_cpu) or judge(rows[0].values["fed_ratio"]) == Verdict.KEEPS_UP or not gain.best:
        return []
    source, data = list(settings["data"].items())[-1]
    steps = []
    if gain.line is not None:
        line = _build_line(source, settings, skips_damaged=bool(sample.numbers["damaged"]))
        steps += ["To train from the pictures as they are:", f"{_INDENT}loader = {line}"]
    if best is not None:
        folder = folders.get(best.key["data"], f"data/{best.key['data']}")
        line = _build_line(folder, settings)
        steps += [f"To train from {source_name(best)}, once they are there:", f"{_INDENT}loader = {line}"]
    if _serves_uint8(settings):
        steps.append(_DTYPE)
    if best is not None:
        recipe = Recipe(format=best.key["data"], size=settings["stored_size"], quality=settings["quality"])
        rejects = _allowed_rejects(sample, data["samples"])
        steps += [
            f"To convert to {source_name(best)}, and to measure what that brought:",
            f"{_INDENT}{_convert_line(source, folder, recipe, rejects)}",
            f"{_INDENT}{_measure_line(source, folder, settings)}",
        ]
    return steps


def _convert_line(source: str, folder: str, recipe: Recipe, rejects: float | None) -> str:
    """Write the `precache convert` command that stores what was measured, to be pasted."""
    words: list[object] = ["precache convert", Path(source), Path(folder), recipe.to_flags()]
    if rejects is not None:
        words.append(f"--max-rejects {rejects:.0%}")
    return shell_command(*words)


def _measure_line(source: str, folder: str, settings: Mapping[str, Any]) -> str:
    """Write the `bench loaders` command that compares the tree and its converted folder, to be pasted."""
    names = ("trainer", "launches", "batch_size", "size")
    options = [f"--{name.replace('_', '-')} {settings[name]}" for name in names]
    return shell_command("bench loaders", Path(source), Path(folder), "--augment train", *options)


def _conditions(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    inputs: Inputs,
    sample: Trial,
    trials: Sequence[Trial],
) -> list[str]:
    """Write the conditions under which the figures hold, a sentence each."""
    turns = sum(trial.key["kind"] == TRAINER for trial in trials)
    other_cpu = other_cpu_share(trials)
    busy = "" if other_cpu is None else f", other processes {other_cpu:.0%} of the CPUs"
    source = list(settings["data"])[-1]
    side = settings["size"]
    sentences = [
        f"{machine_line(machine, _VERSIONS)}.",
        f"data: {source}: {_describe_inputs(inputs)}; trainer "
        f"{describe_trainer(settings['trainer'], settings['launches'])}; batch "
        f"{settings['batch_size']} of {side}x{side}, augment {settings['augment']}; stored at most "
        f"{settings['stored_size']} px, quality {settings['quality']}.",
        f"Predicted from a sample of {quantity(int(sample.numbers['pictures']), 'picture')}; median of "
        f"{quantity(turns, 'turn')}, page cache warm, checksums not compared{busy}.",
    ]
    right, tried = HELD
    sentences.append(
        f"Ranges are over the turns, and {MODEL_ERROR:.0%} more on either side: of {tried} such predictions "
        f"in the lab, {right} came true."
    )
    large = [source_name(row) for row in rows if not fits_memory(row.values["stored_bytes"].median, inputs)]
    if large:
        sentences.append(
            f"Larger than half of the memory, and so read from the disk in every epoch: {', '.join(large)}."
        )
    if any(not reads_tree(row) for row in rows):
        sentences.append(RULE)
        if settings["stored_size"] < stored_size(side):
            sentences.append(RISK)
    return sentences


def _describe_inputs(inputs: Inputs) -> str:
    gpus = "" if inputs.gpus == 1 else f"{inputs.gpus} x "
    return (
        f"{quantity(inputs.images, 'picture')}, {quantity(inputs.cpus, 'CPU')}, accelerator {gpus}"
        f"{number(inputs.trainer_images_per_s)} images/s, disk {number(inputs.disk_bytes_per_s / 1e6)} MB/s"
    )
