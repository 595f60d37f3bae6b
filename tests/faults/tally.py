"""How attacks end, counted."""

from collections import Counter
from dataclasses import dataclass, field

FINE = ("right", "clean")
FAILURES = ("crash", "hang", "traceback", "wrong", "loss")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case ended.

    Attributes:
        kind: `right`, the undisturbed result; `clean`, an error of one line; or one of FAILURES: a process
            that died of a signal, one that took more than ten seconds, an error that is not of this project,
            another result than the undisturbed one, and what is gone or left behind (a file of the user's, a
            Ctrl-C; a thread, a process, a descriptor), or a DST that no later run takes.
        detail: what was done, and what was seen.
    """

    kind: str
    detail: str = ""


RIGHT = Outcome("right")


@dataclass(slots=True)
class Tally:
    """The outcomes of one attack."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, Outcome]] = field(default_factory=list)

    def add(self, seed: int, outcome: Outcome) -> None:
        """Count the outcome of the case `seed`."""
        self.counts[outcome.kind] += 1
        if outcome.kind in FAILURES:
            self.failures.append((seed, outcome))

    @property
    def count(self) -> int:
        """Cases in all."""
        return self.counts.total()

    def lines(self, name: str, most: int = 20) -> list[str]:
        """The failures, each with the command that repeats it."""
        shown = [
            f"{outcome.kind}: python -m tests.faults {name} --seed {seed} --count 1   # {outcome.detail}"
            for seed, outcome in sorted(self.failures, key=lambda failure: failure[0])[:most]
        ]
        left = len(self.failures) - len(shown)
        return [*shown, *([f"... and {left:,} more"] if left > 0 else [])]
