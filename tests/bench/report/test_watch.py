"""Result of `bench watch`: its sentences, and the same result made again from its file."""

from collections.abc import Sequence
from typing import Any

import pytest

from bench.report.result import Result, format_document, parse_document
from bench.report.waiting import Event, WaitCause, find_streams
from bench.report.watch import make_result, stream_to_trial
from tests.bench.report.test_waiting import FakeScript, training

MACHINE = {"cpu": "a CPU", "memory": "1 GiB", "accelerator": "none", "date": "2026-01-01"}
SETTINGS: dict[str, Any] = {
    "script": ["train.py"],
    "exit_code": 0,
    "ended": True,
    "interrupted": False,
    "batches": 40,
    "fault": "",
    "build": "In place of the DataLoader:\n    loaders.build('photos')",
    "cpus": 4,
    "script_cpu_share": 0.2,
    "other_cpu_share": 0.0,
    "quota_cpus": None,
    "throttled_share": None,
}
WAITING = [(0.3, 0.1)] * 40


def result_of(processes: Sequence[Sequence[Event]], price: float | None = None, **settings: Any) -> Result:
    streams = find_streams(processes)
    trials = [stream_to_trial(position, stream) for position, stream in enumerate(streams)]
    return make_result(MACHINE, {**SETTINGS, **settings}, trials, price)


def text_of(result: Result) -> str:
    return " ".join(sentence for paragraph in result.answer for sentence in paragraph)


def test_result_can_be_made_again_from_its_file() -> None:
    result = result_of([training(WAITING).events])
    document = parse_document(format_document(result.to_json()).encode(), "watch.json")
    again = make_result(document.machine, document.settings, document.trials)
    assert format_document(again.to_json()) == format_document(result.to_json())
    workers = next(row for row in again.rows if row.key.get("change") == "workers")
    assert workers.paste[0].startswith("Give num_workers=")
    assert again.next_step == SETTINGS["build"]


def test_slowest_rank_is_named_with_the_cost_of_all_ranks() -> None:
    shares = (0.3, 0.9, 0.2)
    ranks = [training([(wait, 1 - wait)] * 20, rank=str(rank)).events for rank, wait in enumerate(shares)]
    text = text_of(result_of(ranks, price=1.0))
    assert "rank 1, the slowest of 3," in text
    assert "$2.70" in text


@pytest.mark.parametrize(
    ("times", "settings", "expected"),
    [
        ([(0.0005, 0.1)] * 30, {}, "Change nothing"),
        (WAITING, {"other_cpu_share": 0.5}, "Other processes took 50% of the CPUs"),
        (
            WAITING,
            {"other_cpu_share": 0.5},
            "first change to try is below, untested: beside so much other work",
        ),
        (WAITING, {}, "It waits most for decoding by Pillow, which takes 67% of a sample."),
        (WAITING, {}, "decoding by Pillow 67%, reading files 17%, RandomResizedCrop 17%."),
        (WAITING, {"exit_code": 1, "ended": False}, "ended with exit code 1 after 40 batches"),
        (WAITING[:9], {}, "Too few batches"),
    ],
)
def test_answer_says_what_follows_from_the_run(times: Any, settings: dict[str, Any], expected: str) -> None:
    assert expected in text_of(result_of([training(times).events], **settings))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.001, "explains 11% of the wait. Most likely threads"),
        (0.009, "It waits most for Resize, which takes 100% of a sample. Loading a sample"),
    ],
)
def test_parts_are_the_cause_only_of_a_wait_that_they_explain(seconds: float, expected: str) -> None:
    script = training(WAITING)
    script.events[-1] = {
        **script.events[-1],
        "parts": [{"stage": "transform", "name": "Resize", "seconds": seconds}],
    }
    assert expected in text_of(result_of([script.events]))


def test_nothing_is_concluded_from_a_crash() -> None:
    result = result_of([training(WAITING).events], exit_code=1, ended=False)
    assert len(result.answer) == 1
    assert [row.key["stream"] for row in result.rows] == ["training"]


def test_crash_before_the_first_batch_is_reported() -> None:
    result = result_of([], exit_code=3, ended=False, batches=0)
    assert text_of(result) == "The script ended with exit code 3 before it asked for a batch."


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("script_cpu_share", [None, 0.99])
@pytest.mark.parametrize("other_cpu_share", [None, 0.0, 0.8])
@pytest.mark.parametrize("stage", [*WaitCause][:6])
@pytest.mark.parametrize("wait_s", [0.1, 0.9])
def test_script_that_waits_is_told_what_to_try_first(
    trains: bool,
    script_cpu_share: float | None,
    other_cpu_share: float | None,
    stage: WaitCause,
    wait_s: float,
) -> None:
    script = FakeScript(workers=2)
    number = script.loader()
    script.epoch(number, [(wait_s, 0.1)] * 40, trains=trains)
    script.time_parts(number)
    script.events[-1] = {**script.events[-1], "parts": [{"stage": stage, "name": "Crop", "seconds": 1.0}]}
    result = result_of(
        [script.events], script_cpu_share=script_cpu_share, other_cpu_share=other_cpu_share, cpus=2
    )
    changes = [row for row in result.rows if "change" in row.key]
    assert changes or "Try first, untested: " in text_of(result)
    assert "No change is advised" not in text_of(result)
