"""Result of `bench hardware`: the speed of each part of a machine, and which part is the slowest. Pure.

The `key` of a trial holds the measured part, by its name in PARTS, and the repeat.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import stats
from bench.report.loaders import other_cpu_share
from bench.report.result import Result, Row, Trial
from bench.report.sentences import disturbance
from bench.report.stats import Estimate
from bench.report.words import duration, machine_line, number
from precache.reporting import human_bytes, quantity

QUESTION = "What limits this machine?"
SERVED_BYTES = 224 * 224 * 3
"""Bytes of one picture as it is copied to the device: uint8 [224, 224, 3]."""
# A training step of ResNet-50 on 224x224: 4.09e9 multiply-adds forward (torchvision's figure for its
# weights), two operations each, and twice as many again backward.
STEP_FLOP = 3 * 2 * 4.09e9
_VERSIONS = ("python", "torch", "numpy", "simplejpeg")


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a machine whose speed is measured.

    Attributes:
        number: name of the number in its trials.
        per_picture: amount of work that one picture takes, in units of `number`; None: the bytes of its file.
        feeds: its work in feeding an accelerator, as the subject of a sentence; empty if it has none.
    """

    number: str
    per_picture: float | None
    feeds: str = ""


PARTS = {
    "memory copy, one thread": Part("bytes_per_s", None),
    "memory copy, all threads": Part("bytes_per_s", None),
    "disk, sequential read": Part("bytes_per_s", None, "reading from the disk"),
    "disk, random 4 KiB": Part("bytes_per_s", None),
    "disk, random 128 KiB": Part("bytes_per_s", None),
    "JPEG decode, one core": Part("images_per_s", 1),
    "JPEG decode, all cores": Part("images_per_s", 1, "decoding on all cores"),
    "host to device, pinned": Part("bytes_per_s", SERVED_BYTES, "copying to the device"),
    "host to device, pageable": Part("bytes_per_s", SERVED_BYTES),
    "matrix multiply": Part("flop_per_s", STEP_FLOP),
}
"""Parts by name, in the order of the table's rows."""


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
) -> Result:
    """Make the result from trials.

    Args:
        settings: `images` and `file_bytes` of the pictures that the times are for, and whether they lie
            `on_scratch_disk`, which is the disk that is measured.
        trials: measurements of parts.
        skipped: parts that could not be measured, and why.
    """
    rows = []
    for name in PARTS:
        measured = [trial for trial in trials if trial.key["part"] == name]
        if measured:
            rows.append(_make_row(name, measured, settings))
    slowest = _find_slowest(rows)
    return Result(
        command="hardware",
        question=QUESTION,
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(rows),
        thing="part",
        columns=("rate", "alone_s", "how"),
        answer=(_answer(rows, settings, other_cpu_share(trials)),),
        best=(rows.index(slowest),) if slowest is not None else (),
        bars="alone_s",
        conditions=_describe_conditions(machine, settings),
        skipped=dict(skipped),
    )


def _make_row(name: str, trials: Sequence[Trial], settings: Mapping[str, Any]) -> Row:
    part = PARTS[name]
    rates = [trial.numbers[part.number] for trial in trials]
    if part.per_picture is None:
        amount = float(settings["file_bytes"])
    else:
        amount = settings["images"] * part.per_picture
    return Row(
        name=name,
        key={"part": name},
        values={"alone_s": stats.estimate([amount / rate for rate in rates])},
        texts={"rate": _format_rate(part.number, stats.estimate(rates)), "how": trials[0].facts["how"]},
    )


def _format_rate(name: str, rate: Estimate) -> str:
    """Format a rate with its unit and range, like '11.6 GB/s (11.2-11.9)'."""
    if name == "images_per_s":
        factor, unit = 1.0, "images/s"
    elif name == "flop_per_s":
        factor, unit = 1e12, "TFLOP/s"
    elif rate.median >= 2e9:
        factor, unit = 1e9, "GB/s"
    else:
        factor, unit = 1e6, "MB/s"
    low, high = number(rate.low / factor), number(rate.high / factor)
    return f"{number(rate.median / factor)} {unit} ({low}-{high})"


def _feeding_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of parts that feed an accelerator, the slowest first."""
    feeding = [row for row in rows if PARTS[row.name].feeds]
    return sorted(feeding, key=lambda row: -row.values["alone_s"].median)


def _find_slowest(rows: Sequence[Row]) -> Row | None:
    feeding = _feeding_rows(rows)
    return feeding[0] if feeding else None


def _answer(rows: Sequence[Row], settings: Mapping[str, Any], other_cpu: float | None) -> tuple[str, ...]:
    """Write the sentence that names the slowest part of feeding an accelerator."""
    feeding = _feeding_rows(rows)
    if not feeding:
        return ("No part that feeds an accelerator could be measured.",)
    times = {PARTS[row.name].feeds: duration(row.values["alone_s"].median) for row in feeding}
    slowest, *others = times
    sentence = (
        f"{slowest.capitalize()} is the slowest part of feeding an accelerator: {times[slowest]} for "
        f"{quantity(settings['images'], 'picture')}"
    )
    if others:
        sentence += f"; {' and '.join(f'{part} takes {times[part]}' for part in others)}"
    disturbed = disturbance(other_cpu, then="")
    return (f"{sentence}.", disturbed) if disturbed else (f"{sentence}.",)


def _describe_conditions(machine: Mapping[str, str], settings: Mapping[str, Any]) -> tuple[str, ...]:
    pictures, repeats = quantity(settings["images"], "picture"), settings["repeats"]
    conditions = [
        f"{machine_line(machine, _VERSIONS)}.",
        f"Pictures decoded: {settings['pictures']}.",
        f"Times are of this part alone, once over {pictures} ({human_bytes(settings['file_bytes'])}): files "
        f"through memory and disk (random: one block at a time), pictures decoded, their pixels (224x224) to "
        f"the device, training steps of ResNet-50 at the full rate of matrix multiply.",
        f"Medians of {repeats} runs, taking turns." if repeats > 1 else "One run each.",
    ]
    if not settings["on_scratch_disk"]:
        conditions.append(
            f"{settings['pictures']} lies on another disk than {settings['scratch']}, which was measured: "
            f"name a folder on its disk with --scratch."
        )
    return tuple(conditions)
