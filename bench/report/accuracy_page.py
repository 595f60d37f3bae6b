"""What trainings from several sources gave: on the terminal, and as a page with the curves of all seeds."""

import textwrap
from collections.abc import Sequence
from html import escape
from statistics import fmean, stdev

import click
import plotly.graph_objects as go
from rich.table import Table

from bench.machine.hardware import accelerator_of, versions_of
from bench.report import skeleton
from bench.report.accuracy import Compared, Cost, Line, compare, costs, final, level, sentence, too_little
from bench.report.trust import disturbance
from bench.report.words import counted, duration
from precache.console import page
from precache.console.tables import new_console

_WIDTH = 110
# Okabe and Ito, "Color Universal Design" (2008), without black and yellow
_COLOURS = ("#2b83c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_DASHES = ("solid", "dash", "dot")
_STYLE = """
.verdict { margin-bottom: 1.5rem; }
.charts { grid-template-columns: minmax(0, 1fr); }
figure { max-width: 60rem; }
"""
_CURVES = "Top-1 on the validation pictures, %: a thin line a seed, thick the mean"


def show(lines: Sequence[Line], margin: float) -> None:
    """Print the answers, the table, and under which conditions it holds."""
    for text in answers(lines, margin):
        click.echo(textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
    click.echo()
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles(lines)):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in rows(lines, margin):
        table.add_row(*cells)
    new_console(width=_WIDTH).print(table)
    click.echo()
    for text in conditions(lines, margin):
        click.echo(textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def answers(lines: Sequence[Line], margin: float) -> list[str]:
    """A sentence for each source; and whether others disturbed the times."""
    shares = [line["other_cpu"] for line in lines]
    disturbed = disturbance(fmean(shares), "; accuracy does not depend on that")
    notes = [text for text in (disturbed,) if text]
    little = too_little(lines)
    if little:
        return [little, *notes]
    return [*(sentence(each) for each in compare(lines, margin)), *notes]


def titles(lines: Sequence[Line]) -> list[str]:
    """Of the columns of `rows`."""
    energy = ["energy"] if _energy_known(lines) else []
    return [
        "pictures from",
        "top-1",
        "difference",
        "95% interval",
        "verdict",
        "training",
        f"to {level(lines)}%",
        *energy,
    ]


def rows(lines: Sequence[Line], margin: float) -> list[list[str]]:
    """A line for each source, the baseline first."""
    compared = {each.name: each for each in compare(lines, margin)}
    cost = costs(lines)
    found = []
    for name, top1 in final(lines).items():
        values = list(top1.values())
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        each = compared.get(name)
        found.append([name, f"{fmean(values):.2f}%{spread}", *_against(each), *_taken(cost[name])])
    if not _energy_known(lines):
        return [cells[:-1] for cells in found]
    return found


def conditions(lines: Sequence[Line], margin: float) -> list[str]:
    """What was done on which machine, and what the columns are."""
    one, machine, told = lines[0], lines[0]["machine"], lines[0]["conditions"]
    dates = sorted({line["machine"]["date"] for line in lines})
    seeds = counted(len({line["seed"] for line in lines}), "seed")
    gpu = accelerator_of(machine)
    versions = versions_of(machine, ("torch", "torchvision", "pillow"))
    work = [
        f"{told['model']}, {told['size']}x{told['size']}",
        f"{told['epochs']} epochs of batches of {told['batch_size']}",
        f"{one['steps']:,} steps from the same weights for each source",
        f"SGD with Nesterov momentum, learning rate {told['lr']:g}, cosine",
        f"{_precision(told['amp'])}, {seeds}",
    ]
    where = [
        *(machine["cpu"], machine["memory"], "no accelerator" if gpu == "none" else gpu, *versions),
        f"{counted(told['workers'], 'worker')}, {counted(told['threads'], 'thread')} of torch",
        dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
    ]
    return [
        f"{'; '.join(work)}.",
        "Top-1: on the untouched validation pictures, Resize and CenterCrop of torchvision, mean ± standard "
        "deviation over seeds. Difference and interval: in points, paired by seed, Student's t, for each "
        f"source alone. Same: the interval lies within ±{margin:g} points; better or worse: it leaves 0 out, "
        "'or chance': that may well happen to one of so many sources (Holm). Training: seconds without "
        "evaluations, and beside the first row.",
        f"{', '.join(where)}.",
    ]


def html(lines: Sequence[Line], margin: float) -> str:
    """The page."""
    figures = {
        "Points above or below the first source, with 95% intervals": _intervals(lines, margin),
        f"{_CURVES}; over epochs": _curves(lines, 0, "epochs"),
        f"{_CURVES}; over seconds of training": _curves(lines, 2, "seconds"),
    }
    seeds = [
        (name, str(seed), f"{value:.2f}%")
        for name, values in final(lines).items()
        for seed, value in values.items()
    ]
    sources = {line["arm"]: line["source"]["described"] for line in lines}
    content = (
        "<h1>Does the model get worse?</h1>"
        f'<section class="verdict">{page.paragraphs(answers(lines, margin))}</section>'
        f"{page.table(titles(lines), rows(lines, margin))}{skeleton.draw(figures, 'accuracy')}"
        f"<h2>Where the pictures come from</h2>{page.facts(sources)}"
        f"{page.folded('Every training', page.table(('pictures from', 'seed', 'top-1'), seeds))}"
        + "".join(f"<p>{escape(text)}</p>" for text in conditions(lines, margin))
    )
    return skeleton.document("Accuracy", content, _STYLE)


def _against(each: Compared | None) -> list[str]:
    if each is None:
        return ["-", "-", "-"]
    low_high = f"{each.low:+.2f} to {each.high:+.2f}" if each.seeds > 1 else "-"
    verdict = f"{each.verdict} or chance" if each.may_be_chance else each.verdict
    return [f"{each.difference:+.2f}", low_high, verdict]


def _taken(cost: Cost) -> list[str]:
    energy = "-" if cost.energy_j is None else f"{cost.energy_j / 1000:,.1f} kJ"
    return [f"{cost.train_s.median:,.0f} s ({cost.ratio.median:.2f}x)", duration(cost.level_s), energy]


def _energy_known(lines: Sequence[Line]) -> bool:
    return any(line["energy_j"] is not None for line in lines)


def _precision(amp: str) -> str:
    return "float32" if amp == "off" else f"{amp} autocast"


def _intervals(lines: Sequence[Line], margin: float) -> go.Figure:
    figure = go.Figure()
    compared = [each for each in compare(lines, margin) if each.seeds > 1][::-1]
    figure.add_vrect(x0=-margin, x1=margin, fillcolor="#888", opacity=0.15, line_width=0)
    figure.add_vline(x=0, line_width=1, line_color="#888")
    figure.add_scatter(
        x=[each.difference for each in compared],
        y=[each.name for each in compared],
        error_x={"type": "data", "array": [each.high - each.difference for each in compared], "thickness": 2},
        mode="markers",
        marker={"size": 9, "color": _COLOURS[0]},
        showlegend=False,
    )
    figure.update_xaxes(title=f"points; grey: within the margin of {margin:g}", automargin=True)
    figure.update_yaxes(automargin=True)
    return _laid_out(figure, 120 + 32 * len(compared))


def _curves(lines: Sequence[Line], across: int, title: str) -> go.Figure:
    """Over the part `across` of each point of a curve."""
    figure = go.Figure()
    for number, name in enumerate(final(lines)):
        own = [line["curve"] for line in lines if line["arm"] == name]
        look = {
            "color": _COLOURS[number % len(_COLOURS)],
            "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        }
        for curve in own:
            figure.add_scatter(
                x=[point[across] for point in curve],
                y=[point[1] for point in curve],
                mode="lines",
                line={**look, "width": 1},
                opacity=0.35,
                legendgroup=name,
                showlegend=False,
                hoverinfo="skip",
            )
        figure.add_scatter(
            x=[fmean(point[across] for point in points) for points in zip(*own, strict=True)],
            y=[fmean(point[1] for point in points) for points in zip(*own, strict=True)],
            mode="lines",
            line={**look, "width": 3},
            name=name,
            legendgroup=name,
        )
    figure.update_xaxes(title=title, rangemode="tozero", automargin=True)
    figure.update_yaxes(title="top-1, %", rangemode="tozero", automargin=True)
    return _laid_out(figure, 460)


def _laid_out(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 16, "t": 10, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # else a finger on a chart cannot scroll the page
    )
    return figure
