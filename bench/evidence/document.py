"""The run as one HTML page and as the Markdown tables that the README takes: the answer first."""

from collections.abc import Mapping, Sequence
from html import escape

from bench.evidence import findings
from bench.evidence.runner import Outcome
from bench.evidence.steps import Step
from bench.report import charts, skeleton
from bench.report import table as report
from precache.console import page

SMOKE_NOTE = (
    "This is a trial run on a CPU with few pictures and emulated trainers in the place of ResNet-50 and "
    "ViT-S/16: no figure here says anything about a GPU."
)
_TITLE = "Does the GPU wait for data?"


def sentences(steps: Sequence[Step], outcomes: Mapping[str, Outcome], smoke: bool) -> list[str]:
    """What one wants to know first: the answer, then what is wrong, then what is missing."""
    wrong = [line for step in steps for line in findings.section(step, outcomes[step.name]).wrong]
    missing = [step.name for step in steps if outcomes[step.name].content is None]
    return [
        *([SMOKE_NOTE] if smoke else []),
        *findings.answer(outcomes),
        *(f"Wrong: {line}." for line in wrong),
        *([f"Not measured: {', '.join(missing)}."] if missing else []),
    ]


def html(
    steps: Sequence[Step], outcomes: Mapping[str, Outcome], machine: Mapping[str, str], smoke: bool
) -> str:
    """The page."""
    parts = [
        f"<h1>{_TITLE}</h1>",
        f'<section class="verdict">{page.paragraphs(sentences(steps, outcomes, smoke))}</section>',
        "<h2>Goals</h2>",
        page.table(findings.GOAL_TITLES, findings.goal_lines(outcomes, smoke)),
    ]
    for step in steps:
        found = findings.section(step, outcomes[step.name])
        parts.append(f'<h2 id="{step.name}">{escape(step.answers)}</h2>')
        parts.append(page.paragraphs(found.sentences))
        if found.rows:
            title = "Images/s, and the share of the trainer's own rate"
            parts.append(skeleton.draw({title: charts.fed(found.rows)}, step.name))
        if found.lines:
            parts.append(page.table(found.titles, found.lines))
        if found.conditions:
            parts.append(f'<p class="note">{escape(found.conditions)}</p>')
    parts.append(f"<h2>Machine and versions</h2>{page.facts(machine)}")
    return skeleton.document(_TITLE, "".join(parts))


def markdown(
    steps: Sequence[Step], outcomes: Mapping[str, Outcome], machine: Mapping[str, str], smoke: bool
) -> str:
    """The tables, each under the question that it answers."""
    blocks = [
        f"# {_TITLE}",
        *sentences(steps, outcomes, smoke),
        report.markdown_table(findings.GOAL_TITLES, findings.goal_lines(outcomes, smoke)),
    ]
    for step in steps:
        found = findings.section(step, outcomes[step.name])
        blocks += [f"## {step.answers}", *found.sentences]
        if found.lines:
            blocks.append(report.markdown_table(found.titles, found.lines))
        if found.conditions:
            blocks.append(found.conditions)
    blocks.append(f"{findings.machine_words(machine)}.")
    return "\n\n".join(blocks) + "\n"
