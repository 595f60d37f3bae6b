"""Choice of a recipe and a folder for a tree: by free space, by an earlier conversion, by free names."""

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.report.forecast import SLACK, stored_words, ways_to_store
from precache.cli.commandline import parse_bytes
from precache.conversion.destination import is_untouched
from precache.conversion.journal import JOURNAL_NAME, check_empty, read_header
from precache.conversion.shard_writer import dataset_bytes, make_stored_picture, sample_evenly
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import DatasetError, ImageError, PrecacheError, SettingError
from precache.recipe import Recipe
from precache.reporting import human_bytes
from precache.sources.base import Scan, check_no_overlap

_MEASURED_PICTURES = 100


def choose_recipe(
    scan: Scan, size: int, formats: Sequence[str], limit_bytes: float, limit: str
) -> tuple[Recipe, tuple[str, ...]]:
    """Choose the largest stored size and quality with which a format fits into `limit_bytes`.

    Args:
        size: side of the squares that are trained with, pixels.
        formats: names of formats to choose from.
        limit: the limit in words, for the error.

    Returns:
        The recipe, in the first of `formats`, and the names of the formats that fit.

    Raises:
        SettingError: none fits; the message says how many bytes would.
    """
    smallest: Recipe | None = None
    smallest_bytes = math.inf
    for stored, quality in ways_to_store(size):
        recipes = [Recipe(format=name, size=stored, quality=quality) for name in formats]
        fitting = []
        for recipe in recipes:
            needed_bytes = SLACK * measure_bytes(scan, recipe)
            if needed_bytes <= limit_bytes:
                fitting.append(recipe.format)
            if needed_bytes < smallest_bytes:
                smallest, smallest_bytes = recipe, needed_bytes
        if fitting:
            return recipes[0], tuple(fitting)
    assert smallest is not None, "there is a format to choose from"
    raise SettingError(
        f"no format fits into {limit}: the smallest, {smallest.format} of {stored_words(smallest)}, "
        f"needs {human_bytes(smallest_bytes)}",
        remedy=f"free that much, or give --max-bytes {math.ceil(smallest_bytes / 1e6)}MB or more",
    )


def measure_bytes(scan: Scan, recipe: Recipe) -> int:
    """Estimate the bytes of the converted tree from a hundred pictures that are converted in memory."""
    sizes = []
    for ref in sample_evenly(scan, _MEASURED_PICTURES):
        with suppress(ImageError):
            path = scan.source.where(ref)
            stored, *_ = make_stored_picture(
                scan.source.read(ref, recipe.max_pixels), path, recipe, recipe.rendering
            )
            sizes.append(len(stored) if isinstance(stored, bytes) else stored.nbytes)
    return dataset_bytes(scan, recipe, sum(sizes) / len(sizes) if sizes else 0)


def find_limit(place: Path, max_bytes: str | None) -> tuple[float, str]:
    """Return the most bytes that a dataset in `place` may take, and in words what sets that limit."""
    folder = place.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if max_bytes is not None and parse_bytes(max_bytes) <= free_bytes:
        return parse_bytes(max_bytes), f"the {max_bytes} of --max-bytes"
    return free_bytes, f"the {human_bytes(free_bytes)} that are free"


def find_begun_recipe(place: Path, scan: Scan, name: str, size: int) -> Recipe | None:
    """Return the recipe of a conversion that was begun or finished in `place`; None for none that fits.

    It has to be of the same tree, in the format `name`, and with settings that `precache auto` chooses.

    Args:
        size: side of the squares that are trained with, pixels; pictures have to be stored no smaller.
    """
    try:
        if is_converted(place):
            manifest = open_dataset(place).manifest
            recipe, digest = manifest.recipe, manifest.source_digest
        else:
            header = read_header(place / JOURNAL_NAME) or {}
            recipe, digest = Recipe(**header["recipe"]), header["source_digest"]
    except (PrecacheError, KeyError, TypeError):
        return None
    if digest != scan.digest or recipe.format != name or not isinstance(recipe.size, int):
        return None
    plain = Recipe(format=name, size=recipe.size, quality=recipe.quality, splits=recipe.splits)
    return recipe if recipe.size >= size and recipe == plain else None


def check_free(scan: Scan, place: Path, overwrite: bool) -> None:
    """Raise an error, before minutes are spent, if nothing can be converted into `place`."""
    check_no_overlap(scan.source, place)
    if not overwrite and not is_untouched(place):
        raise DatasetError(
            "holds a conversion of other pictures, or with other settings",
            path=place,
            remedy="choose another DST, or pass --overwrite to replace it",
        )
    check_empty(place)


def free_folder(scan: Scan, name: str, root: Path) -> Path:
    """Return a folder below `root` into which the tree can be converted to the format `name`."""
    for place in (root / name, root / f"{name}-{scan.root.name}"):
        try:
            check_free(scan, place, overwrite=False)
        except PrecacheError:
            continue
        return place
    return root / f"{name}-new"
