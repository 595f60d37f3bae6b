"""How a tree is to be stored: what fits, what was begun before, and whether a folder is free for it."""

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

_PICTURES = 100


def choose(
    scan: Scan, size: int, formats: Sequence[str], limit_bytes: float, limit: str
) -> tuple[Recipe, tuple[str, ...]]:
    """Choose what keeps most of the pictures, of the ways in which one of `formats` fits into `limit_bytes`.

    Args:
        limit: the limit in words, for the error.

    Returns:
        How pictures are stored, and which formats fit.

    Raises:
        SettingError: none fits; says what would.
    """
    least: list[tuple[float, Recipe]] = []
    for stored, quality in ways_to_store(size):
        recipes = [Recipe(format=name, size=stored, quality=quality) for name in formats]
        needed = {recipe.format: SLACK * measure_bytes(scan, recipe) for recipe in recipes}
        if fitting := tuple(name for name in formats if needed[name] <= limit_bytes):
            return recipes[0], fitting
        least += [(needed[recipe.format], recipe) for recipe in recipes]
    least_bytes, recipe = min(least, key=lambda each: each[0])
    raise SettingError(
        f"no format fits into {limit}: the smallest, {recipe.format} of {stored_words(recipe)}, "
        f"needs {human_bytes(least_bytes)}; free that much, or give --max-bytes "
        f"{-int(-least_bytes // 1e6)}MB or more"
    )


def measure_bytes(scan: Scan, recipe: Recipe) -> int:
    """Bytes that `scan` takes in `recipe`'s format, by a hundred pictures that are converted in memory."""
    how, sizes = recipe.rendering, []
    for ref in sample_evenly(scan, _PICTURES):
        with suppress(ImageError):
            path = scan.source.where(ref)
            stored, *_ = make_stored_picture(scan.source.read(ref, recipe.max_pixels), path, recipe, how)
            sizes.append(len(stored) if isinstance(stored, bytes) else stored.nbytes)
    return dataset_bytes(scan, recipe, sum(sizes) / len(sizes) if sizes else 0)


def find_limit(place: Path, max_bytes: str | None) -> tuple[float, str]:
    """Bytes that what lies in `place` may take, and what limits it, in words."""
    folder = place.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    asked = None if max_bytes is None else parse_bytes(max_bytes)
    if asked is not None and asked <= free:
        return asked, f"the {max_bytes} of --max-bytes"
    return free, f"the {human_bytes(free)} that are free"


def find_begun(place: Path, scan: Scan, name: str, size: int) -> Recipe | None:
    """The recipe of what was begun or finished in `place`: the tree in the format `name`; else None.

    Only what `precache auto` would have chosen counts.

    Args:
        size: of training, in pixels: what is stored is no smaller.
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
            f"{place}: holds a conversion of other pictures, or with other settings; choose another DST, or "
            f"pass --overwrite to replace it"
        )
    check_empty(place)


def free_folder(scan: Scan, name: str, root: Path) -> Path:
    """A folder below `root` into which the tree can be converted to the format `name`."""
    for place in (root / name, root / f"{name}-{scan.root.name}"):
        try:
            check_free(scan, place, overwrite=False)
        except PrecacheError:
            continue
        return place
    return root / f"{name}-new"
