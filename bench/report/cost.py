"""What it costs to keep a data set, to convert it and to read it, by arithmetic. Pure.

requests   each object is one GET for each PART_BYTES of it, and one at least
epochs     are read from the storage until a cache that holds everything has been filled; without
           one, every epoch is
"""

import math
from dataclasses import dataclass

GB = 1e9
PART_BYTES = 8 << 20
"""What a request asks for of an object that is larger: as `precache.storage` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How pictures lie in the storage.

    Attributes:
        image_bytes: of a picture, on average.
        object_images: pictures in an object, on average.
        cpu_s: to make one picture of it, once; of one CPU.
    """

    name: str
    image_bytes: float
    object_images: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """In dollars. The defaults are list prices of Amazon's us-east-1 in 2025, for comparison alone.

    Attributes:
        gb_month: of a gigabyte (1e9 bytes) stored for a month.
        get, put: of 1,000 requests.
        egress_gb: of a gigabyte that leaves the region; within it that is free.
        cpu_hour: of a CPU.
    """

    gb_month: float = 0.023
    get: float = 0.0004
    put: float = 0.005
    egress_gb: float = 0.09
    cpu_hour: float = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one layout of a data set.

    Attributes:
        stored_bytes: in the storage.
        objects: in the storage.
        gets: of all epochs.
        read_bytes: from the storage, in all epochs.
        cpu_hours: of converting.
        month, requests, egress, convert: dollars: for a month, for all GETs, for leaving the region, once.
    """

    stored_bytes: float
    objects: int
    gets: int
    read_bytes: float
    cpu_hours: float
    month: float
    requests: float
    egress: float
    convert: float


def cost(layout: Layout, images: int, epochs: int, *, cached: bool, prices: Prices) -> Cost:
    """Of `images` pictures that are read `epochs` times, by one machine or by several with a cache each.

    Args:
        cached: whether a cache holds all of it from the second epoch on.
    """
    stored_bytes = images * layout.image_bytes
    objects = math.ceil(images / layout.object_images)
    gets = objects * math.ceil(layout.object_images * layout.image_bytes / PART_BYTES)
    times = 1 if cached else epochs
    cpu_hours = images * layout.cpu_s / 3600
    puts = objects if layout.cpu_s else 0
    return Cost(
        stored_bytes=stored_bytes,
        objects=objects,
        gets=gets * times,
        read_bytes=stored_bytes * times,
        cpu_hours=cpu_hours,
        month=stored_bytes / GB * prices.gb_month,
        requests=gets * times / 1000 * prices.get,
        egress=stored_bytes * times / GB * prices.egress_gb,
        convert=cpu_hours * prices.cpu_hour + puts / 1000 * prices.put,
    )


def seconds_of_an_epoch(layout: Layout, images: int, bytes_per_s: float) -> float:
    """The least that an epoch takes over a line of so many bytes/s."""
    return images * layout.image_bytes / bytes_per_s
