"""How much a training waits, for what, and what would help: from the events of its processes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report.stats import Estimate
from bench.report.waiting import (
    TRAINING,
    VALIDATION,
    Event,
    Replaced,
    Stream,
    compared,
    find_cures,
    find_streams,
    sentences,
    stage,
)

PARTS = {"decode": 4e-3, "python": 1e-3, "read": 1e-3}
IMAGES = 32
ANY_TIME = settings(deadline=None, max_examples=60)  # a busy machine is no bug


def process(
    *streams: tuple[int, Sequence[tuple[float, float]]],
    rank: int | None = None,
    epochs: int = 1,
    start_s: float = 0.0,
    **info: Any,
) -> list[Event]:
    """Events of streams, each (id, (wait, step) of each batch), that are iterated one after the other in each
    epoch; of the first an optimizer steps. Making an iterator takes `start_s`."""
    now, done = 100.0, 0
    told = {"kind": "DataLoader", "where": "train.py:7", "dataset": "ImageFolder", "workers": 0, "side": 64}
    events: list[Event] = [["process", 1, {"RANK": "" if rank is None else str(rank)}]]
    for number, _ in streams:
        events.append(["stream", number, {**told, "key": f"key {number}", **info}])
    for _ in range(epochs):
        for number, batches in streams:
            events.append(["epoch", number, now, now + start_s])
            now += start_s
            for wait_s, step_s in batches:
                events.append(["batch", number, now, now + wait_s, done, IMAGES])
                now += wait_s + step_s
                done += number == 0
            events.append(["end", number, now, now, done])
    events.append(["probe", 0, {"parts": PARTS, "quartiles": [5e-3, 7e-3]}])
    return events


seconds = st.floats(1e-3, 1.0)
batches = st.lists(st.tuples(seconds, seconds), min_size=12, max_size=40)


@ANY_TIME
@given(batches, st.integers(0, 8), st.integers(1, 3))
def test_the_share_is_what_was_waited_of_what_was_counted(
    times: list[tuple[float, float]], workers: int, epochs: int
) -> None:
    found = find_streams([process((0, times), workers=workers, prefetch=2, epochs=epochs)])[0]
    counted = (times * epochs)[max(3, 2 * workers) :]
    if len(counted) < 4:
        counted = (times * epochs)[1:]
    total_s = sum(wait_s + step_s for wait_s, step_s in counted)
    assert found.batches == len(counted)
    assert found.share.median == pytest.approx(sum(wait_s for wait_s, _ in counted) / total_s)
    assert found.images_per_s == pytest.approx(IMAGES * len(counted) / total_s)


@ANY_TIME
@given(batches, batches, st.booleans())
def test_validation_is_told_from_training_and_takes_nothing_from_its_share(
    train: list[tuple[float, float]], val: list[tuple[float, float]], swapped: bool
) -> None:
    alone = find_streams([process((0, train), epochs=2)])[0]
    both = find_streams([process(*([(1, val), (0, train)] if swapped else [(0, train), (1, val)]), epochs=2)])
    assert [stream.role for stream in both] == [TRAINING, VALIDATION]
    assert both[0].share.median == pytest.approx(alone.share.median)
    assert both[0].step_s == pytest.approx(alone.step_s)


def test_the_slowest_rank_is_named_and_comes_first() -> None:
    shares = (0.3, 0.9, 0.2)
    ranks = [process((0, [(wait, 1 - wait)] * 20), rank=rank) for rank, wait in enumerate(shares)]
    found = find_streams(ranks)
    assert found[0].rank == 1
    text = " ".join(sentences(found[0], found, gpu_price=1.0))
    assert "rank 1, the slowest of 3," in text
    assert "$2.70" in text


def test_what_keeps_up_is_left_alone_and_a_device_waits_less_than_its_host() -> None:
    (keeping,) = find_streams([process((0, [(0.0005, 0.1)] * 30), workers=2, prefetch=2)])
    assert "Change nothing" in sentences(keeping, [keeping])[-1]
    assert find_cures(keeping, cpus=8, busy=0.1) == []
    events = process((0, [(0.09, 0.01)] * 40))  # the host waits for the data, the device still computes
    (computing,) = find_streams([[*events, *(["idle", 0, number, 0.02] for number in range(40))]])
    assert computing.share.median == pytest.approx(0.2)


def waiting_stream(workers: int = 0, **changes: Any) -> Stream:
    return replace(find_streams([process((0, [(0.3, 0.1)] * 40), workers=workers)])[0], **changes)


def test_the_stage_is_the_longest_part_or_the_start_of_epochs() -> None:
    assert stage(waiting_stream()) == "decode"
    assert stage(waiting_stream(parts={"read": 2.0, "decode": 1.0})) == "read"
    each = [(0.0, 0.1)] * 20
    restarting = find_streams([process((0, each), epochs=4, start_s=3.0, workers=2, prefetch=2)])[0]
    assert stage(restarting) == "workers"
    cure = find_cures(restarting, cpus=2, busy=0.5)[0]
    assert (cure.name, cure.keywords) == ("persistent_workers", {"persistent_workers": True})


@ANY_TIME
@given(st.integers(0, 8), st.integers(1, 32), st.floats(0.0, 1.0))
def test_workers_are_asked_for_only_where_cpus_have_time(workers: int, cpus: int, busy: float) -> None:
    stream = waiting_stream(workers=workers)
    for cure in find_cures(stream, cpus=cpus, busy=busy):
        assert stream.images_per_s < cure.images_per_s.median <= IMAGES / stream.step_s * 1.0001
        if cure.name == "workers":
            assert cure.keywords is not None
            assert workers < cure.keywords["num_workers"] <= cpus
            assert cure.images_per_s.median <= stream.images_per_s / max(busy, 1e-9) * 1.0001
            assert "train.py:7" in cure.write
    assert not find_cures(stream, cpus=cpus, busy=1.0)


def test_another_data_set_is_predicted_from_what_its_samples_take() -> None:
    half = Replaced("shards", Estimate(0.5, 0.45, 0.55), None, "write", "1 GB")
    whole = Replaced("build", Estimate(1, 1, 1), Estimate(9e9, 9e9, 9e9), "write")
    alone = waiting_stream()
    found = {cure.name: cure for cure in find_cures(alone, cpus=1, busy=1.0, replaced=[half, whole])}
    assert found["shards"].images_per_s.median == pytest.approx(IMAGES / (0.1 + 0.15))
    assert found["build"].images_per_s.median == pytest.approx(IMAGES / 0.1)
    assert "2.00 times as many" in compared(found["shards"], alone, waiting_stream(period_s=0.2))
