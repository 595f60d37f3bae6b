"""From what a sample and the disk gave to what a whole data set will: sizes, times, rates, as rows. Pure.

A conversion takes its start-up, and then the time of its pictures, shared out among the CPUs; it is no
faster than the disk takes its bytes. A loader with a warm cache gets faster in proportion to the CPUs until
its one thread that cannot be multiplied is always busy; with a cold one it is besides no faster than the
disk. The trainer gets what the slower of the two gives, less what was lost on the sample when both ran
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.report.gain import TODAY_BACKEND, find_gain
from bench.report.result import Row
from bench.report.stats import Estimate, estimate
from bench.report.verdict import RAW_TREE
from precache.pictures.images import MAX_SIZE
from precache.recipe import Recipe

AS_IT_IS = (TODAY_BACKEND, RAW_TREE)
"""What reads the tree as it is: torchvision's ImageFolder, which people have today, and `loaders.build`."""
JPEG_NAMES = ("webdataset", "dali")
BACKENDS = {
    TODAY_BACKEND: TODAY_BACKEND,
    RAW_TREE: "pytorch",
    "shards": "shards",
    "webdataset": "webdataset",
    "dali": "dali",
}
RISK = (
    "Storing less than twice the side that is trained can cost accuracy: with random crops from 8/7 of it, "
    "models were 1.5 to 2.1 points of top-1 worse than from ImageFolder (Caltech-101, 64 px); from twice the "
    "side no difference could be told."
)
_RANDOM_READS = (*AS_IT_IS, "shards")
"""Read picture by picture in random order; the others read whole shards in a stream."""
_FITS = 0.5  # of the memory: a data set that is larger does not stay in the page cache
_SHOWN = 0.875  # of the shorter side, in validation: the least that shows it without enlarging
SLACK = 1.1
"""A hundred pictures tell the size of all of them to within a tenth."""


def stored_size(size: int) -> int:
    """Of pictures for training at `size` pixels: the most that the shorter side keeps, see RISK."""
    return min(2 * size, MAX_SIZE)


def stored_words(recipe: Recipe) -> str:
    """'at most 448 px, JPEG quality 90'."""
    quality = f", JPEG quality {recipe.quality}" if recipe.format in JPEG_NAMES else ""
    return f"at most {recipe.size} px{quality}"


def ways_to_store(size: int) -> tuple[tuple[int, int], ...]:
    """Most pixels of the shorter side and JPEG quality, to train at `size` pixels; the best way first."""
    whole = stored_size(size)
    return (whole, 95), (whole, 90), (whole, 75), (round(size / _SHOWN), 75)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One loader alone, the trainer alone, and both together, each in a process of its own.

    Attributes:
        loader, trainer, together: images/s; the trainer alone has a batch that stays on the device.
        serial_s: CPU time per picture, of the loader alone, of the busiest thread that there is one of,
            without what it does of the filling of batches: more workers relieve it of that.
    """

    loader: float
    trainer: float
    together: float
    serial_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One format, as the sample showed it.

    Attributes:
        name: one of `AS_IT_IS`, or that of a format.
        image_bytes: of one picture as it is stored, on average.
        runs: of its loader on `cpus` CPUs, page cache warm.
        startup_s, image_s: of a conversion: before the first picture, and of one CPU for each.
    """

    name: str
    image_bytes: float
    runs: Sequence[Loaded]
    cpus: int
    startup_s: float = 0.0
    image_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a prediction is for.

    Attributes:
        images: of the data set.
        train_images: of an epoch.
        cpus: of the machine; a conversion and a loader have one worker for each.
        gpus: each takes `trainer_images_per_s`.
        disk_bytes_per_s: of sequential reads.
        read_s: from asking a disk until a read begins to give data.
        memory_bytes: of the machine.
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
        """What is fed, in words; `trainer` is its name."""
        one = f"of {self.trainer_images_per_s:,.0f} images/s"
        kind = "emulated accelerator" if trainer.startswith("emulated") else "accelerator"
        return f"an {kind} {one}" if self.gpus == 1 else f"{self.gpus} {kind}s {one}"


def predict(profiles: Sequence[Profile], inputs: Inputs) -> list[Row]:
    """A row for each profile, the same order; ranges are over its runs."""
    return [_predict(profile, inputs) for profile in profiles]


def advised(rows: Sequence[Row]) -> Row | None:
    """What to convert to: the quickest to have of those that train fastest; None where none gains."""
    return min(find_gain(rows, rows[0]).converted, key=lambda row: row.convert_s or 0.0, default=None)


def fits_memory(row: Row, inputs: Inputs) -> bool:
    """Whether the data set stays in the page cache from the second epoch on."""
    return inputs.images * (row.image_bytes or 0.0) <= inputs.memory_bytes * _FITS


def fit_conversion(small: tuple[float, int], large: tuple[float, int], workers: int) -> tuple[float, float]:
    """`Profile.startup_s` and `image_s` from two conversions, each (seconds, pictures)."""
    (small_s, small_images), (large_s, large_images) = small, large
    # noise can make the smaller one take longer, if both are tiny
    image_s = max(large_s - small_s, large_s * 1e-3) / max(large_images - small_images, 1)
    return max(0.0, small_s - small_images * image_s), image_s * workers


def _predict(profile: Profile, inputs: Inputs) -> Row:
    size = inputs.images * profile.image_bytes
    is_converted = profile.name not in AS_IT_IS
    work_s = inputs.images * profile.image_s / inputs.cpus
    warm = [_warm(run, profile.cpus, inputs.cpus) for run in profile.runs]
    disk = inputs.disk_bytes_per_s / profile.image_bytes
    if profile.name in _RANDOM_READS:
        disk = min(disk, inputs.cpus / (inputs.read_s + 1 / disk))
    cold = [min(rate, disk) for rate in warm]
    trainer = inputs.trainer_images_per_s * inputs.gpus
    loaders = warm if size <= inputs.memory_bytes * _FITS else cold
    overlap = min(1.0, median(run.together / min(run.loader, run.trainer) for run in profile.runs))
    trained = estimate([overlap * min(rate, trainer) for rate in loaders])
    return Row(
        backend=BACKENDS[profile.name],
        data=profile.name if is_converted else RAW_TREE,
        trainer_name="predicted",
        loader=estimate(warm),
        cold=estimate(cold),
        trainer=estimate([trainer]),
        together=trained,
        ratio=Estimate(*(rate / trainer for rate in (trained.median, trained.low, trained.high))),
        image_bytes=profile.image_bytes,
        convert_s=profile.startup_s + max(work_s, size / inputs.disk_bytes_per_s) if is_converted else None,
        size_bytes=size,
    )


def _warm(run: Loaded, measured_cpus: int, cpus: int) -> float:
    """Images/s of the loader on `cpus` CPUs."""
    scaled = run.loader * cpus / measured_cpus
    if cpus <= measured_cpus or run.serial_s <= 0:
        return scaled
    # a thread is never busier than all the time: the measured rate is below this limit
    return max(run.loader, min(scaled, 1 / run.serial_s))
