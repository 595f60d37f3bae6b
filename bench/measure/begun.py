"""What `precache auto` finds in DST: a conversion that was begun, and what it brought."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.measure import automatic
from bench.measure.automatic import Proof
from bench.measure.recommendation import Recommendation
from bench.report.choice import Setting
from precache.conversion.journal_header import JOURNAL_NAME, read_header
from precache.dataset.converted import is_converted, open_dataset
from precache.destination import AUTO_NAME
from precache.errors import PrecacheError
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.storage import atomic_write, read_regular

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """A conversion of the same tree by an earlier call, or by `precache convert`."""

    place: Path
    recipe: Recipe
    finished: bool

    @property
    def setting(self) -> Setting:
        """How its pictures are stored."""
        return _setting_of(self.recipe)


def _setting_of(recipe: Recipe) -> Setting:
    assert isinstance(recipe.size, int), "one side, see `find_begun`"
    return Setting(recipe.size, recipe.quality)


def find_begun(place: Path, scan: Scan, name: str, size: int) -> Begun | None:
    """The conversion of the tree to the format `name` in `place`; None without one of `precache auto`.

    Args:
        size: of training, in pixels: what is stored is no smaller.
    """
    finished = is_converted(place)
    try:
        if finished:
            manifest = open_dataset(place).manifest
            recipe, digest = manifest.recipe, manifest.source_digest
        else:
            header = read_header(place / JOURNAL_NAME) or {}
            recipe, digest = Recipe(**header["recipe"]), header["source_digest"]
    except (PrecacheError, KeyError, TypeError):
        return None
    if digest != scan.digest or recipe.format != name:
        return None
    if not isinstance(recipe.size, int) or recipe.size < size:
        return None
    ours = replace(automatic.recipe(name, _setting_of(recipe)), splits=recipe.splits) == recipe
    return Begun(place, recipe, finished) if ours else None


def store(place: Path, source_digest: str, found: Recommendation, proof: Proof, said: list[str]) -> None:
    """Write what was predicted and what came beside the dataset in `place`."""
    content = {
        "version": _VERSION,
        "source_digest": source_digest,
        "said": said,
        "median_error": proof.median_error,
        "gain": asdict(proof.gain),
        "other_cpu": proof.other_cpu,
        "recommendation": replace(found, checks=proof.checks).to_json(),
    }
    with atomic_write(place / AUTO_NAME) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def read_report(place: Path, scan: Scan) -> dict[str, Any] | None:
    """What `store` wrote of the dataset of this tree; None if there is nothing, or nothing whole."""
    try:
        content: dict[str, Any] = json.loads(read_regular(place / AUTO_NAME))
        said = content["said"]
        ours = content["version"] == _VERSION and content["source_digest"] == scan.digest
        return content if ours and all(isinstance(line, str) for line in said) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
