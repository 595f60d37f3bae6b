"""A result as a terminal table and as Markdown; `bench.report.loaders_page` makes the HTML page."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.table import Table

from bench.machine.hardware import accelerator_of, versions_of
from bench.report.batch_times import BatchTimes
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.trust import disturbance, is_disturbed, miss, other_cpu, why_together
from bench.report.verdict import COLD_FETCH, KEEPS_UP, LOADER_BINDS, NOT_DISTINGUISHABLE, lost_share
from bench.report.words import percent
from bench.report.workers import ALL_BUSY, without_former_advice
from precache.packages import DALI

WIDTH = 100
"""Columns of a terminal that the table fits into."""
_DISPENSABLE = ("p95 ms", "first s", "med ms", "trainer")  # dropped first to last where it would not fit
_VERSIONS = ("python", "torch", "torchvision", "pillow", "simplejpeg", "webdataset", *DALI)
_LEGEND = {
    "backend": "backend: this project's loaders, by their --backend names; those of other libraries are "
    "imagefolder (torchvision's) and what --against names",
    "loader": "loader: images per second of the loader alone",
    "cold": "cold: those with its files dropped from the page cache before",
    "trainer": "trainer: those of the trainer alone, on a batch that stays on the device",
    "together": "together: those of the trainer fed by the loader",
    "ratio": "ratio: together over trainer, and the farthest repeat from it",
    "of limit": "of limit: loader over gather, which copies the same pictures and does nothing else",
    "first s": "first s: seconds from building the loader to its first batch",
    "med ms": "med ms: median time per batch",
    "p95 ms": "p95 ms: its 95th percentile",
    "verdict": "verdict: how many fewer images/s than the trainer takes alone; unclear: "
    "some runs keep up, others do not",
    "epoch gap": "epoch gap: the longest time of an epoch's first batch, in medians",
}


def headline(result: Result) -> list[str]:
    """What the result says, one sentence per trainer."""
    if is_disturbed(other_cpu(result.settings)):
        return [disturbance(other_cpu(result.settings))]
    sentences = []
    warm = " and the files in memory" if any(row.cold is not None for row in result.rows) else ""
    for name in dict.fromkeys(row.trainer_name for row in result.rows):
        rows = [row for row in result.rows if row.trainer_name == name and row.trainer is not None]
        keeping = [label(row) for row in rows if row.verdict == KEEPS_UP]
        waiting = [
            f"{label(row)} ({lost_share(row.ratio):.0%} fewer images/s)"
            for row in rows
            if row.verdict == LOADER_BINDS and row.ratio is not None
        ]
        unclear = [label(row) for row in rows if row.verdict == NOT_DISTINGUISHABLE]
        if waiting:
            sentences.append(f"With {name}{warm} the trainer waits for {', '.join(waiting)}.")
        if unclear:
            sentences.append(f"With {name}{warm} these keep up, within noise: {', '.join(unclear)}.")
        if keeping:
            sentences.append(f"With {name}{warm} these keep up: {', '.join(keeping)}.")
    return sentences


def columns(result: Result) -> list[str]:
    """Titles of what the result has; the trainer's name is one only where several were measured."""
    return list(_table(result))


def cells(result: Result) -> list[list[str]]:
    """The rows as text."""
    return [list(row) for row in zip(*_table(result).values(), strict=True)]


def _table(result: Result) -> dict[str, list[str]]:
    """Title -> a text per row."""
    rows = result.rows
    table = {"backend": [row.backend for row in rows], "data": [row.data for row in rows]}
    if several_trainers(result):
        table = {"step": ["-" if row.peer else row.trainer_name for row in rows], **table}
    table["loader"] = [_rate(row.loader) for row in rows]
    if any(row.cold is not None for row in rows):
        table["cold"] = [_rate(row.cold) for row in rows]
    if any(row.trainer is not None for row in rows):
        table["trainer"] = [_rate(row.trainer) for row in rows]
        table["together"] = [_rate(row.together) for row in rows]
        table["ratio"] = [_ratio(row.ratio) for row in rows]
    elif any(row.rates.of_limit is not None for row in rows):
        table["of limit"] = [_ratio(row.rates.of_limit) for row in rows]
    table["first s"] = [f"{row.batches.first_batch_s.median:.2f}" for row in rows]
    table["med ms"] = [f"{row.batches.batch_s_median * 1e3:.1f}" for row in rows]
    table["p95 ms"] = [f"{row.batches.batch_s_p95 * 1e3:.1f}" for row in rows]
    if "trainer" in table:
        table["verdict"] = [_verdict(row) for row in rows]
    elif any(row.batches.epoch_gap_s is not None for row in rows):
        table["epoch gap"] = [_gap(row) for row in rows]
    return table


def legend(result: Result) -> str:
    """What the columns of the terminal's table mean."""
    texts = [text for title, text in _LEGEND.items() if title in _fitting(result)]
    star = ["*: the most images per second, within noise"] if best_rows(result) else []
    return "; ".join([*texts, *star]) + "."


def comparisons(result: Result) -> list[str]:
    """One line per loader of ours that has peers: how many times as many images per second it serves."""
    lines = {}
    for row in result.rows:
        if row.rates.over:
            ratios = (
                f"{ratio.median:.2f}x {name} ({ratio.low:.2f}-{ratio.high:.2f})"
                for name, ratio in row.rates.over.items()
            )
            lines[label(row)] = f"{label(row)}: {', '.join(ratios)}"  # the same with each trainer
    return list(lines.values())


def terminal_table(result: Result) -> Table:
    """A rich table of at most `WIDTH` columns, the best rows in bold and with a star."""
    titled, rows, best = _fitting(result), result.rows, best_rows(result)
    table = Table(box=None, pad_edge=False)
    left = {"", "step", "backend", "data", "verdict"}
    for title in titled:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for row, texts in zip(rows, zip(*titled.values(), strict=True), strict=True):
        table.add_row(*texts, style="bold" if row in best else "")
    return table


def _fitting(result: Result) -> dict[str, list[str]]:
    """`_table`, with stars, without what does not fit."""
    best = best_rows(result)
    stars = {"": ["*" if row in best else "" for row in result.rows]} if best else {}
    titled = {**stars, **_table(result)}
    for title in _DISPENSABLE:
        if sum(2 + max(map(len, (title, *column))) for title, column in titled.items()) - 2 > WIDTH:
            titled.pop(title, None)
    return titled


def best_rows(result: Result) -> list[Row]:
    """Of each trainer the loader that gave the most images/s, and those that overlap with it.

    Noise is no loader, and what only other libraries' loaders can be compared by is not all of it. Beside
    other busy processes none is the best.
    """
    if is_disturbed(other_cpu(result.settings)):
        return []
    best = []
    for name in dict.fromkeys(row.trainer_name for row in result.rows):
        rated = [
            (rate, row)
            for row in result.rows
            if row.trainer_name == name and row.backend != "synthetic" and not row.peer
            if (rate := row.together or row.loader)
        ]
        if len(rated) > 1:
            top, _ = max(rated, key=lambda pair: pair[0].median)
            best += [row for rate, row in rated if rate.high >= top.low]
    return best


def findings(result: Result) -> list[str]:
    """One line per thing worth saying: the bottleneck and its fix, where time went, and limits that hurt."""
    lines: list[str] = []
    flagged: dict[str, list[str]] = {}
    several = several_trainers(result)
    for row in result.rows:
        name = f"{label(row)} with {row.trainer_name}" if several else label(row)
        if row.advice.text:
            lines.append(f"{name}: {row.advice.text}")
        spent = _spent(row)
        if spent:
            lines.append(f"{name}: {spent}.")
        spikes = row.batches.spikes
        if row.verdict != KEEPS_UP and spikes is not None and _is_uneven(spikes, row.batches.batch_s_median):
            lines.append(f"{name}: {' '.join(without_former_advice(spikes.explanation))}")
        for flag in row.flags:
            if row.verdict != KEEPS_UP or not flag.startswith(ALL_BUSY):
                flagged.setdefault(flag.rstrip("."), []).append(name)
    return lines + [f"{flag}: {', '.join(labels)}." for flag, labels in flagged.items()]


def _spent(row: Row) -> str:
    """Where a fed trainer's time went, as far as the row has it; what it waits for, if anything."""
    parts = []
    times, stages = row.batches, row.stages
    if times.data_wait is not None and times.utilisation is not None:
        parts.append(
            f"waited {percent(times.data_wait.median)} of the time, accelerator busy "
            f"{percent(times.utilisation.median)} "
            f"(MLPerf Storage asks for 90%)"
        )
    if stages.predicted is not None and row.together is not None:
        off = row.together.median / stages.predicted - 1
        parts.append(
            f"predicted {stages.predicted:,.0f} images/s, measured {row.together.median:,.0f} ({off:+.0%})"
        )
        rates = stages.predicted, row.together.median
        missed = miss(*rates, why_together(*rates))
        parts += [missed] if missed else []
    if times.first_step_s is not None and times.step_s:
        parts.append(f"first step {_ms(times.first_step_s.median)}, then {_ms(median(times.step_s))}")
    stalls = [f"{name} {_ms(seconds)}" for name, seconds in stages.stalls.items() if name != COLD_FETCH]
    if stalls and row.verdict != KEEPS_UP:
        parts.append(f"waited per batch for {', '.join(stalls)}")
    if COLD_FETCH in stages.stalls:
        parts.append(f"a cold disk adds {_ms(stages.stalls[COLD_FETCH])}")
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _is_uneven(spikes: BatchTimes, usual_s: float) -> bool:
    """Whether spikes come regularly, or an epoch begins with the wait of more than a batch."""
    late = any(gap.excess_s > usual_s for gap in spikes.gaps)
    return late or spikes.wait_spikes.period is not None


def markdown(result: Result) -> str:
    """A Markdown table, with the conditions below it."""
    lines = [markdown_table(columns(result), cells(result))]
    for line in comparisons(result):
        lines += ["", line]
    lines += ["", f"{conditions(result)}."]
    return "\n".join(lines)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of plain text."""
    return "\n".join(map(_markdown_row, (titles, ["---"] * len(titles), *rows)))


def conditions(result: Result) -> str:
    """Under which conditions the figures hold, on one line."""
    settings, machine = result.settings, result.machine
    versions = versions_of(machine, _VERSIONS)
    peers = ", ".join(dict.fromkeys(settings.get("peers", {}).values()))
    usual = {"augment": "eval", "shuffle": "auto", "cache": "none"}
    unusual = [
        f"{name} {settings[name]}" for name, value in usual.items() if settings.get(name, value) != value
    ]
    computing = [amp] if (amp := settings.get("amp", "off")) != "off" else []
    computing += ["compiled"] if settings.get("compiled", False) else []
    return "; ".join(
        (
            f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}",
            ", ".join(versions),
            *([f"peers: {peers}"] if peers else []),
            f"trainer {', '.join((*settings['trainers'], *computing))}",
            f"batch {settings['batch_size']} of {settings['size']}x{settings['size']}, "
            f"{settings['workers']} workers, page cache {settings['page_cache']}",
            *unusual,
            *settings.get("notes", ()),
            f"median of {settings['repeats']} interleaved runs of {settings['batches']} batches",
            machine["date"],
        )
    )


def _ratio(ratio: Estimate | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ±{max(ratio.high - ratio.median, ratio.median - ratio.low):.2f}"


def _gap(row: Row) -> str:
    return (
        "-"
        if row.batches.epoch_gap_s is None
        else f"{row.batches.epoch_gap_s / row.batches.batch_s_median:.1f}x"
    )


def _verdict(row: Row) -> str:
    if row.verdict == NOT_DISTINGUISHABLE:
        return "unclear"
    if row.ratio is None or row.verdict != LOADER_BINDS:
        return row.verdict
    return f"{lost_share(row.ratio):.0%} fewer"


def label(row: Row) -> str:
    """What was measured on what."""
    return row.label


def name(row: Row) -> str:
    """The loader, whose it is, for `pytorch` and `webdataset` are libraries, too, and what it reads."""
    if row.backend == "imagefolder":
        return "imagefolder (torchvision)"
    if row.peer or row.backend == "synthetic":
        return label(row)
    return f"{row.backend} (ours)" if row.data == row.backend else f"{row.backend} (ours, {row.data})"


def title(result: Result, row: Row) -> str:
    """The loader, and where it needs saying, with which trainer."""
    several = several_trainers(result) and not row.peer
    return name(row) + (f", fed to {row.trainer_name}" if several else "")


def _rate(rate: Estimate | None) -> str:
    return "-" if rate is None else f"{rate.median:,.0f}"


def several_trainers(result: Result) -> bool:
    """Whether a row needs its trainer's name."""
    return len({row.trainer_name for row in result.rows if not row.peer}) > 1


def _markdown_row(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"
