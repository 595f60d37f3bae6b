"""What the programs of the lab share: runs that take turns, their medians, and the conditions of both.

A program names its runs, each a function that measures once and returns figures by name; `Turns` calls one
after the other, again and again, so that what the machine does meanwhile meets all of them alike.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import click
import torch

from bench.machine.hardware import describe_machine
from bench.machine.monitor import OtherProcesses
from bench.report.stats import Estimate, estimate, ratio
from bench.report.table import Table
from bench.report.words import counted, machine_line
from precache.cli import commandline
from precache.cli.commandline import ProgressBar
from precache.errors import check_range

Run: TypeAlias = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each run: its median over the turns, and the lowest and the highest.

    Attributes:
        figure: its name, as runs return it.
        form: of a number, as `format` takes it.
        beside: name of a run; its figure of the same turn divides that of every run.
    """

    title: str
    figure: str
    form: str = ",.0f"
    beside: str = ""


class Turns:
    """What each of several runs gave, turn by turn.

    Attributes:
        repeats: how many turns each took.
        figures: of each run: the figure's name to its values, in the order of the turns.
    """

    def __init__(self, runs: Mapping[str, Run], repeats: int, uncounted: int = 0) -> None:
        """Call each of `runs` once a turn; before that as often as is `uncounted`, to warm up."""
        check_range("repeats", repeats, 1)
        self.repeats = repeats
        self.figures: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
        self._others = OtherProcesses()
        turns = uncounted + repeats
        with ProgressBar("turns", "run") as bar:
            for turn in range(turns):
                for number, (name, run) in enumerate(runs.items()):
                    for figure, value in run().items():
                        if turn >= uncounted:
                            self.figures[name].setdefault(figure, []).append(value)
                    bar(turn * len(runs) + number + 1, turns * len(runs))

    def estimate(self, name: str, column: Column) -> Estimate | None:
        """The figure of that run; None where it, or what stands beside it, was not measured."""
        values = self.figures[name].get(column.figure)
        if values is None or not column.beside:
            return None if values is None else estimate(values)
        beside = self.figures[column.beside].get(column.figure)
        return None if beside is None else ratio(values, beside)

    def cells(self, name: str, columns: Iterable[Column]) -> list[str]:
        """`1,234 (1,200-1,300)` for each column; '-' for what was not measured."""
        found = ((self.estimate(name, column), column.form) for column in columns)
        return ["-" if one is None else f"{one:{form}}" for one, form in found]

    def rows(self, columns: Sequence[Column]) -> list[list[str]]:
        """A row for each run that was measured: its name and the cells of `columns`."""
        return [[name, *self.cells(name, columns)] for name, found in self.figures.items() if found]

    def show(self, table: Table, settings: str, versions: Iterable[str] = ("python", "torch")) -> None:
        """Print the table as Markdown, and below it settings, machine, versions and what else ran."""
        machine = machine_line(describe_machine(torch.device("cpu")), versions)
        share = self._others.share()
        busy = "" if share is None else f"; other processes took {share:.0%} of the CPUs"
        click.echo(table.markdown())
        click.echo(f"\n{settings}; medians (ranges) of {counted(self.repeats, 'turn')}; {machine}{busy}")


def main(command: click.Command, name: str) -> None:
    """Run the program as this process; bad input ends in one line and exit code 2."""
    sys.exit(commandline.run(command, f"bench.lab.{name}"))
