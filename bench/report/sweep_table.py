"""A sweep as tables for the terminal: workers down, batch sizes across."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.table import Table

from bench.report.grid import Point, plateau, recommend, switches
from bench.report.sweep_file import SweepFile
from bench.report.trust import is_disturbed
from bench.report.verdict import KEEPS_UP, judge

LEGEND = (
    "images/s of the trainer, fed by the loader; ! the trainer does not wait; _ more workers give at most 2% "
    "more; * recommended; - not measured, the file says why; x does not fit into memory"
)


def tables(points: Sequence[Point], file: SweepFile) -> list[Table]:
    """One table for each backend, folder, amp and pin of `points`.

    Nothing is marked as best where other processes took too much of the CPUs.
    """
    found = {m.point: m for m in file.measured() if m.point in set(points)}
    other_cpu = file.other_cpu(points)
    chosen = {best.chosen.point for best in recommend(list(found.values()), other_cpu)}
    begins = set()
    for point in () if is_disturbed(other_cpu) else found:
        series = [m for m in found.values() if replace(m.point, workers=0) == replace(point, workers=0)]
        begins.add(plateau(sorted(series, key=lambda m: m.point.workers)).point)

    def cell(point: Point) -> str:
        if point not in found:
            return "x" if point in file.failed else "-"
        marks = ["!"] * (judge(found[point].ratio) == KEEPS_UP)
        marks += ["_"] * (point in begins) + ["*"] * (point in chosen)
        return f"{found[point].together.median:,.0f} {''.join(marks):<3}"

    return [
        _table(group, [point for point in points if _group(point) == group], cell)
        for group in dict.fromkeys(map(_group, points))
    ]


def _table(group: Point, points: Sequence[Point], cell: Callable[[Point], str]) -> Table:
    title = f"{group.backend} on {group.data}{switches(group)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("workers", justify="right")
    sizes = sorted({point.batch_size for point in points})
    for size in sizes:
        table.add_column(f"batch {size:,}    ", justify="right", no_wrap=True)
    for workers in sorted({point.workers for point in points}):
        row = [replace(group, workers=workers, batch_size=size) for size in sizes]
        table.add_row(str(workers), *map(cell, row))
    return table


def _group(point: Point) -> Point:
    return replace(point, workers=0, batch_size=0)
