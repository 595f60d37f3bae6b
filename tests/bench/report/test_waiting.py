"""Analysis of a training from the events of its processes: waits, stages, and changes that would help."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report.change import Basis, Change, ChangeKind
from bench.report.stats import is_disturbed
from bench.report.waiting import (
    FEWEST,
    MAX_WORKERS_PER_CPU,
    TRAINING,
    VALIDATION,
    Event,
    Machine,
    SamplePart,
    Stream,
    find_changes,
    find_streams,
    longest_stage,
    make_parts,
    warm_up,
)

PARTS = [
    {"stage": "read", "name": "", "seconds": 1e-3},
    {"stage": "decode", "name": "Pillow", "seconds": 4e-3},
    {"stage": "transform", "name": "RandomResizedCrop", "seconds": 1e-3},
]
IMAGES = 32
ANY_TIME = settings(deadline=None, max_examples=60)  # a busy machine is no bug
QUIET = Machine(cpus=8, script_cpu_share=0.2, other_cpu_share=0.0)
Times = Sequence[tuple[float, float]]


class FakeScript:
    """Script that makes the events that the hook would write, on a clock of its own."""

    def __init__(self, rank: str = "", **info: Any) -> None:
        self.now, self.steps, self.numbers = 100.0, 0, 0
        self.events: list[Event] = [{"event": "process", "pid": 1, "rank": rank}]
        self.info = {
            "kind": "DataLoader",
            "libraries": [],
            "choice": "",
            "dataset": "ImageFolder",
            "root": "photos",
            "build": {"reason": "it is a test"},
            "workers": 0,
            "prefetch": 2,
            "start": "fork",
            "python": "python",
            **info,
        }

    def loader(self, key: str = "train.py:7") -> int:
        """Iterate a loader for the first time."""
        number, self.numbers = self.numbers, self.numbers + 1
        self.events.append({"event": "made", "where": key})
        self.events.append({"event": "stream", "stream": number, "key": key, "where": key, **self.info})
        self.events.append({"event": "described", "stream": number, "side": 64, "bytes": 1, "kinds": []})
        return number

    def begin(self, number: int, making_s: float = 0.0) -> None:
        """Make an iterator."""
        begin_s, self.now = self.now, self.now + making_s
        times = {"begin_s": begin_s, "begin_cpu_s": begin_s, "end_s": self.now}
        self.events.append({"event": "epoch", "stream": number, **times})

    def batch(
        self, number: int, wait_s: float, step_s: float, *, trains: bool = True, served: str = "usual"
    ) -> None:
        """Wait for a batch, and compute on it with one CPU."""
        asked_s, got_s = self.now, self.now + wait_s
        self.events.append(
            {
                "event": "batch",
                "stream": number,
                "asked_s": asked_s,
                "got_s": got_s,
                "asked_cpu_s": asked_s,
                "got_cpu_s": got_s,
                "steps": self.steps,
                "images": IMAGES,
                "served": served,
            }
        )
        self.now = got_s + step_s
        if trains:
            self.steps += 1

    def end(self, number: int) -> None:
        """Find that there is no further batch."""
        times = {"asked_s": self.now, "asked_cpu_s": self.now, "got_s": self.now}
        self.events.append({"event": "end", "stream": number, "steps": self.steps, **times})

    def epoch(self, number: int, times: Times, *, trains: bool = True, making_s: float = 0.0) -> None:
        """Iterate all batches of an epoch."""
        self.begin(number, making_s)
        for wait_s, step_s in times:
            self.batch(number, wait_s, step_s, trains=trains)
        self.end(number)

    def time_parts(self, number: int) -> None:
        """Time the parts of a sample."""
        self.events.append({"event": "parts", "stream": number, "parts": PARTS})


def training(
    times: Times, *, epochs: int = 1, making_s: float = 0.0, rank: str = "", **info: Any
) -> FakeScript:
    script = FakeScript(rank, **info)
    number = script.loader()
    for _ in range(epochs):
        script.epoch(number, times, making_s=making_s)
    script.time_parts(number)
    return script


def test_batches_that_workers_read_ahead_of_the_first_step_are_warm_up() -> None:
    assert warm_up({"workers": 4, "prefetch": 2}) == 8


def test_first_batches_are_warm_up_without_workers_too() -> None:
    assert warm_up({"workers": 0, "prefetch": 2}) == warm_up({}) == 3


seconds = st.floats(1e-3, 1.0)
batches = st.lists(st.tuples(seconds, seconds), min_size=20, max_size=40)


@ANY_TIME
@given(batches, st.integers(0, 8), st.integers(1, 3))
def test_share_is_the_wait_over_the_time_of_counted_batches(times: Times, workers: int, epochs: int) -> None:
    script = training(times, workers=workers, epochs=epochs)
    (stream,) = find_streams([script.events])
    all_times = list(times) * epochs
    steady_times = all_times[warm_up(script.info) :]
    total_s = sum(wait_s + step_s for wait_s, step_s in steady_times)
    assert stream.batches == len(steady_times)
    assert stream.wait_share.median == pytest.approx(sum(wait_s for wait_s, _ in steady_times) / total_s)
    assert stream.images_per_s == pytest.approx(IMAGES * len(steady_times) / total_s)


@ANY_TIME
@given(batches, batches, st.booleans())
def test_validation_is_a_stream_of_its_own_and_leaves_training_as_it_is(
    train: Times, val: Times, first: bool
) -> None:
    (alone,) = find_streams([training(train, epochs=2).events])
    script = FakeScript()
    train_loader = script.loader()
    for _ in range(2):
        if not first:
            script.epoch(train_loader, train)
        script.epoch(script.loader("val.py:1"), val, trains=False)  # a loader for each evaluation
        if first:
            script.epoch(train_loader, train)
    both = find_streams([script.events])
    assert [stream.role for stream in both] == [TRAINING, VALIDATION]
    assert both[0].wait_share.median == pytest.approx(alone.wait_share.median)
    assert both[0].step_s == pytest.approx(alone.step_s)
    assert both[1].batches == len(val) + len(val) - warm_up(script.info)  # in two evaluations


def test_training_may_make_a_new_iterator_for_each_batch() -> None:
    script = FakeScript()
    number = script.loader()
    for _ in range(20):
        script.begin(number)
        script.batch(number, 0.3, 0.1)
    (stream,) = find_streams([script.events])
    assert stream.role == TRAINING
    assert stream.wait_share.median == pytest.approx(0.75)


@pytest.mark.parametrize("epochs", [1, 2])
def test_loaders_of_one_line_are_counted(epochs: int) -> None:
    script = FakeScript()
    for _ in range(epochs):
        script.epoch(script.loader(), [(0.1, 0.1)] * 20)
    script.events.append({"event": "made", "where": "train.py:7"})  # and never iterated
    (stream,) = find_streams([script.events])
    assert (stream.made, stream.remade) == (epochs + 1, epochs > 1)


def test_waits_for_several_loaders_of_a_step_are_added_up() -> None:
    script = FakeScript()
    labelled, unlabelled = script.loader(), script.loader()
    script.begin(labelled)
    script.begin(unlabelled)
    for _ in range(20):
        script.batch(labelled, 0.1, 0.0, trains=False)
        script.batch(unlabelled, 0.3, 0.6)
    streams = find_streams([script.events])
    assert [stream.role for stream in streams] == [TRAINING, TRAINING]
    for stream in streams:
        assert stream.all_wait_share.median == pytest.approx(0.4)
        assert stream.images_per_s == pytest.approx(2 * IMAGES)
    assert streams[0].wait_share.median == pytest.approx(0.3)


def test_loader_that_keeps_up_gets_no_advice() -> None:
    (stream,) = find_streams([training([(0.0005, 0.1)] * 30, workers=2).events])
    assert find_changes(stream, [stream], QUIET) == []


def test_wait_on_a_device_is_its_idle_time() -> None:
    script = training([(0.09, 0.01)] * 40)  # the host waits for the data, the device still computes
    idle = [{"event": "idle", "stream": 0, "batch": number, "seconds": 0.02} for number in range(40)]
    (stream,) = find_streams([[*script.events, *idle]])
    assert stream.wait_share.median == pytest.approx(0.2)


def waiting_stream(workers: int = 0, **changes: Any) -> Stream:
    """Make a stream that waits for decoding, if nothing is changed."""
    (stream,) = find_streams([training([(0.3, 0.1)] * 40, workers=workers).events])
    return replace(stream, **{"parts": parts(decode=0.4 * max(1, workers) / IMAGES), **changes})


def parts(**seconds: float) -> tuple[SamplePart, ...]:
    return make_parts((stage, "", value) for stage, value in seconds.items())


def find_change(kind: str, stream: Stream, machine: Machine) -> Change:
    changes = {change.kind: change for change in find_changes(stream, [stream], machine)}
    return changes[ChangeKind(kind)]


def stage_of(stream: Stream, machine: Machine = QUIET) -> str:
    stage = longest_stage(stream, [stream], machine)
    return "" if stage is None else stage.value


def test_longest_stage_is_the_longest_part() -> None:
    assert stage_of(waiting_stream()) == "decode"
    assert stage_of(waiting_stream(parts=parts(read=2.0, decode=1.0))) == "read"


def test_longest_stage_is_unknown_where_samples_were_not_timed() -> None:
    assert stage_of(waiting_stream(parts=())) == ""


FAST = parts(decode=0.01 / IMAGES)  # seconds of a sample: 0.01 of the 0.3 or more that a batch is waited for
BUSY = replace(QUIET, other_cpu_share=0.8)
SPINNING = {"process_cpu_s": 0.7, "step_cpu_s": 0.1}  # 0.6 CPU seconds for a batch
SLEEPING = {"process_cpu_s": 0.11, "step_cpu_s": 0.1}


@pytest.mark.parametrize(
    ("workers", "changes", "machine", "stage"),
    [
        # threads of OpenMP in the training's own process, or in workers
        (0, {"parts": FAST, **SPINNING}, BUSY, "threads"),
        (0, {"parts": FAST, **SPINNING}, QUIET, "threads"),
        (2, {"parts": FAST, **SLEEPING}, Machine(2, 0.9, 0.0), "threads"),
        # other programs
        (0, {"parts": FAST, **SLEEPING}, BUSY, "others"),
        (1, {"parts": FAST, **SLEEPING}, replace(BUSY, script_cpu_share=0.04), "others"),
        (16, {"parts": FAST, **SLEEPING}, replace(BUSY, script_cpu_share=0.04), "others"),
        # a sampler that sleeps, a disk that is slow at first
        (0, {"parts": FAST, **SLEEPING}, QUIET, "unseen"),
        (
            2,
            {"parts": parts(read=0.01 / IMAGES), **SLEEPING},
            replace(QUIET, script_cpu_share=0.04),
            "unseen",
        ),
        # what the parts explain
        (0, {"parts": parts(decode=0.2 / IMAGES), **SLEEPING}, BUSY, "decode"),
        (16, {"parts": parts(decode=0.7 / IMAGES), **SLEEPING}, Machine(2, 1.0, 0.0), "decode"),
        (2, {"parts": parts(read=0.5 / IMAGES), **SLEEPING}, QUIET, "read"),
    ],
)
def test_part_is_the_stage_only_where_parts_explain_the_wait(
    workers: int, changes: dict[str, Any], machine: Machine, stage: str
) -> None:
    assert stage_of(waiting_stream(workers, **changes), machine) == stage


@ANY_TIME
@given(st.integers(0, 8), st.integers(1, 4), st.floats(0.15, 1.0), st.floats(0.0, 0.3), st.floats(1e-5, 0.02))
def test_beside_other_work_no_more_workers_than_cpus_compute(
    workers: int, cpus: int, other_cpu_share: float, script_cpu_share: float, sample_s: float
) -> None:
    stream = waiting_stream(workers, parts=parts(python=sample_s), **SLEEPING)
    for change in find_changes(stream, [stream], Machine(cpus, script_cpu_share, other_cpu_share)):
        assert change.arguments.get("num_workers", 0) <= cpus


@pytest.mark.parametrize(
    ("workers", "persistent", "stage"), [(0, False, "start"), (2, True, "start"), (2, False, "workers")]
)
def test_longest_stage_is_the_start_that_takes_half_of_the_wait(
    workers: int, persistent: bool, stage: str
) -> None:
    stream = waiting_stream(workers)
    stream = replace(stream, info={**stream.info, "persistent": persistent})
    half = stream.wait_share.median / 2
    assert stage_of(replace(stream, start_wait_share=1.01 * half)) == stage
    assert stage_of(replace(stream, start_wait_share=0.99 * half)) == "decode"


def test_only_persistent_workers_save_the_starts_of_epochs() -> None:
    script = training([(0.0, 0.1)] * 20, epochs=4, making_s=3.0, workers=1)
    (restarting,) = find_streams([script.events])
    assert stage_of(restarting) == "workers"
    changes = find_changes(restarting, [restarting], QUIET)
    assert [change.arguments for change in changes] == [{"persistent_workers": True}]


def test_held_batches_and_those_after_them_are_not_counted() -> None:
    script = FakeScript(workers=1)
    number = script.loader()
    script.begin(number)
    uncounted = warm_up(script.info)
    for _ in range(uncounted + 17):
        script.batch(number, 0.0, 0.4)
    for _ in range(4):
        script.batch(number, 5.0, 0.1, served="held")
    for _ in range(uncounted):
        script.batch(number, 2.0, 0.4)
    for _ in range(5):
        script.batch(number, 0.0, 0.4)
    (stream,) = find_streams([script.events])
    assert (stream.alone_s, stream.step_s) == (pytest.approx(0.1), pytest.approx(0.4))
    assert stream.wait_share.median == 0
    assert stream.batches == 17 + 5 - 1  # the last one has no end


@ANY_TIME
@given(
    st.integers(0, 8),
    st.integers(1, 32),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
    st.floats(0.01, 0.3),
)
def test_change_is_bounded_between_today_and_no_waiting_or_is_untested(
    workers: int, cpus: int, script_cpu_share: float, other_cpu_share: float, alone_s: float
) -> None:
    stream = waiting_stream(workers=workers, alone_s=alone_s if workers else 0.1)
    machine = Machine(cpus, script_cpu_share, other_cpu_share)
    changes = find_changes(stream, [stream], machine)
    if cpus > 8 and workers == 0:
        assert [change.kind for change in changes] == [ChangeKind.WORKERS]
    for change in changes:
        if change.basis == Basis.UNKNOWN:
            assert changes == [change]
        else:
            assert not is_disturbed(other_cpu_share)
            assert stream.images_per_s < change.images_per_s.low <= IMAGES / min(alone_s, stream.step_s)


@ANY_TIME
@given(st.integers(0, 3), st.integers(1, 32), st.floats(0.0, 0.2))
def test_advised_workers_are_more_than_today_and_limited_by_the_cpus(
    workers: int, cpus: int, script_cpu_share: float
) -> None:
    stream = waiting_stream(workers, alone_s=0.1, step_cpu_s=0.01, process_cpu_s=0.02)
    advised = find_change("workers", stream, Machine(cpus, script_cpu_share, 0.0)).arguments["num_workers"]
    assert workers < advised <= MAX_WORKERS_PER_CPU * cpus


def test_loading_shares_the_cpus_with_steps() -> None:
    stream = waiting_stream(step_cpu_s=0.1, process_cpu_s=0.4)  # the step keeps a CPU busy for 0.1 s
    machine = Machine(4, 0.4, 0.0)
    change = find_change("workers", stream, machine)
    workers = change.arguments["num_workers"]
    assert workers == 4  # each loads a batch in 0.3 s, with one CPU
    rate = IMAGES * 0.8  # steps may take longer when data comes otherwise
    assert change.images_per_s.low == pytest.approx(rate / (0.1 + 0.3 / workers / 4))
    beside_gpu = find_change("workers", replace(stream, step_cpu_s=0.0), machine)
    assert beside_gpu.images_per_s.low == pytest.approx(rate / 0.1)


@pytest.mark.parametrize(("cpus", "basis"), [(4, Basis.UNKNOWN), (8, Basis.BOUND)])
def test_nothing_is_predicted_where_workers_take_cpus_from_a_step(cpus: int, basis: Basis) -> None:
    stream = waiting_stream(step_cpu_s=0.3, process_cpu_s=0.6)  # three threads for 0.1 s
    change = find_change("workers", stream, Machine(cpus, 0.4, 0.0))
    assert change.basis == basis


def test_first_batch_of_an_epoch_is_not_read_ahead() -> None:
    times = [(0.3, 0.1)] * 40
    rates = []
    for epochs in (1, 2):
        (stream,) = find_streams([training(times, epochs=epochs).events])
        stream = replace(stream, step_cpu_s=0.0)
        rates.append(find_change("workers", stream, QUIET).images_per_s.low)
    assert rates[1] < rates[0]


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({}, BUSY),
        ({"parts": FAST, **SLEEPING}, QUIET),  # a sampler that sleeps
        ({"parts": ()}, QUIET),
    ],
)
def test_nothing_is_predicted_where_the_wait_is_not_explained(
    changes: dict[str, Any], machine: Machine
) -> None:
    stream = waiting_stream(**changes)
    (change,) = find_changes(stream, [stream], machine)
    assert (change.kind, change.basis) == (ChangeKind.WORKERS, Basis.UNKNOWN)
    assert change.images_per_s.low == 0


def test_pinned_memory_is_tried_where_nothing_is_predicted() -> None:
    # the CPUs have no time for more workers
    stream = waiting_stream(4, on_device=True, step_cpu_s=0.0, process_cpu_s=0.0)
    (change,) = find_changes(stream, [stream], Machine(4, 1.0, 0.0))
    assert (change.kind, change.basis) == (ChangeKind.PIN_MEMORY, Basis.UNKNOWN)


def test_reading_may_have_more_workers_than_cpus() -> None:
    stream = waiting_stream(process_cpu_s=0.11, step_cpu_s=0.1)  # 0.01 s of 0.3 s are computing
    change = find_change("workers", stream, Machine(1, 0.2, 0.0))
    assert change.arguments["num_workers"] == 4


def test_few_batches_or_a_prefetching_thread_get_no_advice() -> None:
    assert find_changes(waiting_stream(), [], QUIET)
    assert not find_changes(waiting_stream(batches=FEWEST - 1), [], QUIET)
    assert not find_changes(waiting_stream(ahead=True), [], QUIET)


def test_ranks_share_the_cpus() -> None:
    streams = find_streams([training([(0.3, 0.1)] * 40, rank=str(rank)).events for rank in range(4)])
    free = replace(streams[0], step_cpu_s=0.0)  # a GPU steps
    alone = find_changes(free, [free], Machine(4, 0.2, 0.0))
    together = find_changes(free, streams, Machine(4, 0.2, 0.0))
    assert [change.arguments["num_workers"] for change in (*alone, *together)] == [4, 1]
