import json
import re
from typing import Any

import pytest

from bench.evidence import document, findings
from bench.evidence.runner import NOT_YET, Outcome
from bench.evidence.steps import STEPS, Step
from bench.report.result import Result, Row
from bench.report.stats import Estimate
from tests.bench.rich_result import altered, around, rich_result, row

MACHINE = {"date": "2026-11-22", "cpu": "16 CPUs", "memory": "128 GiB", "accelerator": "NVIDIA H200"}
MISSING = dict.fromkeys((step.name for step in STEPS), NOT_YET)


def step(name: str) -> Step:
    (found,) = (step for step in STEPS if step.name == name)
    return found


def fed(backend: str, share: float, spread: float = 0.005) -> Row:
    """A row of a trainer of 2,480 images/s that reached `share` of that."""
    ratio = Estimate(share, share - spread, share + spread)
    return altered(row(backend, "shards", 9000), together=around(2480 * share), ratio=ratio)


def measured(*rows: Row, skipped: dict[str, str] | None = None, **settings: Any) -> Outcome:
    whole = rich_result()
    result = Result(MACHINE, {**whole.settings, **settings}, rows, skipped or {})
    return Outcome(json.loads(json.dumps(result.to_json())), "measured in 1 s")


def goals(**outcomes: Outcome) -> dict[str, tuple[str, ...]]:
    """The lines of the goals by the step that they are about."""
    named = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}
    lines = findings.goal_lines({**MISSING, **named})
    return {goal.step: line for goal, line in zip(findings.GOALS, lines, strict=True)}


def test_the_answer_names_the_best_loader_its_ratio_and_who_waits() -> None:
    lines = findings.answer(
        {**MISSING, "resnet50": measured(fed("shards", 0.99), fed("synthetic", 1.0), fed("pytorch", 0.5))}
    )
    assert lines[0] == (
        "The GPU need not wait: with shards on shards, emulated:2480 runs at 0.990 (0.985 to 0.995) of its "
        "own rate (2,455 of 2,480 images/s), 1% lost."
    )
    assert lines[1] == "It waits with pytorch on shards (0.50 of its rate)."


@pytest.mark.parametrize(
    ("share", "spread", "begin"),
    [
        (0.9, 0.01, "The GPU waits with every loader: "),
        (0.97, 0.02, "Whether the GPU waits cannot be told from noise: "),
        (0.985, 0.02, "The GPU need not wait: "),
    ],
)
def test_the_answer_follows_the_verdict(share: float, spread: float, begin: str) -> None:
    (first, *_) = findings.answer({**MISSING, "photos": measured(fed("nvjpeg", share, spread))})
    assert first.startswith(begin)


def test_nothing_is_answered_where_nothing_was_measured() -> None:
    assert findings.answer(MISSING) == [
        "Whether the GPU waits is not known: no loader was measured with ResNet-50."
    ]


def test_goals_stand_beside_what_was_measured() -> None:
    found = goals(
        resnet50=measured(fed("shards", 0.981), fed("synthetic", 0.5)),
        resnet50_device=measured(fed("shards", 0.985), cache="device"),
        photos=measured(fed("nvjpeg", 0.7), fed("dali", 0.93), fed("pytorch", 0.99)),
    )
    assert found["resnet50"][1:] == ("0.98", "0.981 (0.976 to 0.986)", "shards on shards", "reached")
    assert found["resnet50-device"][2:] == (
        "0.985 (0.980 to 0.990)",
        "shards on shards, cache device",
        "missed",
    )
    assert found["photos"][3:] == ("dali on shards", "reached")  # another decoder is no goal


def test_a_goal_that_was_not_measured_says_why() -> None:
    reasons = {"dali on x": "DALI is missing", "nvjpeg on x": "no decoder", "shards on x": "else"}
    found = goals(photos=measured(fed("pytorch", 0.9), skipped=reasons))
    assert found["photos"][4] == "not measured: DALI is missing; no decoder"
    assert found["resnet50"][4] == "not measured: not measured yet"


def test_a_loader_that_makes_the_trainer_faster_is_doubted() -> None:
    fast = measured(fed("shards", 1.2))
    assert goals(resnet50=fast)["resnet50"][4].startswith("doubtful")
    lines = findings.answer({**MISSING, "resnet50": fast, "photos": measured(fed("dali", 0.9))})
    assert lines[0].startswith("The GPU waits with every loader: with dali")
    assert any(line.startswith("Doubtful: with shards on shards") for line in lines)


def test_a_smoke_run_reaches_no_goal() -> None:
    lines = findings.goal_lines({**MISSING, "resnet50": measured(fed("shards", 1.0))}, smoke=True)
    assert lines[0][-1] == "trial run"


def checks(*found: dict[str, Any]) -> Outcome:
    return Outcome({"machine": MACHINE, "checks": list(found)}, "")


def test_a_race_is_wrong_and_a_loader_that_cannot_run_is_not() -> None:
    section = findings.section(
        step("races"),
        checks(
            {"loader": "shards", "kind": "uint8", "batches": 16, "differ": 0},
            {"loader": "nvjpeg", "kind": "uint8", "batches": 16, "differ": 3, "differ idle": 2},
            {"loader": "dali", "kind": "uint8", "skipped": "it is missing"},
            {"loader": "pytorch", "kind": "uint8", "error": "CUDA error"},
        ),
    )
    assert [line[2] for line in section.lines] == [
        "0 of 16 batches differ",
        "3 of 16 batches differ; so do 2 of two runs that nothing stalls",
        "not measured: it is missing",
        "failed: CUDA error",
    ]
    assert [line.split(",")[0] for line in section.wrong] == ["nvjpeg", "pytorch"]


def test_memory_that_grows_is_wrong() -> None:
    flat = {"loader": "shards", "bytes": [1 << 30, 2 << 30, 2 << 30], "flat": True}
    section = findings.section(step("memory"), checks(flat, {**flat, "loader": "dali", "flat": False}))
    assert section.lines[0] == ("shards", "flat", "1,024, 2,048, 2,048")
    assert section.wrong == ["memory of dali: grows"]


def test_tests_that_fail_or_do_not_run_on_a_gpu_are_wrong() -> None:
    content = {"machine": MACHINE, "passed": 3, "failed": {"a::b": "1 != 2"}, "skipped": {"c": "x", "d": "x"}}
    section = findings.section(step("tests"), Outcome(content, ""))
    assert section.lines == [("3", "1", "2")]
    assert section.wrong == ["a::b fails: 1 != 2"]
    assert "2 skipped: x." in section.sentences
    none = {**content, "passed": 0, "failed": {}}
    assert findings.section(step("tests"), Outcome(none, "")).wrong == ["no test that needs a GPU passed"]


def test_the_page_and_the_tables_begin_with_the_answer() -> None:
    outcomes = {**MISSING, "resnet50": measured(fed("shards", 0.99))}
    for text in (
        document.html(STEPS, outcomes, MACHINE, smoke=False),
        document.markdown(STEPS, outcomes, MACHINE, smoke=False),
    ):
        words = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
        order = [
            "Does the GPU wait",
            "The GPU need not wait",
            "Not measured: facts, races",
            "reached",
            "NVIDIA H200",
        ]
        places = [words.index(part) for part in order]
        assert places == sorted(places)
        for each in STEPS:
            assert each.answers in words
    assert 'class="js-plotly' in text or "| shards | shards |" in text


def test_a_smoke_run_says_so_first() -> None:
    lines = document.sentences(STEPS, MISSING, smoke=True)
    assert lines[0] == document.SMOKE_NOTE
