"""From what a sample and the hardware gave to what a whole data set will: sizes, times, rates, as rows. Pure.

A conversion takes its start-up, and then as many rounds of shards as its workers need:

    startup_s + ceil(shards / workers) * images per shard * image_s

and no less than its bytes take the disk. A loader with a warm cache gets faster in proportion to the
CPUs until its one thread that cannot be multiplied is always busy; with a cold one it is besides no
faster than the disk. The trainer gets what the slower of the two gives, less what was lost on the sample
when both ran together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.report.gain import find_gain
from bench.report.row import RAW_TREE, TODAY_BACKEND, Row
from bench.report.stats import Estimate
from precache.images import MAX_SIZE

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
_FITS = 0.5  # of the memory: a data set that is larger does not stay in the page cache
_SHOWN = 0.875  # of the shorter side, in validation: the least that shows it without enlarging
_SLACK = 1.1  # a hundred pictures tell the size of all of them to within a tenth


def stored_size(size: int) -> int:
    """Of pictures for training at `size` pixels: the most that the shorter side keeps, see RISK."""
    return min(2 * size, MAX_SIZE)


@dataclass(frozen=True, slots=True)
class Stored:
    """How pictures are stored: the most that the shorter side keeps, in pixels, and JPEG quality."""

    size: int
    quality: int

    def words(self, name: str) -> str:
        """Of the format `name`: 'at most 448 px, JPEG quality 90'."""
        quality = f", JPEG quality {self.quality}" if name in JPEG_NAMES else ""
        return f"at most {self.size} px{quality}"


def ways_to_store(size: int) -> tuple[Stored, ...]:
    """For training at `size` pixels: from the one that keeps most of the pictures to the smallest."""
    whole = stored_size(size)
    return (Stored(whole, 95), Stored(whole, 90), Stored(whole, 75), Stored(round(size / _SHOWN), 75))


def needed_bytes(predicted: float) -> float:
    """Room for what is predicted to take `predicted` bytes: it may be a little more."""
    return predicted * _SLACK


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One format, as the sample showed it.

    Attributes:
        name: one of `AS_IT_IS`, or that of a format.
        image_bytes: of one picture as it is stored, on average.
        startup_s, image_s: of a conversion: before the first picture, and of one worker for each.
        shard_images: the most pictures of a shard.
        loader_images_per_s: of the loader alone, page cache warm, `cpus` CPUs.
        serial_s: CPU time per picture of the busiest thread that more workers do not relieve.
        overlap: images/s with the trainer over those of the slower one of the two alone, 0 to 1.
        random_reads: whether pictures are read one by one in random order, or whole shards in a stream.
    """

    name: str
    image_bytes: float
    startup_s: float
    image_s: float
    shard_images: int
    loader_images_per_s: float
    cpus: int
    serial_s: float
    overlap: float
    random_reads: bool


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
    """A row for each profile, the same order."""
    return [_predict(profile, inputs) for profile in profiles]


def widened(rows: Sequence[Row], turns: Sequence[Sequence[Row]]) -> list[Row]:
    """`rows`, with the ranges of what each turn's sample alone predicts."""
    return [
        replace(
            row,
            loader=_range(row.loader, [turn[at].loader for turn in turns]),
            together=_range(row.rate, [turn[at].rate for turn in turns]),
            ratio=_range(row.ratio, [turn[at].ratio for turn in turns]) if row.ratio is not None else None,
        )
        for at, row in enumerate(rows)
    ]


def advised(rows: Sequence[Row]) -> Row | None:
    """What to convert to: the quickest to have of those that train fastest; None where none gains."""
    return min(find_gain(rows, rows[0]).converted, key=lambda row: row.convert_s or 0.0, default=None)


def fits_memory(row: Row, inputs: Inputs) -> bool:
    """Whether the data set stays in the page cache from the second epoch on."""
    return inputs.images * (row.image_bytes or 0.0) <= inputs.memory_bytes * _FITS


def fit_conversion(
    small_s: float, small_images: int, large_s: float, large_images: int, shard_images: int, workers: int
) -> tuple[float, float]:
    """(startup_s, image_s) from two conversions of different size; see `Profile`."""
    small, large = (rounds(images, shard_images, workers) for images in (small_images, large_images))
    # noise can make the smaller one take longer, if both are tiny
    image_s = max(large_s - small_s, large_s * 1e-3) / max(large - small, 1.0)
    return max(0.0, small_s - small * image_s), image_s


def rounds(images: int, shard_images: int, workers: int) -> float:
    """Pictures that the busiest worker converts."""
    shards = math.ceil(images / shard_images)
    return math.ceil(shards / workers) * images / shards


def read_time(small: tuple[float, float], large: tuple[float, float]) -> float:
    """`Inputs.read_s`, from two sizes of random reads, each as (bytes of a read, bytes/s)."""
    (small_bytes, small_rate), (large_bytes, large_rate) = small, large
    small_s, large_s = small_bytes / small_rate, large_bytes / large_rate
    byte_s = max(0.0, large_s - small_s) / (large_bytes - small_bytes)
    return max(0.0, small_s - small_bytes * byte_s)


def _predict(profile: Profile, inputs: Inputs) -> Row:
    size = inputs.images * profile.image_bytes
    conversion_s = None
    if profile.name not in AS_IT_IS:
        busiest = rounds(inputs.images, profile.shard_images, inputs.cpus)
        conversion_s = profile.startup_s + max(busiest * profile.image_s, size / inputs.disk_bytes_per_s)
    warm, cold = _warm(profile, inputs), _cold(profile, inputs)
    trainer = inputs.trainer_images_per_s * inputs.gpus
    loader = warm if size <= inputs.memory_bytes * _FITS else cold
    trained = profile.overlap * min(loader, trainer)
    return Row(
        backend=BACKENDS[profile.name],
        data=RAW_TREE if profile.name in AS_IT_IS else profile.name,
        trainer_name="predicted",
        loader=_exact(warm),
        cold=_exact(cold),
        trainer=_exact(trainer),
        together=_exact(trained),
        ratio=_exact(trained / trainer),
        image_bytes=profile.image_bytes,
        convert_s=conversion_s,
        size_bytes=size,
    )


def _warm(profile: Profile, inputs: Inputs) -> float:
    scaled = profile.loader_images_per_s * inputs.cpus / profile.cpus
    if inputs.cpus <= profile.cpus or profile.serial_s <= 0:
        return scaled
    # a thread is never busier than all the time: the measured rate is below this limit
    return max(profile.loader_images_per_s, min(scaled, 1 / profile.serial_s))


def _cold(profile: Profile, inputs: Inputs) -> float:
    disk = inputs.disk_bytes_per_s / profile.image_bytes
    if profile.random_reads:
        read_s = inputs.read_s + profile.image_bytes / inputs.disk_bytes_per_s
        disk = min(disk, inputs.cpus / read_s)
    return min(_warm(profile, inputs), disk)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value)


def _range(middle: Estimate, turns: Sequence[Estimate | None]) -> Estimate:
    medians = [middle.median, *(turn.median for turn in turns if turn is not None)]
    return Estimate(middle.median, min(medians), max(medians))
