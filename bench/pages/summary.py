"""What a newcomer reads of a result: a table of five columns, and three lines on when it holds."""

from rich.table import Table

from bench.findings.gain import busy, is_limit, is_ours, percent, sentences
from bench.findings.result import Result, Row
from bench.findings.stats import Estimate
from bench.machine.hardware import accelerator_of, versions_of
from bench.pages.table import best_rows, label, markdown_table, several_trainers

TITLES = ("loader", "images/s", "accelerator busy", "from a cold disk", "first batch")
NOT_MEASURED = "not measured"
_USUAL = {"shuffle": "auto", "cache": "none", "compiled": False, "amp": "off"}


def rows(result: Result) -> list[Row]:
    """Loaders that one could train with, ours and others, what people have today first; all if none is."""
    loaders = [row for row in result.rows if is_ours(row) or (row.peer and not is_limit(row))]
    return sorted(loaders, key=lambda row: row.backend != "imagefolder") or list(result.rows)


def name(result: Result, row: Row) -> str:
    """The loader, what it reads where that is not clear, and its trainer where there are several."""
    clear = row.backend in (row.data, "imagefolder")
    said = row.backend if clear else label(row)
    return f"{said}, fed to {row.trainer_name}" if several_trainers(result) and not row.peer else said


def cells(result: Result) -> list[list[str]]:
    """A line for each of `rows`, in the order of `TITLES`."""
    return [
        [
            name(result, row),
            f"{row.loader.median:,.0f}",
            _share(busy(row)),
            NOT_MEASURED if row.cold is None else f"{row.cold.median:,.0f}",
            f"{row.batches.first_batch_s.median:.2f} s",
        ]
        for row in rows(result)
    ]


def terminal_table(result: Result) -> Table:
    """A rich table; the fastest in bold."""
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(TITLES):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    best = best_rows(result)
    for row, texts in zip(rows(result), cells(result), strict=True):
        table.add_row(*texts, style="bold" if row in best else "")
    return table


def note(result: Result) -> list[str]:
    """Three lines: the machine, the work, what the columns are."""
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
        f"{runs}; images/s: of the loader alone, files in memory; busy: while it feeds the trainer",
    ]


def markdown(result: Result, gpu_price: float | None = None) -> str:
    """The sentence, the table and the note."""
    table = markdown_table(TITLES, cells(result))
    return "\n\n".join([*sentences(result, gpu_price), table, *(f"{line}." for line in note(result))])


def _share(share: Estimate | None) -> str:
    return "-" if share is None else percent(share.median)
