"""The loop of every engine: hand out tasks, pass progress on, and try a task again whose worker died.

A worker may die over a picture: one that takes all memory, or that makes a decoder crash. So a task says
which unit it begins. A unit over which two workers died is left out, and the rest of its task is done.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from precache.errors import WorkerError

KILLED = "killed the process that decoded it, twice; perhaps memory ran out"
"""The reason for which a picture in `Ticks.fatal` is rejected."""

# A task is given up after more deaths of its workers than this, not counting those over units that are left
# out for it; and at most so many units of it are left out.
_MAX_DEATHS = 2
_MAX_FATAL = 16


class Ticks:
    """What `function` of `run` reports its progress to; it may number its units as it likes.

    Attributes:
        fatal: units over which two workers died: to be left out.
    """

    fatal: frozenset[int] = frozenset()

    def begin(self, unit: int) -> None:
        """Note which unit comes next: if the worker dies, that unit is to blame."""

    def __call__(self) -> None:
        """Count one more unit as done."""


class Loss(Enum):
    """What happened to the worker of a task that has no result."""

    WORKER = "its worker died"
    NODE = "its Ray worker, or the node of it, died"
    MEMORY = "Ray killed its worker to free memory"
    OTHER_TASK = "its worker died over another task"


_MAX_LOSSES = {Loss.NODE: 5, Loss.MEMORY: 2}


@dataclass(slots=True, eq=False)
class Attempt:
    """A task, and its failed tries so far.

    Attributes:
        done: units, in the present try.
        losses: how often it was lost, by what happened.
        deaths: how often a worker died over each unit; over None where it is not known which.
        fatal: units that two workers died over.
    """

    task: Any
    done: int = 0
    losses: Counter[Loss] = field(default_factory=Counter)
    deaths: Counter[int | None] = field(default_factory=Counter)
    fatal: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """What errors call the task: its `name`, where it has one."""
        name = str(getattr(self.task, "name", self.task))
        return name if len(name) <= 100 else f"{name[:99]}…"

    def lose(self, loss: Loss, unit: int | None, detail: str) -> None:
        """Note that it was lost over `unit`; WorkerError with the `detail` if another try makes no sense."""
        self.losses[loss] += 1
        if loss is Loss.WORKER:
            self.deaths[unit] += 1
            if unit is not None and self.deaths[unit] == 2 and len(self.fatal) < _MAX_FATAL:
                self.fatal |= {unit}
                return
            others = sum(times for unit, times in self.deaths.items() if unit not in self.fatal)
            is_last = self.deaths[unit] > 1 or others > _MAX_DEATHS
        else:
            is_last = self.losses[loss] == _MAX_LOSSES.get(loss)
        if is_last:
            raise WorkerError(
                f"{self.name}: {loss.value} {self.losses[loss]} times ({detail}); run the same command "
                f"again, with fewer --workers if memory is short: a conversion continues where it stopped"
            )


class Advanced(NamedTuple):
    """So many more units are done."""

    attempt: Attempt
    units: int


class Finished(NamedTuple):
    """A task is done, and this is what `finish` returned."""

    attempt: Attempt
    result: Any


class Lost(NamedTuple):
    """A task was lost, over this unit if that is known; `detail` is for the message."""

    attempt: Attempt
    loss: Loss
    unit: int | None = None
    detail: str = ""


Event = Advanced | Finished | Lost


class Pool(Protocol):
    """The workers of an engine."""

    def has_room(self) -> bool:
        """Whether a worker is free for another task."""

    def is_busy(self) -> bool:
        """Whether it has a task that is neither finished nor lost."""

    def start(self, attempt: Attempt) -> None:
        """Start a task on a free worker."""

    def receive(self) -> Iterator[Event]:
        """Wait a moment for what happens to tasks; raises what a task raised."""

    def end(self) -> None:
        """Kill what runs; may be called again."""


def run_all(
    pool: Pool, tasks: Iterable[Any], on_progress: Callable[[int], None]
) -> Generator[Any, None, None]:
    """Yield what `pool` makes of each task; see `precache.engines.run`."""
    waiting = map(Attempt, tasks)
    again: deque[Attempt] = deque()
    try:
        while True:
            while pool.has_room() and (attempt := again.popleft() if again else next(waiting, None)):
                pool.start(attempt)
            if not pool.is_busy():
                return
            for event in pool.receive():
                attempt = event.attempt
                if isinstance(event, Finished):
                    yield event.result
                    continue
                units = event.units if isinstance(event, Advanced) else -attempt.done
                attempt.done += units
                on_progress(units)
                if isinstance(event, Lost):
                    attempt.lose(event.loss, event.unit, event.detail)
                    again.append(attempt)
    finally:
        pool.end()
