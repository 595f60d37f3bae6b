"""From what a sample and the hardware gave to what a whole data set will: sizes, times, rates. Pure.

A conversion takes its start-up, and then as many rounds of shards as its workers need:

    startup_s + ceil(shards / workers) * images per shard * image_s

and no less than its bytes take the disk. A loader with a warm cache gets faster in proportion to the
CPUs until its one thread that cannot be multiplied is always busy; with a cold one it is besides no
faster than the disk. The trainer gets what the slower of the two gives, less what was lost on the sample
when both ran together.
"""

import math
from dataclasses import dataclass

from bench.report.payback import epochs_to_pay

TODAY_NAME = "imagefolder"
RAW_NAME = "raw tree"
AS_IT_IS = (TODAY_NAME, RAW_NAME)
"""What reads the tree as it is: torchvision's ImageFolder, which people have today, and `loaders.build`."""
JPEG_NAMES = ("webdataset", "dali")
_FITS = 0.5  # of the memory: a data set that is larger does not stay in the page cache
WORTH_IT = 0.02  # gains below this share are none


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one format gives.

    Attributes:
        bytes: on disk.
        conversion_s: 0 for the tree as it is.
        warm_images_per_s, cold_images_per_s: of the loader alone.
        cached: whether the data set stays in the page cache from the second epoch on.
        trained_images_per_s: with the trainer, from the second epoch on.
        epochs_to_pay: see `bench.report.payback`; None if never, or where the raw tree is as fast.
    """

    name: str
    bytes: float
    conversion_s: float
    warm_images_per_s: float
    cold_images_per_s: float
    cached: bool
    trained_images_per_s: float
    epochs_to_pay: int | None


def predict(profiles: list[Profile], inputs: Inputs) -> list[Prediction]:
    """One prediction for each profile, the same order; one of them is that of the raw tree.

    Converting has to pay against ImageFolder, or the raw tree where ImageFolder could not be measured.
    """
    rates = {profile.name: _trained(profile, inputs) for profile in profiles if profile.name in AS_IT_IS}
    today = rates.get(TODAY_NAME, rates[RAW_NAME])
    return [_predict(profile, inputs, today, max(rates.values())) for profile in profiles]


def best(predictions: list[Prediction]) -> Prediction:
    """What to do: the quickest to have of those that train as fast as any, or nearly so."""
    top = max(prediction.trained_images_per_s for prediction in predictions)
    good = [p for p in predictions if p.trained_images_per_s >= top * (1 - WORTH_IT)]
    return min(good, key=lambda prediction: prediction.conversion_s)


def crossover_bytes_per_s(pixels: Prediction, encoded: Prediction, images: int) -> float | None:
    """Disk rate below which JPEG files load faster than raw pixels, both from a cold cache.

    A JPEG loader gives `w` images/s at most; pixels come faster from where the disk gives `w` of them.
    None if they never do.
    """
    if pixels.warm_images_per_s <= encoded.warm_images_per_s or pixels.bytes <= encoded.bytes:
        return None
    return encoded.warm_images_per_s * pixels.bytes / images


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


def _predict(profile: Profile, inputs: Inputs, today: float, free: float) -> Prediction:
    """`free`: the most images/s of training without a conversion."""
    size = inputs.images * profile.image_bytes
    conversion_s = 0.0
    if profile.name not in AS_IT_IS:
        busiest = rounds(inputs.images, profile.shard_images, inputs.cpus)
        conversion_s = profile.startup_s + max(busiest * profile.image_s, size / inputs.disk_bytes_per_s)
    trained = _trained(profile, inputs)
    worth = trained > free * (1 + WORTH_IT)
    return Prediction(
        name=profile.name,
        bytes=size,
        conversion_s=conversion_s,
        warm_images_per_s=_warm(profile, inputs),
        cold_images_per_s=_cold(profile, inputs),
        cached=_cached(profile, inputs),
        trained_images_per_s=trained,
        epochs_to_pay=epochs_to_pay(conversion_s, inputs.train_images, today, trained) if worth else None,
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


def _cached(profile: Profile, inputs: Inputs) -> bool:
    return inputs.images * profile.image_bytes <= inputs.memory_bytes * _FITS


def _trained(profile: Profile, inputs: Inputs) -> float:
    loader = _warm(profile, inputs) if _cached(profile, inputs) else _cold(profile, inputs)
    return profile.overlap * min(loader, inputs.trainer_images_per_s * inputs.gpus)
