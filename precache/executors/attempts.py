"""A task that is tried again when its worker dies, and what is left out of it if that goes on."""

from dataclasses import dataclass, field
from typing import Any

from precache.errors import WorkerError

# How often workers may die over a task, but for the units that are left out for it, and how many of these.
_MAX_DEATHS = 2
_MAX_FATAL = 16


@dataclass(slots=True)
class Attempt:
    """A task, its progress in the present try, and what workers died over in it.

    Attributes:
        deaths: units, or None for what is no unit, that a worker died over, but for the `fatal` ones.
        fatal: units that a second worker died over.
    """

    task: Any
    progress: int = 0
    deaths: list[int | None] = field(default_factory=list)
    fatal: frozenset[int] = frozenset()

    def blame(self, unit: int | None, how: str) -> None:
        """Note that a worker died over `unit`, and how; WorkerError if another try makes no sense."""
        again = unit in self.deaths
        self.deaths.append(unit)
        if unit is not None and again and unit not in self.fatal and len(self.fatal) < _MAX_FATAL:
            self.deaths = [other for other in self.deaths if other != unit]
            self.fatal |= {unit}
        elif again or unit in self.fatal or len(self.deaths) > _MAX_DEATHS:
            times = len(self.deaths) + 2 * len(self.fatal)
            raise WorkerError(
                f"{name_of(self.task)}: its worker died {times} times ({how}); run the same "
                f"command again, with fewer --workers if so: a conversion continues where it stopped"
            )


def name_of(task: Any) -> str:
    """What errors call a task: its `name`, where it has one."""
    name = str(getattr(task, "name", task))
    return name if len(name) <= 100 else f"{name[:99]}…"
