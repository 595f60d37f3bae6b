"""What `precache auto` measures: which settings fit, and what a conversion brought."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.machine import page_cache
from bench.machine.others import OtherProcesses
from bench.measure import sampling
from bench.measure.loader_run import LoaderRun
from bench.measure.recommendation import Check, Recommendation, Runs, compare
from bench.measure.sampling import Converted, RecommendSpec
from bench.report import choice as rules
from bench.report import stats
from bench.report.advice import AS_WORDS
from bench.report.choice import Choice, Gain, Setting
from bench.report.forecast import AS_IT_IS, RAW_NAME, Prediction
from bench.report.payback import Cost, Way
from precache.console.commandline import human_bytes
from precache.console.progress import Progress, unseen
from precache.conversion.estimate import predict_bytes
from precache.errors import SettingError
from precache.recipe import Recipe
from precache.sources.base import Scan

_PICTURES = 100  # that tell the size of all
_FIRST_EPOCH_S = 10.0  # one that takes longer does not go before what is measured


def choose(scan: Scan, size: int, formats: Sequence[str], room_bytes: float, limit: str) -> Choice:
    """The setting that keeps most of the pictures, of those in which one of `formats` fits into `room_bytes`.

    Raises:
        SettingError: none fits; says what would.
    """
    smallest: tuple[float, str, Setting] | None = None
    for number, setting in enumerate(rules.settings(size)):
        sizes = {name: float(predict_bytes(scan, recipe(name, setting), _PICTURES)) for name in formats}
        needed = {name: rules.needed_bytes(predicted) for name, predicted in sizes.items()}
        fitting = tuple(name for name in formats if needed[name] <= room_bytes)
        if fitting:
            return Choice(setting, sizes, fitting, number == 0, limit)
        least = min(needed, key=lambda name: needed[name])
        if smallest is None or needed[least] < smallest[0]:
            smallest = (needed[least], least, setting)
    assert smallest is not None, "there is a setting"
    least_bytes, name, setting = smallest
    raise SettingError(
        f"no format fits into {limit}: the smallest, {name} of {setting.words(name)}, needs "
        f"{human_bytes(least_bytes)}; make that room, or give --max-bytes "
        f"{-int(-least_bytes // 1e6)}MB or more"
    )


def recipe(name: str, setting: Setting) -> Recipe:
    """What `precache auto` converts to."""
    return Recipe(format=name, size=setting.stored_size, quality=setting.quality)


@dataclass(frozen=True, slots=True)
class Proof:
    """What came: the gain, and each prediction beside what was measured.

    Attributes:
        other_cpu: share of the CPUs, 0 to 1, that other processes took meanwhile; None where not known.
    """

    gain: Gain
    checks: list[Check]
    other_cpu: float | None

    @property
    def median_error(self) -> float:
        """Of the predictions, as a share of what was measured."""
        return rules.median_error([check.error for check in self.checks])


def prove(
    tree: Path,
    destination: Path,
    found: Recommendation,
    name: str,
    spec: RecommendSpec,
    converted: Converted,
    whole: bool,
    on_progress: Progress = unseen,
) -> Proof:
    """Feed the trainer from the tree, as today and by `loaders.build`, and from the dataset, by turns.

    Args:
        whole: whether `converted.seconds` are those of all pictures.
    """
    spec = replace(spec, trainer=found.settings["trainer"])
    predicted = {one.name: one for one in found.predictions}
    places = {free: tree for free in AS_IT_IS if free in predicted} | {name: destination}
    runs: dict[str, list[LoaderRun]] = {kind: [] for kind in places}
    turns, others = spec.repeats, OtherProcesses()
    on_progress(0, len(places) * turns)
    for turn in range(turns):
        for number, (kind, place) in enumerate(places.items(), 1):
            warm = page_cache.warm(place)
            if not warm:  # the disk is part of what is measured
                predicted[kind] = replace(
                    predicted[kind], warm_images_per_s=predicted[kind].cold_images_per_s
                )
            epoch_s = found.inputs.train_images / predicted[kind].warm_images_per_s
            runs[kind].append(
                sampling.serve(place, kind, spec, first_epoch=warm and epoch_s < _FIRST_EPOCH_S)
            )
            on_progress(len(places) * turn + number, len(places) * turns)
    checks = [
        check
        for kind in places
        for check in _compare(predicted[kind], runs[kind], None if kind in AS_IT_IS else converted)
        if whole or check.quantity != "conversion"
    ]
    cost = Cost(converted.seconds if whole else None, converted.bytes)
    return Proof(_gain(runs, name, cost, found.inputs.train_images), checks, others.share())


def _compare(predicted: Prediction, runs: list[LoaderRun], converted: Converted | None) -> list[Check]:
    turns = len(runs)
    wholes = [] if converted is None else [converted] * turns
    return compare([predicted] * turns, Runs([], [], [], wholes, runs))


def _gain(runs: dict[str, list[LoaderRun]], name: str, cost: Cost, images: int) -> Gain:
    rates = {kind: [run.together for run in of] for kind, of in runs.items()}
    ways = {
        kind: Way(
            AS_WORDS.get(kind, kind),
            stats.estimate(rates[kind]).median,
            stats.estimate([min(1.0, run.together / run.trainer) for run in of]).median,
            None if kind in AS_IT_IS else cost,
        )
        for kind, of in runs.items()
    }
    today, *_ = runs
    return Gain(
        today=ways[today],
        line=None if today == RAW_NAME else ways[RAW_NAME],
        converted=ways[name],
        line_gains=stats.ratio(rates[RAW_NAME], rates[today]).low > 1,
        over_today=stats.ratio(rates[name], rates[today]),
        over_line=stats.ratio(rates[name], rates[RAW_NAME]),
        images=images,
    )
