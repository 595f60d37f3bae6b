"""Whether the arms of a comparison do the same work; else their rates say nothing about one another.

Of other libraries' loaders the size and the dtype alone are checked, where they run: they give no ids.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bench.measure.settings import Settings
from bench.measure.trial import Served
from precache.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loader says before it serves anything: pictures of an epoch, and classes."""

    samples: int
    classes: int


def find_facts(spec: Settings) -> Facts:
    """Build the loader, and ask it."""
    with spec.open_loader(spec.make_trainer().dtype) as loader:
        return Facts(loader.samples, len(loader.classes))


def check_facts(facts: Mapping[str, Facts]) -> None:
    """DatasetError, with the numbers, unless all arms have as many pictures.

    Args:
        facts: by the arm's name.
    """
    _check_equal({arm: f"{found.samples:,} pictures" for arm, found in facts.items()})


def check_served(served: Mapping[str, Served], own_recipe: Collection[str] = ()) -> None:
    """DatasetError, with the numbers, unless all arms served as many distinct ids, of one shape and dtype.

    Args:
        served: in one trial, by the arm's name.
        own_recipe: names of arms that deliver a dtype of their own and may know fewer pictures of the tree;
            their images and shapes are as many and the same.
    """
    _check_equal(
        {
            arm: f"{work.images:,} images, {work.ids:,} distinct ids, {' and '.join(work.shapes)}"
            for arm, work in served.items()
            if arm not in own_recipe
        }
    )
    _check_equal({arm: f"{work.images:,} images, {work.squares}" for arm, work in served.items()})


def _check_equal(works: Mapping[str, str]) -> None:
    if len(set(works.values())) > 1:
        each = "; ".join(f"{arm}: {work}" for arm, work in works.items())
        raise DatasetError(
            f"the arms do unequal work and cannot be compared: {each}; name folders made from one tree"
        )
