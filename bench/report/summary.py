"""What a newcomer reads of a result: a table of at most five columns, and four lines on when it holds."""

from collections.abc import Collection

from rich.table import Table

from bench.machine.hardware import accelerator_of, versions_of
from bench.report.gain import busy, is_limit, is_ours, sentences
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.table import best_rows, markdown_table, title
from bench.report.words import percent

_COLD = "from a cold disk"
_TITLES = ("loader", "images/s", "accelerator busy", _COLD, "first batch")
NOT_MEASURED = "not measured"
_USUAL = {"shuffle": "auto", "cache": "none", "compiled": False, "amp": "off"}


def rows(result: Result) -> list[Row]:
    """Loaders that one could train with, ours and others, what people have today first; all if none is."""
    loaders = [row for row in result.rows if is_ours(row) or (row.peer and not is_limit(row))]
    return sorted(loaders, key=lambda row: row.backend != "imagefolder") or list(result.rows)


def skipped(result: Result, asked: Collection[str] = ()) -> dict[str, str]:
    """What could not run, and why; `nvjpeg`, which most machines lack the hardware for, only if `asked`."""
    return {
        name: reason
        for name, reason in result.skipped.items()
        if not name.startswith("nvjpeg ") or "nvjpeg" in asked
    }


def titles(result: Result) -> list[str]:
    """Of the columns: that of a cold disk is there where it was asked for."""
    has_cold = result.settings.get("cold", False) or any(row.cold is not None for row in result.rows)
    return [each for each in _TITLES if each != _COLD or has_cold]


def cells(result: Result) -> list[list[str]]:
    """A line for each of `rows`, in the order of `titles`."""
    shown = titles(result)
    lines = []
    for row in rows(result):
        texts = (
            title(result, row),
            f"{row.loader.median:,.0f}",
            _share(busy(row)),
            NOT_MEASURED if row.cold is None else f"{row.cold.median:,.0f}",
            f"{row.batches.first_batch_s.median:.2f} s",
        )
        lines.append([text for each, text in zip(_TITLES, texts, strict=True) if each in shown])
    return lines


def terminal_table(result: Result) -> Table:
    """A rich table; the fastest in bold."""
    table = Table(box=None, pad_edge=False)
    for number, each in enumerate(titles(result)):
        table.add_column(each, justify="right" if number else "left", no_wrap=True)
    best = best_rows(result)
    for row, texts in zip(rows(result), cells(result), strict=True):
        table.add_row(*texts, style="bold" if row in best else "")
    return table


def note(result: Result) -> list[str]:
    """Four lines: the machine, the work, what the columns are, whose the loaders are."""
    machine, settings = result.machine, result.settings
    gpu = accelerator_of(machine)
    versions = versions_of(machine, ("torch", "pillow"))
    of_trainer = dict.fromkeys(
        f"{row.trainer_name} ({row.trainer.median:,.0f} images/s)" for row in result.rows if row.trainer
    )
    unusual = [
        f"{key} {settings[key]}"
        for key, value in {"augment": None, **_USUAL}.items()
        if settings.get(key, value) != value
    ]
    work = [
        f"trainer {', '.join(of_trainer)}" if of_trainer else "no trainer",
        f"batch {settings['batch_size']} of {settings['size']}x{settings['size']}",
        *unusual,
        f"{settings['workers']} workers",
    ]
    repeats = settings["repeats"]
    runs = f"medians of {repeats} runs" if repeats > 1 else "one run each"
    return [
        ", ".join(
            [
                machine["cpu"],
                machine["memory"],
                "no accelerator" if gpu == "none" else gpu,
                *versions,
                machine["date"],
            ]
        ),
        ", ".join(work),
        f"{runs}, files in memory; images/s: of the loader alone; busy: while it feeds the trainer",
        "ours: this project's loaders, by their --backend names",
    ]


def markdown(result: Result, gpu_price: float | None = None) -> str:
    """The sentence, the table and the note."""
    table = markdown_table(titles(result), cells(result))
    return "\n\n".join([*sentences(result, gpu_price), table, *(f"{line}." for line in note(result))])


def _share(share: Estimate | None) -> str:
    return "-" if share is None else percent(share.median)
