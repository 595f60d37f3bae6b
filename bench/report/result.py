"""A result of `bench loaders` on the terminal: the answer, one table, when it holds, and what to do next."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import click

from bench.report.row import RAW_TREE, SYNTHETIC, Result, Row
from bench.report.stats import Estimate, is_disturbed, other_cpu
from bench.report.verdict import (
    KEEPS_UP,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    best_rows,
    find_gain,
    judge,
    lost_share,
    observations,
    sentences,
)
from bench.report.words import Table, counted, machine_line, percent, say
from precache.packages import DALI

_VERSIONS = ("python", "torch", "torchvision", "pillow", "simplejpeg", "webdataset", *DALI)
_USUAL = {"shuffle": "auto", "cache": "none", "compiled": False, "amp": "off"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Showing:
    """How a result is shown.

    Attributes:
        markdown: as Markdown.
        details: every column and finding, instead of the table of five columns.
        gpu_price: dollars per hour of the accelerator; None leaves money out.
    """

    markdown: bool = False
    details: bool = False
    gpu_price: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of each row.

    Attributes:
        means: what it is; empty where the title says it.
        summary: whether it is shown without --details.
        text: of a row; None where it was not measured. A column without any text is left out.
    """

    title: str
    means: str
    summary: bool
    text: Callable[[Row], str | None]


def _rate(rate: Estimate | None) -> str | None:
    return None if rate is None else f"{rate.median:,.0f}"


def _ratio(ratio: Estimate | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.1f} ms"


def _gap(row: Row) -> str | None:
    if row.epoch_gap_s is None or not row.batch_s_median:
        return None
    return f"{row.epoch_gap_s / row.batch_s_median:.1f}x"


def _waits(row: Row) -> str | None:
    verdict = judge(row.ratio)
    if verdict == NO_TRAINER:
        return None
    if verdict == NOT_DISTINGUISHABLE or row.ratio is None:
        return "unclear"
    return "no" if verdict == KEEPS_UP else f"{lost_share(row.ratio):.0%}"


COLUMNS = (
    Column("images/s", "of the loader alone, files in memory", True, lambda row: _rate(row.loader)),
    Column(
        "accelerator busy",
        "while the loader feeds it",
        True,
        lambda row: None if row.busy is None else percent(row.busy.median),
    ),
    Column(
        "from a cold disk",
        "images/s, its files dropped from the page cache before",
        True,
        lambda row: _rate(row.cold),
    ),
    Column(
        "first batch",
        "seconds from building the loader to its first batch",
        True,
        lambda row: None if row.first_batch_s is None else f"{row.first_batch_s.median:.2f} s",
    ),
    Column(
        "trainer",
        "images/s, alone, on a batch that stays on the device",
        False,
        lambda row: _rate(row.trainer),
    ),
    Column(
        "together",
        "images/s of the trainer fed by the loader",
        False,
        lambda row: _rate(row.trainer and row.together),
    ),
    Column("ratio", "together over trainer, and its range", False, lambda row: _ratio(row.ratio)),
    Column(
        "of limit",
        "loader over gather, which copies the same pictures and does nothing else",
        False,
        lambda row: _ratio(row.of_limit),
    ),
    Column("median", "time per batch", False, lambda row: _ms(row.batch_s_median)),
    Column("95%", "most batches take no longer", False, lambda row: _ms(row.batch_s_p95)),
    Column("epoch gap", "the longest time of an epoch's first batch, in medians", False, _gap),
    Column(
        "trainer waits",
        "how many fewer images/s than alone; unclear: some runs keep up, others do not",
        False,
        _waits,
    ),
)


def shown_rows(result: Result, *, details: bool) -> list[Row]:
    """Loaders that one could train with, what people have today first; with `details`, all."""
    loaders = [row for row in result.rows if details or row.is_ours or (row.peer and not row.is_limit)]
    return sorted(loaders, key=lambda row: row.backend != "imagefolder") or list(result.rows)


def shown_columns(result: Result, *, details: bool) -> list[Column]:
    """Those that have a text; without `details` the few that a newcomer needs."""
    rows = shown_rows(result, details=details)
    return [one for one in COLUMNS if (details or one.summary) and any(one.text(row) for row in rows)]


def table(result: Result, *, details: bool = False) -> Table:
    """A row for each loader; the fastest in bold."""
    rows, columns = shown_rows(result, details=details), shown_columns(result, details=details)
    best, lacking = best_rows(result), "-" if details else "not measured"
    return Table(
        ["loader", *(column.title for column in columns)],
        [[result.title(row), *(column.text(row) or lacking for column in columns)] for row in rows],
        bold=[number for number, row in enumerate(rows) if row in best],
    )


def skipped(result: Result, asked: Collection[str] = ()) -> list[str]:
    """What could not run, and why; `nvjpeg`, which most machines lack the hardware for, only if `asked`."""
    return [
        f"skipped {name}: {reason}"
        for name, reason in result.skipped.items()
        if not name.startswith("nvjpeg ") or "nvjpeg" in asked
    ]


def legend(result: Result, *, details: bool = False) -> str:
    """What the columns are, a sentence without its full stop."""
    columns = shown_columns(result, details=details)
    lacking = ["-: not measured"] if details else []
    return "; ".join([*(f"{column.title}: {column.means}" for column in columns), *lacking])


def conditions(result: Result, *, details: bool = False) -> list[str]:
    """When the figures hold, a sentence each without its full stop: machine, data, work."""
    settings = result.settings
    trainers = dict.fromkeys(
        f"{row.trainer_name} ({row.trainer.median:,.0f} images/s)" for row in result.rows if row.trainer
    )
    unusual = [f"{key} {settings[key]}" for key, usual in _USUAL.items() if settings.get(key, usual) != usual]
    data = dict.fromkeys(
        f"{each['path']} ({counted(each['samples'], 'picture')})"
        for each in settings.get("data", {}).values()
        if "path" in each
    )
    work = [
        f"trainer {', '.join(trainers)}" if trainers else "no trainer",
        f"batch {settings['batch_size']} of {settings['size']}x{settings['size']}",
        *([f"augment {settings['augment']}"] if "augment" in settings else []),
        *unusual,
        counted(settings["workers"], "worker"),
        f"page cache {settings.get('page_cache', 'warm')}",
    ]
    repeats = settings["repeats"]
    work.append(f"medians of {repeats} runs, taking turns" if repeats > 1 else "one run each")
    lines = [
        machine_line(result.machine, _VERSIONS if details else ("torch", "pillow")),
        *([f"data: {', '.join(data)}"] if data else []),
        ", ".join(work),
        "ours: this project's loaders, by their --backend names",
    ]
    peers = ", ".join(dict.fromkeys(settings.get("peers", {}).values()))
    return lines + [f"peers: {peers}"] * bool(peers) + list(settings.get("notes", ()))


def comparisons(result: Result) -> list[str]:
    """One line per loader of ours that has peers: how many times as many images per second it serves."""
    lines = {}
    for row in result.rows:
        if row.over:
            ratios = ", ".join(f"{ratio:.2f} times {name}" for name, ratio in row.over.items())
            lines[row.name] = f"{row.name}: {ratios}"  # the same with each trainer
    return list(lines.values())


def findings(result: Result) -> Iterator[str]:
    """Per loader: the bottleneck and its fix, where the time went, limits of the machine."""
    for row in result.rows:
        told = [row.advice] * bool(row.advice) + observations(row)
        if told and row.backend != SYNTHETIC:
            yield f"{result.title(row)}: {' '.join(told)}"
    yield from comparisons(result)


def next_step(result: Result) -> str:
    """What a reader would type next; empty where there is nothing to do."""
    ours = [row for row in result.rows if row.is_ours and row.trainer_name == result.rows[0].trainer_name]
    gain = find_gain(ours)
    places = {row.label: result.settings.get("data", {}).get(row.label, {}).get("path") for row in ours}
    if gain.today is None or judge(gain.today.ratio) == KEEPS_UP or is_disturbed(other_cpu(result.settings)):
        return ""
    if gain.best and (path := places[gain.best[0].label]):
        return f"Next: loaders.build({path!r}) in your training code."
    if all(row.data == RAW_TREE for row in ours) and (path := places[gain.today.label]):
        return f"Next: 'bench recommend {path}' says what converting would bring."
    return ""


def show(result: Result, showing: Showing, *, asked: Collection[str] = (), has_page: bool = False) -> None:
    """Print the answer, the table, when it holds, and how to get the rest.

    Args:
        asked: backends that were asked for by name.
        has_page: whether a page is written, too.
    """
    details = showing.details
    shown = table(result, details=details)
    said = sentences(result, showing.gpu_price)
    if showing.markdown:
        lines = [
            f"{line}." for line in (*conditions(result, details=details), legend(result, details=details))
        ]
        more = comparisons(result) if details else []
        click.echo("\n\n".join([*said, shown.markdown(), *more, *lines]))
        return
    for sentence in said:
        say(sentence)
        click.echo()
    shown.show()
    for line in skipped(result, ["nvjpeg"] if details else asked):
        click.echo(line)
    click.echo()
    for line in (*conditions(result, details=details), legend(result, details=details)):
        say(f"{line}.")
    if details:
        for line in findings(result):
            click.echo()
            say(line)
    if step := next_step(result):
        click.echo()
        say(step)
    if not (details or has_page):
        click.echo("everything else: --details, or a page with --html FILE")
