"""Data model of measurements: a `Trial`, a `Row` made of trials, and the `Result` that a command ends in.

    Trial    raw numbers of one process; the JSON file of a result holds all trials
    Row      one measured loader, part or stream: medians with ranges over the trials of all repeats
    Result   rows, the answer, and the conditions; it is shown, saved, compared and drawn

Pure functions such as `bench.report.loaders.make_result` make a result from trials, so that the result of a
file can be made again from the trials in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, convert, structs

from bench.report.change import Basis, Change
from bench.report.stats import Batches, Estimate
from precache.errors import SettingError
from precache.storage.stored_json import decode, encode

RAW = "raw"
"""Kind of a raw image tree, as `loaders.dataset` has it; the kind of converted data is its format's name."""
_DIGITS = 6  # significant digits of a number in a file: more than any clock has


class Activity(Struct, frozen=True, omit_defaults=True):
    """Activity of the machine while something ran; `bench.machine.monitor` samples it.

    Attributes:
        time_s: time of each sample, in seconds since the start.
        series: one value per sample by the name of the quantity. Shares are from 0 to 1; `..._per_s` are
            bytes per second since the previous sample.
    """

    time_s: tuple[float, ...] = ()
    series: dict[str, tuple[float, ...]] = {}

    @property
    def peak(self) -> dict[str, float]:
        """Largest value of each series."""
        return {name: max(values) for name, values in self.series.items() if values}

    @property
    def mean(self) -> dict[str, float]:
        """Mean of each series."""
        return {name: sum(values) / len(values) for name, values in self.series.items() if values}


class Trial(Struct, frozen=True, omit_defaults=True):
    """Raw numbers of one run in one process.

    Attributes:
        key: identity of the trial among those of a command, in plain JSON values such as
            `{"kind": "fed", "backend": "shards", "data": "data/shards", "repeat": 0}`.
        numbers: numbers by name, with the unit in the name: `images_per_s`, `first_batch_s`, `wait_share`.
        series: one number for each timed batch or epoch, by name: `wait_s`, `step_s`; `launch_s` is the part
            of the step in which an emulated trainer launches operations.
        facts: texts by name, such as `shapes`; `failed` is the reason why there are no numbers.
        activity: activity of the machine meanwhile; None where it was not sampled.
    """

    key: dict[str, Any] = {}
    numbers: dict[str, float] = {}
    series: dict[str, tuple[float, ...]] = {}
    facts: dict[str, str] = {}
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

    def rounded(self) -> "Trial":
        """Return the trial as a file has it: with rounded numbers, and without those that are infinite."""
        numbers = {name: float(number) for name, number in self.numbers.items() if math.isfinite(number)}
        return convert(to_plain(structs.replace(self, numbers=numbers)), Trial)


class Stage(str, Enum):
    """Stage that a picture passes; the value is its name in files. An 'or': the two were not timed apart."""

    STORAGE = "storage"
    DECODE = "decode"
    COLLATE = "collate"
    STORAGE_OR_DECODE = "storage or decode"
    STORAGE_OR_COLLATE = "storage or collate"
    TRANSFER = "transfer"
    COMPUTE = "compute"
    LAUNCHING = "launching"


class Stall(str, Enum):
    """What a batch is waited for; the value is its name in files."""

    FETCH = "fetch"
    PREP = "prep"
    FETCH_OR_PREP = "fetch or prep"
    TRANSFER = "transfer"
    COLD_FETCH = "cold fetch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Figures of one measured loader, part or stream: a line of the table.

    Attributes:
        name: name in tables.
        key: identity of the row, which also finds the same row in another result: plain JSON values.
        data_kind: kind of the data that a loader reads: RAW, or a format; empty where the row is no loader.
        values: figures by their name in `bench.report.table.COLUMNS`, without those that were not measured.
        texts: cells that are words, by the same names.
        batches: timed batches of the last repeat; None where no trainer was fed.
        activity: activity of the machine in the last repeat; None where it was not sampled.
        stages: images/s of each stage alone.
        stalls: seconds per batch that the trainer waits with a warm cache; COLD_FETCH is what a cold cache
            adds at least.
        bottleneck: the slowest of the stages; None where none stands out.
        changes: changes that were considered.
        sentences: sentences on all of that, shown with --details.
        paste: lines to paste into a script or to run.
        baseline: whether the other rows are compared with this one.
        basis: where the values are from.
        detail: whether the row is shown with --details only.
    """

    name: str
    key: dict[str, Any]
    data_kind: str = ""
    values: dict[str, Estimate] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    batches: Batches | None = None
    activity: Activity | None = None
    stages: dict[Stage, float] = field(default_factory=dict)
    stalls: dict[Stall, float] = field(default_factory=dict)
    bottleneck: Stage | None = None
    changes: tuple[Change, ...] = ()
    sentences: tuple[str, ...] = ()
    paste: tuple[str, ...] = ()
    baseline: bool = False
    basis: Basis = Basis.MEASURED
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
            "changes": [change.to_json() for change in self.changes],
            "sentences": self.sentences,
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
        return {**structs.asdict(document), **to_plain(conclusions | self.summary)}


class Document(Struct, frozen=True, kw_only=True):
    """The part of a result's file that is written from the first trial on.

    It is enough to continue an interrupted command, and to make the result. What the result concludes stands
    in the file behind it, for people and other programs. Until there is a conclusion, the file ends behind a
    trial: a line is appended for each.
    """

    version: Literal[1] = 1
    command: str
    machine: dict[str, str]
    settings: dict[str, Any]
    skipped: dict[str, str]
    trials: tuple[Trial, ...]


def make_document(
    command: str,
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: tuple[Trial, ...],
    skipped: Mapping[str, str],
) -> Document:
    """Make the document of trials so far, as it is read from a file."""
    return Document(
        command=command,
        machine=dict(machine),
        settings=to_plain(settings),
        skipped=dict(skipped),
        trials=tuple(trial.rounded() for trial in trials),
    )


def format_document(document: Mapping[str, Any]) -> str:
    """Write a document as JSON with a line for each trial and each row."""
    lines = []
    for name, part in document.items():
        if name in ("trials", "rows") and part:
            entries = ",\n".join(f"  {_line(entry)}" for entry in part)
            lines.append(f" {_line(name)}: [\n{entries}\n ]")
        else:
            lines.append(f" {_line(name)}: {_line(part)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def format_unfinished(document: Document) -> str:
    """Write a document whose end is missing, so that the lines of further trials can be appended to it."""
    head = {name: part for name, part in structs.asdict(document).items() if name != "trials"}
    return (
        format_document(head).removesuffix("\n}\n")
        + ',\n "trials": [\n'
        + "".join(map(format_trial, document.trials))
    )


def format_trial(trial: Trial) -> str:
    """Write the line of a trial in an unfinished document."""
    return f"  {_line(trial)},\n"


def _line(value: Any) -> str:
    return encode(value).decode().rstrip("\n")


def parse_document(raw: bytes, path: object) -> Document:
    """Read a document that `format_document` or `format_unfinished` wrote.

    Of an unfinished one, a last line without its end is left out: the command was killed while it wrote it.

    Args:
        raw: content of the file.
        path: path of the file, for errors.

    Raises:
        SettingError: it is no result of bench.
    """
    lines, _, _ = raw.rpartition(b"\n")
    if lines.endswith((b",", b"[")):
        raw = lines.removesuffix(b",") + b"]}"
    remedy = "give a file that --json of a command of bench wrote"
    return decode(raw, Document, path=path, error=SettingError, remedy=remedy)


def name_data(path: str, settings: Mapping[str, Any]) -> str:
    """Name of a folder's data in tables: its kind, and the folder's name where several are of that kind."""
    kinds = {folder: str(data["kind"]) for folder, data in settings["data"].items()}
    if path not in kinds:
        return path
    kind = kinds[path]
    name = "raw tree" if kind == RAW else kind
    return f"{name} {Path(path).name}" if list(kinds.values()).count(kind) > 1 else name


def is_emulated(trainer: str) -> bool:
    """Whether a trainer of that name, as on the command line, computes nothing."""
    return trainer.partition(":")[0] == "emulated"


def to_plain(values: Any) -> Any:
    """Convert values to those that JSON reads back: lists for tuples, rounded numbers, None for infinity."""
    if isinstance(values, Struct):
        values = structs.asdict(values)
    if isinstance(values, Enum):
        return values.value
    if isinstance(values, Mapping):
        return {str(to_plain(name)): to_plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [to_plain(value) for value in values]
    if isinstance(values, float):
        return float(f"{values:.{_DIGITS}g}") if math.isfinite(values) else None
    if values is None or isinstance(values, (str, int)):
        return values
    return str(values)
