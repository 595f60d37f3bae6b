"""What was measured and what it says: a `Trial`, a `Row` of trials, and the `Result` that a command ends in.

    Trial    raw numbers of one process; the JSON file of a result holds all of them
    Row      one thing that was measured: the trials of all repeats as medians with ranges
    Result   rows, the answer, and when they hold; it is shown, saved, compared and drawn

A result is made from trials by a pure function, `bench.report.loaders.make_result` and its like, so what a
file says can be worked out anew from the trials in it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.report.stats import Estimate
from precache.errors import SettingError

VERSION = 1
_DIGITS = 6  # of a number in a file: more than any clock has


@dataclass(frozen=True, slots=True)
class Watched:
    """Activity of the machine while something ran; `bench.machine.monitor` samples it.

    Attributes:
        time_s: time of each sample, in seconds since the start.
        series: name to one value per sample. Shares are from 0 to 1, `..._per_s` are bytes per second
            since the sample before.
        peak, mean: of each series.
        flags: limits that hurt, one sentence each.
    """

    time_s: tuple[float, ...] = ()
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    mean: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """One run in one process, in raw numbers.

    Attributes:
        key: what was measured, and what tells it from the other trials of a command: plain JSON values,
            as in `{"what": "fed", "backend": "shards", "data": "data/shards", "repeat": 0}`.
        numbers: by name, with the unit in the name: `images_per_s`, `first_batch_s`, `wait_share`.
        series: one number for each timed batch or epoch: `wait_s`, `step_s`.
        facts: what is no number, as `version`; `failed` is why there are no numbers.
        watched: activity of the machine meanwhile; None where it was not sampled.
    """

    key: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    watched: Watched | None = None

    @property
    def failed(self) -> str:
        """Why it measured nothing; empty where it did."""
        return self.facts.get("failed", "")

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up."""
        return self.numbers["images_per_s"]

    @property
    def batch_s(self) -> tuple[float, ...]:
        """Time of each timed batch in seconds: waiting for it, and the step."""
        if "batch_s" in self.series:
            return self.series["batch_s"]
        return tuple(
            wait + step for wait, step in zip(self.series["wait_s"], self.series["step_s"], strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without what is empty; `from_json` reads them back."""
        parts: dict[str, Any] = {
            "of": self.key,
            "numbers": {name: float(number) for name, number in self.numbers.items()},
            "series": self.series,
            "facts": self.facts,
        }
        if self.watched is not None:
            parts["watched"] = {
                "time_s": self.watched.time_s,
                "series": self.watched.series,
                "flags": self.watched.flags,
            }
        plain: dict[str, Any] = to_plain({name: part for name, part in parts.items() if part})
        return plain

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trial":
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        watched = content.get("watched")
        return cls(
            key=dict(content["of"]),
            numbers={
                name: float(number)
                for name, number in content.get("numbers", {}).items()
                if number is not None  # it was infinite
            },
            series=_read_series(content.get("series", {})),
            facts={name: str(fact) for name, fact in content.get("facts", {}).items()},
            watched=None
            if watched is None
            else summarise_watched(
                tuple(map(float, watched["time_s"])), _read_series(watched["series"]), tuple(watched["flags"])
            ),
        )


def summarise_watched(
    time_s: tuple[float, ...], series: dict[str, tuple[float, ...]], flags: tuple[str, ...] = ()
) -> Watched:
    """Samples with the peak and the mean of each series."""
    peak = {name: max(values) for name, values in series.items() if values}
    mean = {name: sum(values) / len(values) for name, values in series.items() if values}
    return Watched(time_s, series, peak, mean, flags)


def _read_series(content: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, values)) for name, values in content.items()}


@dataclass(frozen=True, slots=True)
class Spikes:
    """Batches that took far longer than the quicker half did.

    Attributes:
        batches: their positions in the series.
        above_s: from how many seconds on a batch counts as one; None where too few were timed to say.
        period: every how many batches one comes; None where they are not regular.
    """

    batches: tuple[int, ...] = ()
    above_s: float | None = None
    period: int | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Timed batches of one run, in order.

    Attributes:
        wait_s: how long the trainer waited for each, in seconds.
        step_s: how long its step then took, in seconds.
        epoch_starts: positions of the first batches of epochs.
        wait_spikes, step_spikes: first batches of epochs are never among them.
        findings: spikes, and waits for first batches, in words, one sentence each.
    """

    wait_s: tuple[float, ...]
    step_s: tuple[float, ...]
    epoch_starts: tuple[int, ...] = ()
    wait_spikes: Spikes = Spikes()
    step_spikes: Spikes = Spikes()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do about a loader.

    Attributes:
        what: as the subject of a sentence.
        images_per_s: with it, fed.
        measured: in the same run; else it is predicted.
    """

    what: str
    images_per_s: Estimate
    measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was measured.

    Attributes:
        name: as people call it.
        key: what tells it from other rows, and pairs it with its like in another result: plain JSON values.
        values: figures by their name in `bench.report.table.COLUMNS`; what was not measured is not there.
        texts: cells that are words, by the same names.
        ratios: its rate over that of other libraries' loaders which do the same work, by their names.
        batches: timed batches of the last repeat; None where no trainer was fed.
        watched: activity of the machine in the last repeat; None where it was not sampled.
        stages: images/s that each stage alone can do, by name: "storage", "decode", "collate", "transfer",
            "compute"; "storage or decode" where two were not timed apart.
        stalls: seconds per batch that the trainer waits for "fetch", "prep" and "transfer" from a warm
            cache, and as "cold fetch" what a cold one would add.
        bottleneck: the narrowest of the stages; empty where none stands out.
        advice: the bottleneck and the change with the largest gain, in words; empty where none was sought.
        changes: all that were considered.
        findings: what else is worth saying, a sentence each.
        paste: lines to write or to run, as they are.
        baseline: whether the others are compared with it.
        detail: whether it is shown with --details only.
    """

    name: str
    key: dict[str, Any]
    values: dict[str, Estimate] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, Estimate] = field(default_factory=dict)
    batches: Batches | None = None
    watched: Watched | None = None
    stages: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    advice: str = ""
    changes: tuple[Change, ...] = ()
    findings: tuple[str, ...] = ()
    paste: tuple[str, ...] = ()
    baseline: bool = False
    detail: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without what is empty; batches and samples are in the trials."""
        parts: dict[str, Any] = {
            "name": self.name,
            "of": self.key,
            "values": {name: value.to_json() for name, value in self.values.items()},
            "texts": self.texts,
            "ratios": {name: ratio.to_json() for name, ratio in self.ratios.items()},
            "stages": self.stages,
            "stalls": self.stalls,
            "bottleneck": self.bottleneck,
            "advice": self.advice,
            "changes": [
                {"what": one.what, "images_per_s": one.images_per_s.to_json(), "measured": one.measured}
                for one in self.changes
            ],
            "findings": self.findings,
            "paste": self.paste,
        }
        plain: dict[str, Any] = to_plain({name: part for name, part in parts.items() if part})
        return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The end of a command of `bench`, with what one needs to repeat it.

    Attributes:
        command: whose it is.
        question: that it answers; the title of its page.
        machine: of `bench.machine.hardware.describe_machine`.
        settings: plain JSON values; `data` says of each folder its pictures and its digest.
        trials: all that were measured.
        rows: what they say, in the order of the table.
        thing: what a row is: 'loader'.
        columns: names of the values that a newcomer needs, see `bench.report.table.COLUMNS`; the others are
            shown with --details.
        answer: paragraphs of sentences: what the reader came for.
        best: positions of the rows that stand out.
        bars: name of the value that is drawn as bars on the page; empty for none.
        conditions: when the figures hold, a sentence each.
        next_step: what a reader would type next; empty where there is nothing to do.
        skipped: what could not be measured, and why.
        summary: what programs read from the file beside the rows, by name.
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
        """Whether the row is one of those that stand out."""
        return any(self.rows[at] is row for at in self.best)

    def to_json(self) -> dict[str, Any]:
        """The document that a result's file holds; its trials are what a result is made from again."""
        made = {
            "answer": [" ".join(paragraph) for paragraph in self.answer],
            "rows": [row.to_json() for row in self.rows],
            "conditions": self.conditions,
            "next_step": self.next_step,
        }
        document = make_document(self.command, self.machine, self.settings, self.trials, self.skipped)
        plain: dict[str, Any] = to_plain(document | made | self.summary)
        return plain


def make_document(
    command: str,
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: tuple[Trial, ...],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """What a file holds from the first trial on: enough to go on, and to make the result."""
    return {
        "version": VERSION,
        "command": command,
        "machine": dict(machine),
        "settings": to_plain(settings),
        "skipped": dict(skipped),
        "trials": [trial.to_json() for trial in trials],
    }


def format_document(document: Mapping[str, Any]) -> str:
    """JSON with a line for each trial and each row."""
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
    """What a result's file holds, read: see `make_document`."""

    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    trials: tuple[Trial, ...]
    skipped: dict[str, str]


def parse_document(text: str, name: str) -> Document:
    """Read what `format_document` gave.

    Args:
        name: of the file, for errors.

    Raises:
        SettingError: it is something else.
    """
    remedy = "give a file that --json of a command of bench wrote"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SettingError(f"{name}: not JSON ({error}); {remedy}") from error
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
        raise SettingError(f"{name}: not a result of bench ({error!r}); {remedy}") from error


def to_plain(values: Any) -> Any:
    """Values as JSON gives them back: lists for tuples, rounded numbers, None for the infinite."""
    if isinstance(values, Mapping):
        return {str(name): to_plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [to_plain(value) for value in values]
    if isinstance(values, float):
        return float(f"{values:.{_DIGITS}g}") if math.isfinite(values) else None
    if values is None or isinstance(values, (str, int)):
        return values
    return str(values)
