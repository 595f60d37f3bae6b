"""Data model of measurements: a `Trial`, a `Row` made of trials, and the `Result` that a command ends in.

    Trial    raw numbers of one process; the JSON file of a result holds all trials
    Row      one measured loader, part or stream: medians with ranges over the trials of all repeats
    Result   rows, the answer, and the conditions; it is shown, saved, compared and drawn

Pure functions such as `bench.report.loaders.make_result` make a result from trials, so that the result of a
file can be made again from the trials in it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.report.stats import Estimate
from precache.errors import SettingError

VERSION = 1
_DIGITS = 6  # significant digits of a number in a file: more than any clock has


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of the machine while something ran; `bench.machine.monitor` samples it.

    Attributes:
        time_s: time of each sample, in seconds since the start.
        series: one value per sample by the name of the quantity. Shares are from 0 to 1; `..._per_s` are
            bytes per second since the previous sample.
        peak, mean: largest value and mean of each series.
        flags: sentences on limits that slow training down.
    """

    time_s: tuple[float, ...] = ()
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Raw numbers of one run in one process.

    Attributes:
        key: identity of the trial among those of a command, in plain JSON values such as
            `{"kind": "fed", "backend": "shards", "data": "data/shards", "repeat": 0}`.
        numbers: numbers by name, with the unit in the name: `images_per_s`, `first_batch_s`, `wait_share`.
        series: one number for each timed batch or epoch, by name: `wait_s`, `step_s`.
        facts: texts by name, such as `shapes`; `failed` is the reason why there are no numbers.
        activity: activity of the machine meanwhile; None where it was not sampled.
    """

    key: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    activity: Activity | None = None

    @property
    def failure(self) -> str:
        """Reason why the trial has no numbers; empty where it has some."""
        return self.facts.get("failed", "")

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up."""
        return self.numbers["images_per_s"]

    @property
    def batch_s(self) -> tuple[float, ...]:
        """Time of each timed batch in seconds: the wait for it and the step."""
        return tuple(
            wait + step for wait, step in zip(self.series["wait_s"], self.series["step_s"], strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without empty parts; `from_json` reads them back."""
        parts: dict[str, Any] = {
            "key": self.key,
            "numbers": {name: float(number) for name, number in self.numbers.items()},
            "series": self.series,
            "facts": self.facts,
        }
        if self.activity is not None:
            parts["activity"] = {
                "time_s": self.activity.time_s,
                "series": self.activity.series,
                "flags": self.activity.flags,
            }
        plain: dict[str, Any] = to_plain({name: part for name, part in parts.items() if part})
        return plain

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trial":
        """Make a trial from the values of `to_json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: `content` is something else.
        """
        activity = None
        if content.get("activity") is not None:
            samples = content["activity"]
            activity = summarise_activity(
                tuple(map(float, samples["time_s"])), _read_series(samples["series"]), tuple(samples["flags"])
            )
        return cls(
            key=dict(content["key"]),
            numbers={
                name: float(number)
                for name, number in content.get("numbers", {}).items()
                if number is not None  # an infinite number is written as null
            },
            series=_read_series(content.get("series", {})),
            facts={name: str(fact) for name, fact in content.get("facts", {}).items()},
            activity=activity,
        )


def summarise_activity(
    time_s: tuple[float, ...], series: dict[str, tuple[float, ...]], flags: tuple[str, ...] = ()
) -> Activity:
    """Make an activity from samples: add the peak and the mean of each series."""
    peak = {name: max(values) for name, values in series.items() if values}
    mean = {name: sum(values) / len(values) for name, values in series.items() if values}
    return Activity(time_s, series, peak, mean, flags)


def _read_series(content: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, values)) for name, values in content.items()}


@dataclass(frozen=True, slots=True)
class Spikes:
    """Batches that took far longer than the quicker half.

    Attributes:
        batches: positions in the series.
        above_s: seconds above which a batch counts as a spike; None where too few batches were timed.
        period: number of batches from one spike to the next; None where spikes are not regular.
    """

    batches: tuple[int, ...] = ()
    above_s: float | None = None
    period: int | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Timed batches of one run, in order.

    Attributes:
        wait_s: seconds that the trainer waited for each batch.
        step_s: seconds of the step on each batch.
        epoch_starts: positions of the first batches of epochs.
        wait_spikes, step_spikes: spikes of `wait_s` and `step_s`, first batches of epochs left out.
        findings: sentences on spikes and on waits for first batches.
    """

    wait_s: tuple[float, ...]
    step_s: tuple[float, ...]
    epoch_starts: tuple[int, ...] = ()
    wait_spikes: Spikes = Spikes()
    step_spikes: Spikes = Spikes()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoaderChange:
    """Change that one could make to a loader, and what it would bring.

    Attributes:
        title: name of the change, as the subject of a sentence.
        images_per_s: images/s of training with the change.
        measured: whether that was measured in the same run; else it is predicted.
    """

    title: str
    images_per_s: Estimate
    measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Figures of one measured loader, part or stream: a line of the table.

    Attributes:
        name: name in tables.
        key: identity of the row, which also finds the same row in another result: plain JSON values.
        values: figures by their name in `bench.report.table.COLUMNS`, without those that were not measured.
        texts: cells that are words, by the same names.
        batches: timed batches of the last repeat; None where no trainer was fed.
        activity: activity of the machine in the last repeat; None where it was not sampled.
        stages: images/s of each stage alone, by name: "storage", "decode", "collate", "transfer",
            "compute"; "storage or decode" where two were not timed apart.
        stalls: seconds per batch that the trainer waits for "fetch", "prep" and "transfer" with a warm
            cache; "cold fetch" is what a cold cache would add.
        bottleneck: the slowest of the stages; empty where none stands out.
        advice: sentences on the bottleneck and the change that gains most; empty where none was looked for.
        changes: changes that were considered.
        findings: further sentences, shown with --details.
        paste: lines to paste into a script or to run.
        baseline: whether the other rows are compared with this one.
        detail: whether the row is shown with --details only.
    """

    name: str
    key: dict[str, Any]
    values: dict[str, Estimate] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    batches: Batches | None = None
    activity: Activity | None = None
    stages: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    advice: str = ""
    changes: tuple[LoaderChange, ...] = ()
    findings: tuple[str, ...] = ()
    paste: tuple[str, ...] = ()
    baseline: bool = False
    detail: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without empty parts; batches and activity are in the trials."""
        parts: dict[str, Any] = {
            "name": self.name,
            "key": self.key,
            "values": {name: value.to_json() for name, value in self.values.items()},
            "texts": self.texts,
            "stages": self.stages,
            "stalls": self.stalls,
            "bottleneck": self.bottleneck,
            "advice": self.advice,
            "changes": [
                {
                    "title": change.title,
                    "images_per_s": change.images_per_s.to_json(),
                    "measured": change.measured,
                }
                for change in self.changes
            ],
            "findings": self.findings,
            "paste": self.paste,
        }
        plain: dict[str, Any] = to_plain({name: part for name, part in parts.items() if part})
        return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of a command of `bench`, with everything that is needed to repeat it.

    Attributes:
        command: name of the command.
        question: question that the result answers; the title of its page.
        machine: description by `bench.machine.hardware.describe_machine`.
        settings: plain JSON values; `data` has the number of pictures and the digest of each folder.
        trials: all that was measured.
        rows: rows in the order of the table.
        thing: title of the first column, which names the rows: 'loader'.
        columns: names of the values that a newcomer needs, see `bench.report.table.COLUMNS`; the others are
            shown with --details.
        answer: paragraphs, each a tuple of sentences.
        best: positions of the rows that are shown in bold.
        bars: name of the value that is drawn as bars on the page; empty for none.
        conditions: sentences on the conditions under which the figures hold.
        next_step: line that a reader would type next; empty where there is nothing to do.
        skipped: reasons, by the name of what could not be measured.
        summary: further values, by name, for programs that read the file.
    """

    command: str
    question: str
    machine: dict[str, str]
    settings: dict[str, Any]
    trials: tuple[Trial, ...]
    rows: tuple[Row, ...]
    thing: str
    columns: tuple[str, ...]
    answer: tuple[tuple[str, ...], ...] = ()
    best: tuple[int, ...] = ()
    bars: str = ""
    conditions: tuple[str, ...] = ()
    next_step: str = ""
    skipped: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    def is_best(self, row: Row) -> bool:
        """Whether the row is one of the best."""
        return any(self.rows[position] is row for position in self.best)

    def to_json(self) -> dict[str, Any]:
        """Document of a result's file; the result can be made again from the trials in it."""
        conclusions = {
            "answer": [" ".join(paragraph) for paragraph in self.answer],
            "rows": [row.to_json() for row in self.rows],
            "conditions": self.conditions,
            "next_step": self.next_step,
        }
        document = make_document(self.command, self.machine, self.settings, self.trials, self.skipped)
        plain: dict[str, Any] = to_plain(document | conclusions | self.summary)
        return plain


def make_document(
    command: str,
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: tuple[Trial, ...],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Make the part of a file that is written from the first trial on.

    It is enough to continue an interrupted command, and to make the result.
    """
    return {
        "version": VERSION,
        "command": command,
        "machine": dict(machine),
        "settings": to_plain(settings),
        "skipped": dict(skipped),
        "trials": [trial.to_json() for trial in trials],
    }


def format_document(document: Mapping[str, Any]) -> str:
    """Write a document as JSON with a line for each trial and each row."""
    lines = []
    for name, part in document.items():
        if name in ("trials", "rows") and part:
            entries = ",\n".join(f"  {json.dumps(entry)}" for entry in part)
            lines.append(f" {json.dumps(name)}: [\n{entries}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(part)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a result's file, see `make_document`."""

    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    trials: tuple[Trial, ...]
    skipped: dict[str, str]


def parse_document(text: str, name: str) -> Document:
    """Read a document that `format_document` wrote.

    Args:
        text: content of the file.
        name: name of the file, for errors.

    Raises:
        SettingError: `text` is something else.
    """
    remedy = "give a file that --json of a command of bench wrote"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SettingError(f"not JSON ({error})", path=name, remedy=remedy) from error
    try:
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r}")
        return Document(
            str(content["command"]),
            {key: str(value) for key, value in content["machine"].items()},
            dict(content["settings"]),
            tuple(map(Trial.from_json, content["trials"])),
            {key: str(value) for key, value in content["skipped"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(f"not a result of bench ({error!r})", path=name, remedy=remedy) from error


def to_plain(values: Any) -> Any:
    """Convert values to those that JSON reads back: lists for tuples, rounded numbers, None for infinity."""
    if isinstance(values, Mapping):
        return {str(name): to_plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [to_plain(value) for value in values]
    if isinstance(values, float):
        return float(f"{values:.{_DIGITS}g}") if math.isfinite(values) else None
    if values is None or isinstance(values, (str, int)):
        return values
    return str(values)
