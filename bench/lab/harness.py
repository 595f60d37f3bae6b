"""Runs that take turns, and a table of their figures: shared by the programs of the lab.

A program names its runs, each a function that measures once and returns figures by name. `take_turns` calls
one after the other, again and again, so that a change of the machine meanwhile affects all of them alike.
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
from bench.report.words import machine_line
from precache.cli import commandline
from precache.cli.terminal import ProgressBar
from precache.errors import check_range
from precache.reporting import quantity

Run: TypeAlias = Callable[[], Mapping[str, float]]
"""Measures once, and returns figures by name."""


@dataclass(frozen=True, slots=True)
class FigureColumn:
    """Column of a table: a figure of each run, as its median over the turns, its lowest and its highest.

    Attributes:
        title: head of the column.
        figure: name of the figure, as runs return it.
        number_format: format of its numbers, as `format` takes it.
        divisor: name of a run whose figure of the same turn divides that of every run; empty: none does.
    """

    title: str
    figure: str
    number_format: str = ",.0f"
    divisor: str = ""


@dataclass(frozen=True, slots=True)
class Turns:
    """Figures of several runs, turn by turn.

    Attributes:
        figures: the figures of each turn, in order, by the run's name.
        other_cpu_share: share of the CPUs, 0 to 1, that other processes took meanwhile; None if not known.
    """

    figures: dict[str, list[Mapping[str, float]]]
    other_cpu_share: float | None

    def estimate(self, name: str, column: FigureColumn) -> Estimate | None:
        """Return the figure of the run `name`; None where it, or the column's divisor, was not measured."""
        values = self._values(name, column.figure)
        if not values:
            return None
        if not column.divisor:
            return estimate(values)
        divisors = self._values(column.divisor, column.figure)
        return ratio(values, divisors) if divisors else None

    def cells(self, name: str, columns: Iterable[FigureColumn]) -> list[str]:
        """Return a cell such as `1,234 (1,200-1,300)` for each column; '-' where it was not measured."""
        cells = []
        for column in columns:
            value = self.estimate(name, column)
            cells.append("-" if value is None else f"{value:{column.number_format}}")
        return cells

    def rows(self, columns: Sequence[FigureColumn]) -> list[list[str]]:
        """Return a row for each run: its name and the cells of `columns`."""
        return [[name, *self.cells(name, columns)] for name in self.figures]

    def _values(self, name: str, figure: str) -> list[float]:
        return [figures[figure] for figures in self.figures[name] if figure in figures]


def take_turns(runs: Mapping[str, Run], repeats: int) -> Turns:
    """Call each of `runs` once a turn, `repeats` times."""
    check_range("repeats", repeats, 1)
    figures: dict[str, list[Mapping[str, float]]] = {name: [] for name in runs}
    others = OtherProcesses()
    done, total = 0, repeats * len(runs)
    with ProgressBar("turns", "run") as bar:
        for _ in range(repeats):
            for name, run in runs.items():
                figures[name].append(run())
                done += 1
                bar(done, total)
    return Turns(figures, others.share())


def show(table: Table, turns: Turns, settings: str, versions: Iterable[str] = ("python", "torch")) -> None:
    """Print the table as Markdown, and below it settings, machine, versions and the load by others."""
    machine = machine_line(describe_machine(torch.device("cpu")), versions)
    repeats = max(map(len, turns.figures.values()))
    busy = ""
    if turns.other_cpu_share is not None:
        busy = f"; other processes took {turns.other_cpu_share:.0%} of the CPUs"
    click.echo(table.markdown())
    click.echo(f"\n{settings}; medians (ranges) of {quantity(repeats, 'turn')}; {machine}{busy}")


def main(command: click.Command, name: str) -> None:
    """Run `command` as the program of this process; bad input ends it with one line and exit code 2."""
    sys.exit(commandline.run(command, f"bench.lab.{name}"))
