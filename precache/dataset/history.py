"""What became of a dataset since it was converted: part of its manifest, see `precache.conversion.update`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did.

    Attributes:
        added, removed: how many samples.
        made_by: as of the manifest, of the samples that it added.
    """

    added: int
    removed: int
    made_by: dict[str, str]


def adds_up(updates: Sequence[Update], removed: Mapping[str, int], stored: Mapping[str, int]) -> bool:
    """Whether this is the history of a dataset: split -> samples removed, and stored, removed ones too."""
    numbers = [number for update in updates for number in (update.added, update.removed)]
    numbers += removed.values()
    return (
        all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        and all(count <= stored.get(split, 0) for split, count in removed.items())
        and sum(update.removed for update in updates) == sum(removed.values())
    )
