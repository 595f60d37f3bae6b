"""What the results of the steps say: the answer in words, the goals, and a table for each step. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.evidence.memory import MAY_GROW_BYTES
from bench.evidence.runner import Content, Outcome
from bench.evidence.steps import Step
from bench.report import table as report
from bench.report.row import Result, Row
from bench.report.stats import Estimate
from bench.report.verdict import KEEPS_UP, NOT_DISTINGUISHABLE, judge, lost_share

_ANSWERING = ("resnet50", "resnet50-device", "photos", "stored", "resnet50-ram")
"""The steps that the first sentence is about: the step that most know, not compiled."""


_IMPLAUSIBLE = 1.05
"""Share of the trainer alone. A loader makes it no faster, but alone it gets noise, which costs power."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a loader should reach: a share, 0 to 1, of the images/s of the trainer alone on synthetic data."""

    what: str
    step: str
    backends: tuple[str, ...]
    share: float


GOALS = (
    Goal("decoded `shards`", "resnet50", ("shards",), 0.98),
    Goal('`shards` kept by `cache="device"`', "resnet50-device", ("shards",), 0.99),
    Goal("JPEGs of 500x400, by nvJPEG or DALI", "photos", ("nvjpeg", "dali"), 0.9),
)
GOAL_TITLES = ("fed to ResNet-50", "goal, of the trainer alone", "measured", "loader", "")


@dataclass(frozen=True, slots=True)
class Section:
    """What one step found.

    Attributes:
        sentences: what stands above the table.
        titles, lines: of the table; none where there is nothing to show.
        conditions: under which the figures hold.
        rows: of a comparison of loaders, for the chart.
        wrong: what is not as it should be.
    """

    sentences: Sequence[str] = ()
    titles: tuple[str, ...] = ()
    lines: Sequence[tuple[str, ...]] = ()
    conditions: str = ""
    rows: Sequence[Row] = ()
    wrong: list[str] = field(default_factory=list)


def answer(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Does the GPU wait, with which loader, and what is the ratio?"""
    fed = [row for name in _ANSWERING for row in fed_rows(outcomes, name) if row.backend != "synthetic"]
    rows = [row for row in fed if not _is_doubtful(row)]
    doubts = [_doubt(row) for row in fed if _is_doubtful(row)]
    if not rows:
        return ["Whether the GPU waits is not known: no loader was measured with ResNet-50.", *doubts]
    best = max(rows, key=lambda row: row.ratio.median if row.ratio else 0.0)
    first = {
        KEEPS_UP: f"The GPU need not wait: {_share(best)}.",
        NOT_DISTINGUISHABLE: f"Whether the GPU waits cannot be told from noise: {_share(best)}, at best.",
    }.get(best.verdict, f"The GPU waits with every loader: {_share(best)}, at best.")
    waiting = [f"{report.label(row)} ({_percent(row.ratio)})" for row in rows if _waits(row)]
    return [first, *([f"It waits with {', '.join(waiting)}."] if waiting else []), *doubts]


def fed_rows(outcomes: Mapping[str, Outcome], step: str) -> list[Row]:
    """Of a comparison of loaders, those that fed a trainer."""
    content = outcomes[step].content if step in outcomes else None
    return [] if content is None else _fed(_result(content))


def goal_lines(outcomes: Mapping[str, Outcome], smoke: bool = False) -> Sequence[tuple[str, ...]]:
    """A line per goal, under `GOAL_TITLES`; a smoke run reaches none."""
    lines = []
    for goal in GOALS:
        rows = [row for row in fed_rows(outcomes, goal.step) if row.backend in goal.backends]
        best = max(rows, key=lambda row: row.ratio.median if row.ratio else 0.0, default=None)
        if best is None or best.ratio is None:
            lines.append((goal.what, f"{goal.share:.2f}", "-", "-", f"not measured: {_why(outcomes, goal)}"))
            continue
        reached = "reached" if best.ratio.median >= goal.share else "missed"
        if smoke:
            reached = "trial run"
        elif _is_doubtful(best):
            reached = "doubtful: no loader makes a trainer faster"
        lines.append((goal.what, f"{goal.share:.2f}", _range(best.ratio), report.label(best), reached))
    return lines


def section(step: Step, outcome: Outcome) -> Section:
    """What `step` found; what it did not find is a sentence."""
    if outcome.content is None:
        return Section([f"Not measured: {outcome.note}."])
    return _SECTIONS.get(step.name, _loaders)(outcome.content)


def _loaders(content: Content) -> Section:
    result = _result(content)
    skipped = [f"Not measured: {name}: {reason}." for name, reason in result.skipped.items()]
    titles, lines = tuple(report.columns(result)), [tuple(line) for line in report.cells(result)]
    sentences = [*report.headline(result), *skipped]
    return Section(sentences, titles, lines, f"{report.conditions(result)}.", _fed(result))


def _facts(content: Content) -> Section:
    return Section(titles=("part", "what it is"), lines=[(name, text) for name, text in content["facts"]])


def _tests(content: Content) -> Section:
    failed = [f"{name} fails: {reason}" for name, reason in content["failed"].items()]
    counts = (f"{content['passed']:,}", f"{len(failed):,}", f"{len(content['skipped']):,}")
    reasons: dict[str, int] = {}
    for reason in content["skipped"].values():
        reasons[reason] = reasons.get(reason, 0) + 1
    skipped = [f"{count:,} skipped: {reason}." for reason, count in reasons.items()]
    wrong = list(failed)
    if not content["passed"] and content["machine"].get("accelerator") != "none":
        wrong.append("no test that needs a GPU passed")
    return Section([*failed, *skipped], ("passed", "failed", "skipped"), [counts], wrong=wrong)


def _races(content: Content) -> Section:
    lines, wrong = [], []
    for check in content["checks"]:
        name = f"{check['loader']}, {check['kind']}"
        found = _of_check(check)
        if not found:
            found = f"{check['differ']:,} of {check['batches']:,} batches differ"
            unsteady = check.get("differ idle", 0)
            if unsteady:
                found += f"; so do {unsteady:,} of two runs that nothing stalls"
        if "error" in check or check.get("differ"):
            wrong.append(f"{name}: {found}")
        lines.append((check["loader"], check["kind"], found))
    return Section(titles=("loader", "batches", "behind a stalled stream"), lines=lines, wrong=wrong)


def _memory(content: Content) -> Section:
    lines, wrong = [], []
    for check in content["checks"]:
        found = _of_check(check) or ("flat" if check["flat"] else "grows")
        taken = ", ".join(f"{taken / 2**20:,.0f}" for taken in check.get("bytes", ()))
        if "error" in check or check.get("flat") is False:
            wrong.append(f"memory of {check['loader']}: {found}")
        lines.append((check["loader"], found, taken))
    titles = ("loader", "memory", "MiB after each epoch")
    allowed = f"Flat: at most {MAY_GROW_BYTES >> 20} MiB more after the last epoch than after the second."
    return Section((), titles, lines, allowed, wrong=wrong)


def _of_check(check: Mapping[str, Any]) -> str:
    if "skipped" in check:
        return f"not measured: {check['skipped']}"
    return f"failed: {check['error']}" if "error" in check else ""


def _hardware(content: Content) -> Section:
    lines = []
    for found in content["measurements"]:
        value = found["value"]
        rate = "-" if value is None else f"{value['median']:,.4g} {found['unit']}"
        spread = "-" if value is None else f"{value['low']:,.4g} to {value['high']:,.4g}"
        lines.append((found["name"], rate, spread, found["how"]))
    titles = ("measured", "median", "lowest to highest", "how")
    return Section(list(content["warnings"]), titles, lines, f"Median of {content['repeats']} repeats.")


def _workers(content: Content) -> Section:
    lines = []
    for found in content["measured"]:
        point, ratio = found["point"], found["ratio"]
        share = "-" if ratio is None else f"{ratio['median']:.2f}"
        words = "does not wait" if ratio and judge(Estimate(**ratio)) == KEEPS_UP else ""
        name = f"{point['backend']} on {point['data']}"
        lines.append((name, str(point["workers"]), f"{found['together']['median']:,.0f}", share, words))
    for left_out in content["left out"]:
        point = left_out["point"]
        name = f"{point['backend']} on {point['data']}"
        lines.append((name, str(point["workers"]), "-", "-", f"not measured: {left_out['why']}"))
    titles = ("loader", "workers", "images/s with the trainer", "of the trainer alone", "")
    return Section(list(content["advice"]), titles, lines, "One trial each.")


_SECTIONS: dict[str, Callable[[Content], Section]] = {
    "facts": _facts,
    "tests": _tests,
    "races": _races,
    "memory": _memory,
    "hardware": _hardware,
    "workers": _workers,
}


def machine_words(machine: Mapping[str, str]) -> str:
    """What every figure of the run holds for."""
    return "; ".join(f"{name} {text}" for name, text in machine.items())


def _fed(result: Result) -> list[Row]:
    """The rows that fed a trainer; their names say from which cache."""
    cache = result.settings.get("cache", "none")
    kept = "" if cache == "none" else f", cache {cache}"
    return [replace(row, data=row.data + kept) for row in result.rows if row.ratio is not None]


def _result(content: Content) -> Result:
    return Result.from_json({name: value for name, value in content.items() if name != "version"})


def _is_doubtful(row: Row) -> bool:
    return row.ratio is not None and row.ratio.median > _IMPLAUSIBLE


def _doubt(row: Row) -> str:
    return (
        f"Doubtful: with {report.label(row)}, {row.trainer_name} is faster than alone "
        f"({_percent(row.ratio)}), so something slowed it down alone; measure that step again."
    )


def _waits(row: Row) -> bool:
    return row.verdict not in (KEEPS_UP, NOT_DISTINGUISHABLE)


def _share(row: Row) -> str:
    assert row.ratio is not None
    assert row.trainer is not None
    assert row.together is not None
    lost = lost_share(row.ratio)
    return (
        f"with {report.label(row)}, {row.trainer_name} runs at {_range(row.ratio)} of its own rate "
        f"({row.together.median:,.0f} of {row.trainer.median:,.0f} images/s)"
        + (f", {lost:.0%} lost" if lost >= 0.005 else "")
    )


def _why(outcomes: Mapping[str, Outcome], goal: Goal) -> str:
    outcome = outcomes.get(goal.step)
    if outcome is None or outcome.content is None:
        return outcome.note if outcome else "no such step"
    return "; ".join(_reasons(_result(outcome.content), goal)) or "no such loader"


def _reasons(result: Result, goal: Goal) -> Iterable[str]:
    return (reason for name, reason in result.skipped.items() if name.split()[0] in goal.backends)


def _range(value: Estimate) -> str:
    return f"{value.median:.3f} ({value.low:.3f} to {value.high:.3f})"


def _percent(ratio: Estimate | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} of its rate"
