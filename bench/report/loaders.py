"""Result of `bench loaders`: rows from trials, and what `bench.report.sentences` says about them. Pure.

The `key` of a trial says what was measured: {"kind": LOADER, "backend", "data", "workers", "batch_size",
"repeat"}, where `data` is a folder of `settings["data"]`. A trial of FED has "trainer", too; those of TRAINER
and TRANSFER have no backend, data and workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.report import stats
from bench.report.gain import TODAY_BACKEND, busy_share, find_gain, is_real_loader
from bench.report.grid import choose
from bench.report.result import RAW, Result, Row, Stage, Trial, name_data
from bench.report.sentences import (
    answer,
    describe_choice,
    describe_conditions,
    describe_launch_limit,
    describe_row,
    describe_saving,
    disturbance,
    name_accelerator,
    name_loader,
    name_row,
    next_step,
)
from bench.report.stats import Estimate, exactly, is_disturbed
from bench.report.verdict import SYNTHETIC, explain
from precache.formats import FORMATS

LOADER, COLD, FED, STAGES = "loader", "cold", "fed", "stages"
TRAINER, TRANSFER = "trainer", "transfer"
"""Kinds of trials, `key["kind"]`."""
NO_TRAINER = "none"
QUESTION = "Does the trainer wait for data?"
_DECODERS = ("imagefolder", "pytorch", *(form.backend for form in FORMATS.values() if not form.holds_pixels))
"""Backends that decode JPEGs."""


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
    gpu_price: float | None = None,
) -> Result:
    """Make the result from trials.

    Args:
        settings: settings that all trials share; lists of `trainers`, `workers` and `batch_sizes`; `data`,
            which has the `name`, `samples` and `digest` of each folder.
        trials: all that was measured.
        skipped: loaders that could not be measured, and why.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """
    rows = [replace(row, sentences=describe_row(row)) for row in make_rows(settings, trials)]
    other_cpu = other_cpu_share(trials)
    repeats = _fewest_repeats(trials)
    has_winner = repeats > 1 and not is_disturbed(other_cpu)
    if not is_grid(settings) and has_winner:
        rows = _compare_with_today(rows, gpu_price)
    chosen = rows
    paragraphs: list[tuple[str, ...]] = []
    if is_grid(settings):
        chosen, sentences = _choose_settings(rows)
        paragraphs.append((disturbance(other_cpu),) if is_disturbed(other_cpu) else tuple(sentences))
    if not is_grid(settings) or any(row.key["backend"] == TODAY_BACKEND for row in chosen):
        paragraphs += _answer_for_trainers(chosen, settings, repeats, other_cpu, gpu_price)
    best: list[Row] = []
    if has_winner:
        best = list(chosen)
        if not is_grid(settings):
            best = [row for group in _by_trainer(rows) for row in find_gain(group).best]
    return Result(
        command="loaders",
        question=QUESTION,
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(rows),
        thing="loader",
        columns=(
            *("loader_images_per_s", "busy_share", "launch_ratio", "launch_p95_ratio"),
            *("cold_images_per_s", "first_batch_s"),
        ),
        answer=tuple(paragraphs),
        best=tuple(position for position, row in enumerate(rows) if any(row is other for other in best)),
        bars="busy_share" if any("busy_share" in row.values for row in rows) else "loader_images_per_s",
        conditions=describe_conditions(machine, settings, rows, trials, repeats),
        next_step=next_step(chosen, settings) if has_winner else "",
        skipped=dict(skipped),
    )


def _fewest_repeats(trials: Sequence[Trial]) -> int:
    """Count the runs of the loader that has the fewest.

    A file with trials may have been continued with fewer repeats for another folder.
    """
    counts: dict[str, int] = {}
    for trial in trials:
        if trial.key["kind"] == LOADER:
            loader = str({name: value for name, value in trial.key.items() if name != "repeat"})
            counts[loader] = counts.get(loader, 0) + 1
    return min(counts.values(), default=0)


def is_grid(settings: Mapping[str, Any]) -> bool:
    """Whether several numbers of workers or batch sizes were asked for."""
    return len(settings["workers"]) * len(settings["batch_sizes"]) > 1


def other_cpu_share(trials: Sequence[Trial]) -> float | None:
    """Share of the CPUs that other processes took, on average; None where no trial has it."""
    shares = [trial.numbers["other_cpu_share"] for trial in trials if "other_cpu_share" in trial.numbers]
    return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True, slots=True)
class _Repeats:
    """Trials that differ in the repeat alone, in the order of repeats."""

    trials: tuple[Trial, ...]

    @property
    def rates(self) -> list[float]:
        """Images/s of each repeat."""
        return [trial.images_per_s for trial in self.trials]

    def estimate(self, name: str = "images_per_s") -> Estimate:
        """Estimate of a number over the repeats."""
        return stats.estimate([trial.numbers[name] for trial in self.trials])


class _Index:
    """Lookup of trials by their keys; trials that failed are left out."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = [trial for trial in trials if not trial.failure]

    def find(self, kind: str, **key: Any) -> _Repeats | None:
        """Find the repeats of a kind of trial whose key has all these entries; None where there are none."""
        wanted = {"kind": kind, **key}
        repeats = [
            trial
            for trial in self._trials
            if all(trial.key.get(name) == value for name, value in wanted.items())
        ]
        if not repeats:
            return None
        return _Repeats(tuple(sorted(repeats, key=lambda trial: trial.key["repeat"])))

    def loaders(self, kind: str) -> list[dict[str, Any]]:
        """List backend, data, workers and batch size of each loader with trials of that kind, each once."""
        names = ("backend", "data", "workers", "batch_size")
        loaders: list[dict[str, Any]] = []
        for trial in self._trials:
            loader = {name: trial.key.get(name) for name in names}
            if trial.key["kind"] == kind and loader not in loaders:
                loaders.append(loader)
        return loaders


def make_rows(settings: Mapping[str, Any], trials: Sequence[Trial]) -> list[Row]:
    """Make a row for each loader with each trainer, ImageFolder first."""
    index = _Index(trials)
    loaders = sorted(index.loaders(LOADER), key=lambda loader: loader["backend"] != TODAY_BACKEND)
    rows: list[Row] = []
    for trainer in settings["trainers"]:
        for batch_size in settings["batch_sizes"]:
            for workers in settings["workers"]:
                candidates = [
                    loader
                    for loader in loaders
                    if loader["batch_size"] == batch_size and loader["workers"] == workers
                ]
                batch_rows: list[Row] = []
                rest: dict[int, Stage] = {}
                for loader in candidates:
                    row = _make_row(index, loader, trainer, settings)
                    if row is not None:
                        rest[len(batch_rows)] = _rest_stage(index, loader, row, settings)
                        batch_rows.append(row)
                # a worker per CPU that was measured needs no prediction
                cpus = workers if settings["cpus"] in settings["workers"] else settings["cpus"]
                rows += explain(batch_rows, workers, batch_size, cpus, rest)
    return rows


def _make_row(index: _Index, loader: dict[str, Any], trainer: str, settings: Mapping[str, Any]) -> Row | None:
    """Make the row of a loader with a trainer; None where it was not measured with that trainer."""
    alone, fed = index.find(LOADER, **loader), index.find(FED, **loader, trainer=trainer)
    shared = {"trainer": trainer, "batch_size": loader["batch_size"]}
    trained = index.find(TRAINER, **shared)
    has_trainer = trainer != NO_TRAINER
    if alone is None or (has_trainer and (fed is None or trained is None)):
        return None
    timed = fed if has_trainer and fed is not None else alone
    values = {"loader_images_per_s": alone.estimate(), **_batch_values(timed, alone)}
    for name, repeats in (
        ("cold_images_per_s", index.find(COLD, **loader)),
        ("transfer_images_per_s", index.find(TRANSFER, **shared)),
    ):
        if repeats is not None:
            values[name] = repeats.estimate()
    stages = index.find(STAGES, **loader)
    if stages is not None:
        values["read_images_per_s"] = stages.estimate("read_images_per_s")
        values["decode_images_per_s"] = stages.estimate("decode_images_per_s")
    batches = activity = None
    if has_trainer and fed is not None and trained is not None:
        count = min(len(fed.rates), len(trained.rates))
        ratio = stats.ratio(fed.rates[:count], trained.rates[:count])
        values |= {
            "trainer_images_per_s": trained.estimate(),
            "fed_images_per_s": fed.estimate(),
            "fed_ratio": ratio,
            "busy_share": busy_share(ratio),
            "first_step_s": fed.estimate("first_step_s"),
            "wait_share": fed.estimate("wait_share"),
            **_launch_values(fed, trained),
        }
        last = fed.trials[-1]
        starts = tuple(int(start) for start in last.series.get("epoch_starts", ()))
        batches = stats.analyse_batches(last.series["wait_s"], last.series["step_s"], starts)
        activity = next((trial.activity for trial in reversed(fed.trials) if trial.activity), None)
    values |= _stored_values(loader, settings)
    key = {
        "backend": loader["backend"],
        "data": name_data(loader["data"], settings),
        "trainer": trainer,
        "workers": loader["workers"],
        "batch_size": loader["batch_size"],
    }
    return Row(
        name=name_row(key, settings),
        key=key,
        data_kind=settings["data"].get(loader["data"], {}).get("kind", ""),
        values=values,
        batches=batches,
        activity=activity,
        detail=loader["backend"] == SYNTHETIC,
    )


def _batch_values(timed: _Repeats, alone: _Repeats) -> dict[str, Estimate]:
    """Time of the first batch, of the loader alone, and median and 95th percentile of the timed batches."""
    medians, p95s, gaps = [], [], []
    for trial in timed.trials:
        batch_s = trial.batch_s
        medians.append(stats.percentile(batch_s, 0.5))
        p95s.append(stats.percentile(batch_s, 0.95))
        gaps += [batch_s[int(start)] for start in trial.series.get("epoch_starts", ())]
    values = {
        "first_batch_s": alone.estimate("first_batch_s"),
        "batch_s": stats.estimate(medians),
        "batch_p95_s": stats.estimate(p95s),
    }
    if gaps and values["batch_s"].median > 0:
        gap = max(gaps) / values["batch_s"].median
        values["epoch_gap_ratio"] = exactly(gap)
    return values


def _launch_values(fed: _Repeats, trained: _Repeats) -> dict[str, Estimate]:
    """Time of launching beside the loader over that alone, repeat by repeat, and the share of a step alone.

    Empty where the trainer launches nothing.
    """
    pairs = [
        (beside.series["launch_s"], alone.series["launch_s"])
        for beside, alone in zip(fed.trials, trained.trials, strict=False)
        if "launch_s" in beside.series and "launch_s" in alone.series
    ]
    if not pairs:
        return {}
    values = {
        name: stats.estimate(
            [stats.percentile(beside, share) / stats.percentile(alone, share) for beside, alone in pairs]
        )
        for name, share in (("launch_ratio", 0.5), ("launch_p95_ratio", 0.95))
    }
    shares = [median(trial.series["launch_s"]) / median(trial.series["step_s"]) for trial in trained.trials]
    return {**values, "launch_share": stats.estimate(shares)}


def _stored_values(loader: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Estimate]:
    """Disk and time that a loader's converted data takes; empty for a raw tree and for noise."""
    data = settings["data"].get(loader["data"], {})
    if data.get("kind") == RAW or loader["backend"] == SYNTHETIC or settings.get("cache") is not None:
        return {}
    values = {}
    for name in ("stored_bytes", "convert_s"):
        if data.get(name) is not None:
            values[name] = exactly(data[name])
    return values


def _rest_stage(index: _Index, loader: dict[str, Any], row: Row, settings: Mapping[str, Any]) -> Stage:
    """Choose the stage to which that part of the loader's time belongs that no timed stage explains."""
    if "read_images_per_s" in row.values:
        return Stage.COLLATE
    is_cached = settings.get("cache") is not None
    decodes = loader["backend"] in _DECODERS and not is_cached
    alone = index.find(LOADER, **loader)
    assert alone is not None, "the row has it"
    was_warm = all(trial.numbers.get("page_cache_is_warm", 1.0) for trial in alone.trials)
    cold = row.values.get("cold_images_per_s")
    is_disk_apart = cold is not None and cold.high < row.values["loader_images_per_s"].low
    if was_warm or is_cached or is_disk_apart or loader["backend"] == SYNTHETIC:
        return Stage.DECODE if decodes else Stage.COLLATE
    return Stage.STORAGE_OR_DECODE if decodes else Stage.STORAGE_OR_COLLATE


def _by_trainer(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows by their trainer."""
    names = dict.fromkeys(row.key["trainer"] for row in rows if is_real_loader(row))
    return [[row for row in rows if row.key["trainer"] == name] for name in names]


def _choose_settings(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Choose a row of each loader with each trainer, and write a sentence for each."""
    series: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if is_real_loader(row):
            series.setdefault((row.key["backend"], row.key["data"], row.key["trainer"]), []).append(row)
    chosen, sentences = [], []
    for (backend, data, _), loader_rows in series.items():
        row, best = choose(loader_rows)
        chosen.append(row)
        sentences.append(describe_choice(name_loader(backend, data), row, best))
    return chosen, sentences


def _compare_with_today(rows: Sequence[Row], gpu_price: float | None) -> list[Row]:
    """Add to each row what it saves of an hour of training with today's loader, in minutes and dollars."""
    compared = []
    for row in rows:
        group = [other for other in rows if other.key["trainer"] == row.key["trainer"]]
        today = find_gain(group).today
        text = "" if today is None else describe_saving(row, today, gpu_price)
        texts = {**row.texts, "saves": text} if text else row.texts
        compared.append(replace(row, texts=texts, baseline=row is today))
    return compared


def _answer_for_trainers(
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    repeats: int,
    other_cpu: float | None,
    gpu_price: float | None,
) -> list[tuple[str, ...]]:
    """Write a paragraph for each trainer."""
    paragraphs = []
    groups = _by_trainer(rows)
    for group in groups:
        real_rows = [row for row in group if is_real_loader(row)]
        name = real_rows[0].key["trainer"]
        sentences = answer(
            group,
            accelerator=name_accelerator(real_rows[0], settings),
            images=next((data["samples"] for data in settings["data"].values() if data.get("samples")), None),
            repeats=repeats,
            other_cpu=other_cpu,
            gpu_price=gpu_price,
        )
        if len(groups) > 1:
            sentences[0] = f"{name}: {sentences[0]}"
        sentences += describe_launch_limit(real_rows[0])
        paragraphs.append(tuple(sentences))
    return paragraphs
