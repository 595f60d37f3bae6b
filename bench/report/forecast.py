"""Prediction for a whole data set from a measured sample: stored sizes, conversion times, rates. Pure.

    find_profiles    measured figures of each loader on the sample
    find_inputs      the data set and the machine to predict for
    predict          a row for each profile, predicted for these inputs

A conversion takes its start-up, and then the time of its pictures, shared out among the CPUs; it is no
faster than the disk takes its bytes. A loader with a warm cache gets faster in proportion to the CPUs until
its one thread that cannot be multiplied is always busy; with a cold one it is besides no faster than the
disk. The trainer gets what the slower of loader and trainer gives, less what was lost on the sample when both
ran together. Ranges are over the turns, and wider by MODEL_ERROR; the time of a conversion is a bound,
because few pictures say little about its start-up. `bench.lab.forecast` counts how often what came lay
within.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.report.change import Basis
from bench.report.gain import TODAY_BACKEND, busy_share, find_gain
from bench.report.loaders import FED, LOADER, TRAINER
from bench.report.result import RAW, Row, Trial, is_emulated
from bench.report.stats import Estimate, at_most, estimate
from precache.formats import FORMATS
from precache.pictures.images import MAX_SIZE

DISK, SAMPLE, CONVERT = "disk", "sample", "convert"
"""Kinds of trials, `key["kind"]`, beside LOADER, FED and TRAINER of `bench.report.loaders`."""
PREDICTED = "predicted"
"""Name of the trainer in predicted rows: training on the whole data set was not run."""
AS_IT_IS = (TODAY_BACKEND, RAW)
"""Loaders of the tree as it is: torchvision's ImageFolder, which people have today, and `loaders.build`."""
BACKENDS = {
    TODAY_BACKEND: TODAY_BACKEND,
    RAW: "pytorch",
    **{name: form.backend for name, form in FORMATS.items()},
}
"""Backend by the name of a loader, which is one of `AS_IT_IS` or a format."""
MODEL_ERROR = 0.15
"""Share by which a training may be slower or faster, and a conversion slower, than the sample says."""
HELD = (27, 28)
"""Predictions that came within their range, and those tried, by `bench.lab.forecast`."""
RISK = (
    "Storing less than twice the side that is trained can cost accuracy: with random crops from 8/7 of it, "
    "models were 1.5 to 2.1 points of top-1 worse than from ImageFolder (Caltech-101, 64 px); from twice the "
    "side no difference could be told."
)
_RANDOM_READS = (*AS_IT_IS, *(name for name, form in FORMATS.items() if form.holds_pixels))
"""Loaders that read picture by picture in random order; the others read whole shards in a stream."""
_CACHED_SHARE = 0.5  # share of the memory above which a data set does not stay in the page cache


def stored_size(size: int) -> int:
    """Largest shorter side, in pixels, that is stored for training at `size` pixels; see RISK."""
    return min(2 * size, MAX_SIZE)


@dataclass(frozen=True, slots=True)
class Turn:
    """Images/s of a loader alone, the trainer alone, and both together, each in a process of its own.

    Attributes:
        loader, trainer, together: images/s; the trainer alone is fed one batch that stays on the device.
        serial_s: CPU seconds per picture, in the loader alone, of the busiest thread that more workers do not
            multiply, without its share of filling batches, which more workers do take over.
    """

    loader: float
    trainer: float
    together: float
    serial_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Figures of one loader, measured on the sample.

    Attributes:
        name: one of `BACKENDS`.
        image_bytes: bytes of one stored picture, on average.
        turns: measurements of the loader with a warm page cache.
        cpus: number of CPUs that it was measured on.
        startup_s: seconds of a conversion before its first picture.
        image_s: CPU seconds that a conversion takes for each picture.
    """

    name: str
    image_bytes: float
    turns: Sequence[Turn]
    cpus: int
    startup_s: float = 0.0
    image_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Data set and machine that a prediction is made for.

    Attributes:
        images: pictures of the data set.
        train_images: pictures of an epoch.
        cpus: CPUs of the machine; a conversion and a loader have one worker for each.
        gpus: accelerators, each of which takes `trainer_images_per_s`.
        trainer_images_per_s: images/s that training takes where it never waits.
        disk_bytes_per_s: bytes/s of sequential reads.
        read_s: seconds from asking the disk for a block until its first byte.
        memory_bytes: bytes of memory of the machine.
    """

    images: int
    train_images: int
    cpus: int
    gpus: int
    trainer_images_per_s: float
    disk_bytes_per_s: float
    read_s: float
    memory_bytes: float

    def accelerator(self, trainer: str) -> str:
        """Describe the accelerators, like 'an accelerator of 1,000 images/s'.

        Args:
            trainer: name of the trainer.
        """
        rate = f"of {self.trainer_images_per_s:,.0f} images/s"
        kind = "emulated accelerator" if is_emulated(trainer) else "accelerator"
        return f"an {kind} {rate}" if self.gpus == 1 else f"{self.gpus} {kind}s {rate}"


def find_profiles(settings: Mapping[str, Any], trials: Sequence[Trial]) -> list[Profile]:
    """Make a profile of each loader that was measured on the sample, ImageFolder first.

    Args:
        settings: settings of a recommendation, see `bench.measure.recommend`.
        trials: all that was measured.
    """
    data = list(settings["data"].values())[-1]  # earlier entries are other names of the same tree
    sample = _find(trials, SAMPLE)[0]
    # decoding takes time in proportion to a file's bytes, and a sample misses the few largest files
    size_ratio = data["image_bytes"] / sample.numbers["image_bytes"]
    profiles = []
    for name in BACKENDS:
        turns = _find_turns(name, trials, size_ratio if name in AS_IT_IS else 1.0)
        if not turns:
            continue
        profile = Profile(name=name, image_bytes=data["image_bytes"], turns=turns, cpus=settings["cpus"])
        if name not in AS_IT_IS:
            numbers = _find(trials, CONVERT, format=name)[0].numbers
            small = numbers["small_s"], int(numbers["small_images"])
            large = numbers["large_s"], int(numbers["large_images"])
            startup_s, image_s = fit_conversion(small, large, settings["cpus"])
            profile = Profile(
                name=name,
                image_bytes=numbers["image_bytes"],
                turns=turns,
                cpus=settings["cpus"],
                startup_s=startup_s,
                image_s=image_s * size_ratio,
            )
        profiles.append(profile)
    return profiles


def find_inputs(settings: Mapping[str, Any], trials: Sequence[Trial]) -> Inputs:
    """Make the inputs for this machine and the whole data set."""
    data = list(settings["data"].values())[-1]  # earlier entries are other names of the same tree
    disk = _find(trials, DISK)[0].numbers
    return Inputs(
        images=data["samples"],
        train_images=data["train_samples"],
        cpus=settings["cpus"],
        gpus=1,
        trainer_images_per_s=median(trial.images_per_s for trial in _find(trials, TRAINER)),
        disk_bytes_per_s=disk["read_bytes_per_s"],
        read_s=disk["first_byte_s"],
        memory_bytes=settings["memory_bytes"],
    )


def _find(trials: Sequence[Trial], kind: str, **key: Any) -> list[Trial]:
    """Trials of a kind whose key has all these entries."""
    wanted = {"kind": kind, **key}
    return [trial for trial in trials if wanted.items() <= trial.key.items()]


def _find_turns(name: str, trials: Sequence[Trial], slowdown: float) -> list[Turn]:
    """Turns in which the loader was measured alone and with the trainer.

    Args:
        slowdown: factor by which the loader is slower on the whole data set than on the sample.
    """
    turns = []
    for alone in _find(trials, LOADER, data=name):
        repeat = alone.key["repeat"]
        fed = _find(trials, FED, data=name, repeat=repeat)
        trained = _find(trials, TRAINER, repeat=repeat)
        if fed and trained:
            serial_s = alone.numbers["serial_s"] / alone.numbers["images"]
            rates = (alone.images_per_s / slowdown, trained[0].images_per_s, fed[0].images_per_s)
            turns.append(Turn(*rates, serial_s))
    return turns


def predict(profiles: Sequence[Profile], inputs: Inputs) -> list[Row]:
    """Make a row for each profile, in the same order; ranges are over its turns."""
    return [_predict(profile, inputs) for profile in profiles]


def choose_format(rows: Sequence[Row]) -> Row | None:
    """Choose the row to convert to: of those that train fastest the one that is converted soonest.

    Returns:
        The row; None where converting gains nothing.
    """
    gaining = find_gain(rows, rows[0]).converted
    return min(gaining, key=lambda row: row.values["convert_s"].median, default=None)


def fits_memory(size_bytes: float, inputs: Inputs) -> bool:
    """Whether a data set stays in the page cache from the second epoch on."""
    return size_bytes <= inputs.memory_bytes * _CACHED_SHARE


def fit_conversion(small: tuple[float, int], large: tuple[float, int], workers: int) -> tuple[float, float]:
    """Fit `Profile.startup_s` and `image_s` to two conversions, each (seconds, pictures)."""
    (small_s, small_images), (large_s, large_images) = small, large
    # if both are tiny, noise can make the smaller conversion take longer
    image_s = max(large_s - small_s, large_s * 1e-3) / max(large_images - small_images, 1)
    return max(0.0, small_s - small_images * image_s), image_s * workers


def _predict(profile: Profile, inputs: Inputs) -> Row:
    size_bytes = inputs.images * profile.image_bytes
    warm = [_scale_to_cpus(turn, profile.cpus, inputs.cpus) for turn in profile.turns]
    disk = inputs.disk_bytes_per_s / profile.image_bytes
    if profile.name in _RANDOM_READS:
        disk = min(disk, inputs.cpus / (inputs.read_s + 1 / disk))
    cold = [min(rate, disk) for rate in warm]
    trainer = inputs.trainer_images_per_s * inputs.gpus
    loaders = warm if fits_memory(size_bytes, inputs) else cold
    overlap = min(1.0, median(turn.together / min(turn.loader, turn.trainer) for turn in profile.turns))
    trained = _with_error([overlap * min(rate, trainer) for rate in loaders], trainer)
    ratio = Estimate(trained.median / trainer, trained.low / trainer, trained.high / trainer)
    values = {
        "loader_images_per_s": _with_error(warm),
        "cold_images_per_s": _with_error(cold),
        "trainer_images_per_s": estimate([trainer]),
        "fed_images_per_s": trained,
        "fed_ratio": ratio,
        "busy_share": busy_share(ratio),
        "stored_bytes": estimate([size_bytes]),
    }
    texts = {}
    is_converted = profile.name not in AS_IT_IS
    if not is_converted:
        texts["convert_s"] = "-"
    else:
        work_s = inputs.images * profile.image_s / inputs.cpus
        write_s = size_bytes / inputs.disk_bytes_per_s
        values["convert_s"] = at_most((profile.startup_s + max(work_s, write_s)) * (1 + MODEL_ERROR))
    backend = BACKENDS[profile.name]
    data_kind = profile.name if is_converted else RAW
    return Row(
        name="loaders.build" if profile.name == RAW else profile.name,
        key={"backend": backend, "data": data_kind, "trainer": PREDICTED},
        data_kind=data_kind,
        values=values,
        texts=texts,
        basis=Basis.PREDICTED,
    )


def _with_error(values: Sequence[float], most: float = math.inf) -> Estimate:
    """Make the estimate of a prediction: its range is wider than that of the turns, and ends at `most`."""
    value = estimate(values)
    return Estimate(value.median, value.low * (1 - MODEL_ERROR), min(most, value.high * (1 + MODEL_ERROR)))


def _scale_to_cpus(turn: Turn, measured_cpus: int, cpus: int) -> float:
    """Images/s of the loader on `cpus` CPUs with a warm page cache."""
    scaled = turn.loader * cpus / measured_cpus
    if cpus <= measured_cpus or turn.serial_s <= 0:
        return scaled
    # no thread is busy for more than all the time, so the measured rate is below 1 / serial_s
    return max(turn.loader, min(scaled, 1 / turn.serial_s))
