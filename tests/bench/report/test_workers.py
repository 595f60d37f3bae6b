from dataclasses import replace

import pytest
from bench.report.workers import ALL_BUSY, busy_cores, more_can_help, without_former_advice

from bench.report import loaders_page as page
from bench.report.batch_times import analyse
from tests.bench.rich_result import altered, rich_result, waiting_row


@pytest.mark.parametrize(
    ("workers", "cpus", "cpu_share", "helps"),
    [(2, 4, 0.6, True), (2, 4, None, True), (2, 4, 0.97, False), (4, 4, 0.6, False), (0, 4, 0.6, False)],
)
def test_another_worker_needs_a_cpu_that_has_time(
    workers: int, cpus: int, cpu_share: float | None, helps: bool
) -> None:
    assert more_can_help(workers, cpus, cpu_share) == helps


def test_busy_cores_are_said_where_no_worker_would_find_one() -> None:
    assert busy_cores(0.9) is None
    said = busy_cores(0.97)
    assert said is not None
    assert said.startswith(ALL_BUSY)
    assert "more workers will not help" in said


def test_batch_times_say_what_was_and_not_whether_more_workers_would_help() -> None:
    waits = [0.0005, 0.0005, 0.0005, 0.1] * 30
    (sentence,) = analyse(waits, [0.01] * 120, [], 4).explanation
    assert "the loader cannot keep up" in sentence
    assert "more workers" not in sentence


def test_no_page_says_that_more_workers_would_help_and_that_they_will_not() -> None:
    """Not even that of a file from when both were said."""
    flag = busy_cores(0.99)
    row = waiting_row()
    former = "They begin anew, so the loader cannot keep up; more workers or less work per sample would help."
    spikes = {**row.to_json()["spikes"], "explanation": [former]}
    monitor = {**row.to_json()["monitor"], "flags": [flag]}
    rich = rich_result()
    text = page.html(replace(rich, rows=(altered(row, spikes=spikes, monitor=monitor),)))
    shown = text.partition("</script></head>")[2].partition("Everything as JSON")[0]
    assert "more workers will not help" in shown
    assert "more workers or less work per sample would help" not in shown
    assert without_former_advice([former]) == ["They begin anew, so the loader cannot keep up."]
