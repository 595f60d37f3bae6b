"""Analysis of a training's own times: whether it waits for batches, for what, and what would help. Pure.

    event      JSON object that `bench.watch.hook` wrote in a process of the script; listed there
    stream     batches that one process iterates at one line of the script, epoch after epoch: of training,
               of validation, or of reading where no optimizer steps
    change     something to alter in the script, such as the number of workers, and what it brings at least

The wait of a batch is the time from asking for it to having it; the step is the time from there until the
next batch is asked for. So a loader that reads ahead of a slow step costs nothing. On CUDA the wait is the
time for which the device had nothing to do.

The effect of a change is predicted from three durations: `start`, the wait for starts of epochs, averaged
over all batches; `load`, loading a batch in one process; and `step`, the step of a batch while no worker is
busy. With some number of workers, the period from one batch to the next is at most

    start + max(step + (share of the CPUs that the step uses) * load / workers,
                load / workers,
                (CPU seconds of step and load) / CPUs)

as where no batch is loaded on those CPUs while they step. What else a change brings only makes it shorter:
workers that read ahead, steps that run on CPUs of their own. So the images/s that follow are a lower bound,
and how often it held in the lab is BOUNDS_HELD. Nothing is predicted where other processes use the CPUs,
where the wait is not explained by the parts of its samples, and where workers would take CPUs from a step
that computes on several: its threads wait for each other, so it slows down by more than the CPUs that it
loses.

The parts of a sample, timed alone, are compared with `load`. Where they explain less than half of it, no part
is what the training waits for, but CPUs that somebody else uses, or something that nobody has timed.
"""

import math
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

from bench.report.change import Basis, Change, ChangeKind
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, at_least, is_disturbed

Event: TypeAlias = Mapping[str, Any]
"""Event of `bench.watch.hook`."""
TRAINING, VALIDATION, READING = "training", "validation", "reading"
BOUNDS_HELD = (3, 3)
"""Bounds that held in the lab, and bounds that were tried; see bench/results/watch.md."""
FEWEST = 8
"""Fewest counted batches from which anything is concluded."""
MAX_WORKERS_PER_CPU = 8
"""Largest number of workers that is advised for each CPU of a rank."""
_WARM_UP = 3  # first batches of a process are not counted: it allocates, tunes and compiles
_MIN_TRAINED_SHARE = 0.02  # of batches, with a step after them: gradients may be accumulated over 50
_MAX_SECTIONS = 5  # sections of the watched time, over which ranges are taken
_MIN_SECTION_BATCHES = 4
_MIN_EXPLAINED_SHARE = 0.5  # of a wait, by its parts, below which none of them is called its cause
_MIN_BUSY_SHARE = 0.05  # of a wait, in unexplained CPU seconds, above which threads are busy
_MIN_HELD_STEPS = 2  # steps timed alone, below which they are not used
_MIN_THREADS = 1.2  # CPUs of a step above which several threads compute it
_MODEL_ERROR = 0.2  # share by which every period may be longer: steps change when data comes otherwise
_FIRST_LOADS = 2  # time of the first batch of an epoch, at most, in loads: workers begin, and share the CPUs
_WORKER_MARGIN = 1.25  # advised workers should load this many times faster than the training steps


class WaitCause(str, Enum):
    """What a training can wait for; the value is its name in files."""

    # parts of a sample, see `bench.watch.parts`
    READ = "read"
    DECODE = "decode"
    TRANSFORM = "transform"
    PYTHON = "python"
    COLLATE = "collate"
    COPY = "copy"
    # starts of epochs: the first batch, or workers that start anew
    START = "start"
    WORKERS = "workers"
    # where the parts do not explain the wait: CPUs that other processes use, or other threads of the script;
    # something that samples do not show when they are timed alone
    OTHERS = "others"
    THREADS = "threads"
    UNSEEN = "unseen"


UNEXPLAINED = (WaitCause.OTHERS, WaitCause.THREADS, WaitCause.UNSEEN)


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Part of a sample.

    Attributes:
        stage: stage of loading that it belongs to.
        name: library that decodes, or class or function that transforms; empty for other stages.
        seconds: seconds of a sample in one process.
    """

    stage: WaitCause
    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Figures of one stream, over its counted batches.

    Attributes:
        info: properties of its loader, from the events `stream`, `described` and (as `cpus`) `cpus`.
        made: number of loaders that the script has made at the line of this one.
        remade: whether the script makes a new loader for each epoch.
        role: TRAINING, VALIDATION, or READING where no optimizer steps.
        rank: rank of the process; None where it has none.
        batches: number of counted batches.
        images: images of a batch.
        period_s: seconds from batch to batch, the sum of `wait_s` and `step_s`.
        wait_s: seconds that a batch is waited for.
        step_s: seconds from having a batch until the next one is asked for.
        wait_share: share of the time that is waited; the range is over sections of the time.
        start_s: seconds that the first batch of a further epoch takes, with the end of the epoch before and
            the making of its iterator; 0 where there was none.
        usual_s: seconds that another batch is waited for.
        start_wait_share: share of the time that first batches of epochs take beyond `usual_s`.
        alone_s: seconds of a step when no worker is busy; None where that was not measured.
        step_cpu_s: CPU seconds of a step, timed alone if that was measured.
        process_cpu_s: CPU seconds of the script's own process from batch to batch.
        parts: parts of a sample, the longest first; empty where they could not be timed.
        waits_s, steps_s: wait and step of each batch, in seconds.
        starts: positions of the first batches of epochs.
        on_device: whether waits are the device's idle time.
        ahead: whether another thread than the training asks for the batches.
        loaders: number of loaders that each step takes batches from; `images` is the sum over them.
        all_wait_share: share of the time that is waited for any of these loaders.
        note: reason why the parts could not be timed.
    """

    info: Mapping[str, Any]
    made: int
    remade: bool
    role: str
    rank: int | None
    batches: int
    images: float
    period_s: float
    wait_s: float
    step_s: float
    wait_share: Estimate
    start_s: float
    usual_s: float
    start_wait_share: float
    alone_s: float | None
    step_cpu_s: float
    process_cpu_s: float
    parts: tuple[SamplePart, ...]
    waits_s: tuple[float, ...]
    steps_s: tuple[float, ...]
    starts: tuple[int, ...]
    on_device: bool
    ahead: bool
    loaders: int
    all_wait_share: Estimate
    note: str

    @property
    def images_per_s(self) -> float:
        """Images per second of training."""
        return self.images / self.period_s

    @property
    def unhindered_s(self) -> float:
        """Seconds of a step that neither waits nor shares the CPUs with workers, as far as that is known."""
        return self.step_s if self.alone_s is None else min(self.step_s, self.alone_s)

    @property
    def workers(self) -> int:
        """Number of worker processes of the DataLoader."""
        return int(self.info.get("workers", 0))

    @property
    def start_wait_s(self) -> float:
        """Seconds that starts of epochs add to the wait, averaged over all batches."""
        return self.period_s * self.start_wait_share

    @property
    def loads_too_slowly(self) -> bool:
        """Whether batches are waited for within epochs, too, and not only at their starts."""
        return self.wait_s - self.start_wait_s >= NEGLIGIBLE_SHARE * self.period_s

    @property
    def shows_pictures(self) -> bool:
        """Whether the batches or the samples are pictures."""
        return bool(self.info.get("side")) or any(part.stage == WaitCause.DECODE for part in self.parts)

    @property
    def sample_s(self) -> float:
        """Seconds that loading a sample takes one process; 0 where that was not timed."""
        return sum(part.seconds for part in self.parts)


@dataclass(frozen=True, slots=True)
class Machine:
    """CPUs of the machine, and their use while the training was watched.

    Attributes:
        cpus: number of CPUs that the script may use.
        script_cpu_share: share of them, 0 to 1, that the script used; None where not known.
        other_cpu_share: share of them, 0 to 1, that other processes used; None where not known.
    """

    cpus: int
    script_cpu_share: float | None
    other_cpu_share: float | None

    def with_cpus(self, cpus: int) -> "Machine":
        """Return the same use of another number of CPUs."""
        share = self.script_cpu_share
        return replace(
            self, cpus=cpus, script_cpu_share=None if share is None else min(1.0, share * self.cpus / cpus)
        )


def warm_up(info: Mapping[str, Any]) -> int:
    """Number of first batches that are not counted, because workers read them ahead of the first step."""
    return max(_WARM_UP, int(info.get("workers", 0)) * int(info.get("prefetch", 0)))


# making streams from events


def find_streams(processes: Sequence[Sequence[Event]]) -> list[Stream]:
    """Make streams from the events of all processes: training first, the rank that waits longest first.

    Loaders that one line makes for one dataset, as a framework does for each evaluation, are one stream.
    """
    streams = [stream for events in processes for stream in _find_streams_of_process(events)]
    if not any(stream.role == TRAINING for stream in streams):
        streams = [replace(stream, role=READING) for stream in streams]
    order = {TRAINING: 0, READING: 1, VALIDATION: 2}
    streams.sort(key=lambda stream: (order[stream.role], -stream.wait_s * stream.batches))
    # only one rank times the parts of its samples
    parts = {stream.info["key"]: stream.parts for stream in streams if stream.parts}
    return [replace(stream, parts=parts.get(stream.info["key"], ())) for stream in streams]


@dataclass(slots=True)
class _Batch:
    """Times of one batch, which is waited for and then computed on.

    Attributes:
        images: number of its samples.
        served: how the hook served it, see `SERVED` there.
        is_first: whether it is the first of an epoch.
        wait_s: seconds from asking for it to having it.
        got_s: time at which the training had it, on the monotonic clock.
        got_cpu_s: CPU time of the process at that moment.
        wait_cpu_s: CPU seconds of the process during the wait.
        step_s, step_cpu_s: seconds and CPU seconds until the next batch was asked for.
        idle_s: seconds for which the device had nothing to do; None where not measured.
        is_clean: whether the step ended with asking for the next batch, and no validation ran in between.
    """

    images: int
    served: str
    is_first: bool
    wait_s: float
    got_s: float
    got_cpu_s: float
    wait_cpu_s: float
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    idle_s: float | None = None
    is_clean: bool = False


@dataclass(slots=True)
class _Loader:
    """Events of one loader in one process.

    Attributes:
        info: properties of the loader, from the events `stream` and `described`.
        events: its events `epoch`, `batch`, `end` and `idle`.
        parts: its event `parts`; empty where there was none.
        is_ahead: whether another thread than the training asks for its batches.
        made: number of loaders that the script has made at the same line.
    """

    info: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    parts: Mapping[str, Any] = field(default_factory=dict)
    is_ahead: bool = False
    made: int = 0


def _find_streams_of_process(events: Sequence[Event]) -> list[Stream]:
    """Make the streams of one process."""
    rank, loaders = _read_events(events)
    training = _find_training(loaders, by_epoch=True)
    if not training:  # it may make a new iterator for each batch, so that no epoch has a second batch
        training = _find_training(loaders, by_epoch=False)
    other_times = sorted(
        event["asked_s"]
        for stream_id, loader in loaders.items()
        if stream_id not in training
        for event in loader.events
        if event["event"] == "batch"
    )
    streams: list[tuple[Stream, list[float]]] = []
    for members, is_training in _group_loaders(loaders, training):
        batches: list[_Batch] = []
        for member in members:
            batches += _read_batches(member.events, other_times if is_training else ())
        stream = _make_stream(members, batches, TRAINING if is_training else VALIDATION, rank)
        if stream is not None:
            streams.append((stream, [batch.got_s for batch in batches]))
    combined = []
    for stream, times_s in streams:
        feeding = [stream]
        for other, other_times_s in streams:
            both_train = stream.role == TRAINING and other.role == TRAINING
            if other is not stream and both_train and _alternate(times_s, other_times_s):
                feeding.append(other)
        combined.append(_combine(stream, feeding))
    return combined


def _read_events(events: Sequence[Event]) -> tuple[int | None, dict[int, _Loader]]:
    """Read the rank of a process, and its loaders by the `stream` of their events."""
    rank: int | None = None
    loaders: dict[int, _Loader] = {}
    made = Counter(event["where"] for event in events if event["event"] == "made")
    for event in events:
        kind = event["event"]
        if kind == "process":
            rank = int(event["rank"]) if event["rank"].isdecimal() else None
        elif kind == "stream":
            loaders[event["stream"]] = _Loader(dict(event), made=made[event["where"]])
        elif kind == "described":
            loaders[event["stream"]].info |= {name: event[name] for name in ("side", "bytes", "kinds")}
        elif kind == "cpus":
            loaders[event["stream"]].info["cpus"] = event
        elif kind == "parts":
            loaders[event["stream"]].parts = event
        elif kind == "ahead":
            loaders[event["stream"]].is_ahead = True
        elif kind in ("epoch", "batch", "end", "idle"):
            loaders[event["stream"]].events.append(event)
    return rank, loaders


def _alternate(times_s: Sequence[float], others_s: Sequence[float]) -> bool:
    """Whether two streams give batches by turns, as where each step takes one from both.

    Args:
        times_s, others_s: times of the batches of either stream, in order.
    """
    between = [bisect(others_s, a) < bisect(others_s, b) for a, b in pairwise(times_s)]
    return bool(between) and sum(between) > len(between) / 2


def _combine(stream: Stream, feeding: Sequence[Stream]) -> Stream:
    """Set the fields of a stream that are about all streams from which each step takes a batch."""
    shares = [member.wait_share for member in feeding]
    return replace(
        stream,
        loaders=len(feeding),
        images=sum(member.images * stream.period_s / member.period_s for member in feeding),
        all_wait_share=Estimate(
            min(1.0, sum(share.median for share in shares)),
            min(1.0, sum(share.low for share in shares)),
            min(1.0, sum(share.high for share in shares)),
        ),
    )


def _group_loaders(loaders: Mapping[int, _Loader], training: set[int]) -> list[tuple[list[_Loader], bool]]:
    """Group loaders of one key and role that were iterated one after the other.

    Args:
        loaders: loaders by the `stream` of their events.
        training: keys of the loaders that train.

    Returns:
        The loaders of each group, and whether they train.
    """
    groups: list[tuple[list[_Loader], bool]] = []
    for stream_id, loader in loaders.items():
        times = [event["asked_s"] for event in loader.events if event["event"] == "batch"]
        if not times:
            continue
        for members, is_training in groups:
            last = [event["asked_s"] for event in members[-1].events if event["event"] == "batch"][-1]
            is_same = (members[0].info["key"], is_training) == (loader.info["key"], stream_id in training)
            if is_same and last < times[0]:
                members.append(loader)
                break
        else:
            groups.append(([loader], stream_id in training))
    return groups


def _find_training(loaders: Mapping[int, _Loader], *, by_epoch: bool) -> set[int]:
    """Keys of the loaders between whose batches optimizers step; `by_epoch` as in `_is_training`."""
    return {
        stream_id for stream_id, loader in loaders.items() if _is_training(loader.events, by_epoch=by_epoch)
    }


def _is_training(events: Sequence[Event], *, by_epoch: bool) -> bool:
    """Whether optimizers step between the batches of a loader.

    Args:
        events: events of the loader.
        by_epoch: whether only steps between two batches of one epoch count; between two validations there
            are steps, too.
    """
    steps, trained, batches = None, 0, 0
    for event in events:
        if event["event"] == "epoch":
            if by_epoch:
                steps = None
        elif event["event"] in ("batch", "end"):
            if steps is not None and event["steps"] > steps:
                trained += 1
            if event["event"] == "batch":
                batches += 1
            steps = event["steps"]
    return trained > 0 and trained >= _MIN_TRAINED_SHARE * batches


def _read_batches(events: Sequence[Event], validation_times: Sequence[float]) -> list[_Batch]:
    """Make batches from the events of a loader.

    Args:
        events: events of the loader.
        validation_times: times at which loaders that do not train asked for a batch, in order.
    """
    batches: list[_Batch] = []
    last: _Batch | None = None
    making_s, position = 0.0, 0
    for event in events:
        kind = event["event"]
        if kind == "epoch":
            if last is not None:  # the script left the epoch early
                last.step_s = event["begin_s"] - last.got_s
                last.step_cpu_s = event["begin_cpu_s"] - last.got_cpu_s
                last.is_clean = not _any_between(validation_times, last.got_s, event["begin_s"])
            making_s += event["end_s"] - event["begin_s"]
            position, last = 0, None
        elif kind == "idle" and event["batch"] < len(batches):
            batches[event["batch"]].idle_s = event["seconds"]
        elif kind in ("batch", "end"):
            asked_s = event["asked_s"]
            if last is not None:
                last.step_s = asked_s - last.got_s
                last.is_clean = not _any_between(validation_times, last.got_s, asked_s)
                last.step_cpu_s = event["asked_cpu_s"] - last.got_cpu_s
            if kind == "end":
                making_s, last = event["got_s"] - asked_s, None
                continue
            last = _Batch(
                images=event["images"],
                served=event["served"],
                is_first=position == 0,
                wait_s=making_s + event["got_s"] - asked_s,
                got_s=event["got_s"],
                got_cpu_s=event["got_cpu_s"],
                wait_cpu_s=event["got_cpu_s"] - event["asked_cpu_s"],
            )
            batches.append(last)
            making_s, position = 0.0, position + 1
    return batches


def _any_between(times_s: Sequence[float], after_s: float, before_s: float) -> bool:
    """Whether one of the times, which are in order, lies between two others."""
    return bisect(times_s, after_s) < bisect_left(times_s, before_s)


def _select_steady(batches: Sequence[_Batch], skip: int) -> list[_Batch]:
    """Select the batches that count.

    Args:
        batches: batches in order.
        skip: number of batches that do not count at the beginning and after batches that were held or late.
    """
    steady = []
    unsettled = skip
    for batch in batches:
        if batch.served != "usual":
            unsettled = skip
        elif unsettled > 0:
            unsettled -= 1
        elif batch.is_clean:
            steady.append(batch)
    return steady


def _make_stream(
    members: Sequence[_Loader], batches: Sequence[_Batch], role: str, rank: int | None
) -> Stream | None:
    """Make a stream of the batches of one or several loaders; None where no batch counts."""
    info: dict[str, Any] = {}
    for member in members:
        info |= member.info
    steady = _select_steady(batches, warm_up(info))
    if not steady:
        return None
    on_device = sum(batch.idle_s is not None for batch in steady) > len(steady) / 2
    if on_device:
        steady = [batch for batch in steady if batch.idle_s is not None]
    waits = [batch.idle_s if on_device and batch.idle_s is not None else batch.wait_s for batch in steady]
    periods = [batch.wait_s + batch.step_s for batch in steady]
    sections = max(1, min(_MAX_SECTIONS, len(steady) // _MIN_SECTION_BATCHES))
    edges = [len(periods) * section // sections for section in range(sections + 1)]
    shares = [sum(waits[a:b]) / sum(periods[a:b]) for a, b in pairwise(edges)]
    total_s, wait_s = sum(periods), sum(waits)
    starts = [wait_s for batch, wait_s in zip(steady, waits, strict=True) if batch.is_first]
    others = [wait_s for batch, wait_s in zip(steady, waits, strict=True) if not batch.is_first]
    usual_s = sum(others) / len(others) if others else 0.0
    if info["workers"] == 0 and not others:  # there are no workers to start
        usual_s = wait_s / len(waits)
    held_batches = [batch for batch in batches if batch.served == "held" and batch.is_clean]
    parts: Mapping[str, Any] = next((member.parts for member in members if member.parts), {})
    cpu_s = sum(batch.step_cpu_s for batch in steady)
    overall = wait_s / total_s
    wait_share = Estimate(overall, min(overall, *shares), max(overall, *shares))
    alone_s = None
    step_cpu_s = cpu_s / len(steady)
    if info["workers"] == 0:
        alone_s = (total_s - wait_s) / len(steady)  # no worker takes CPU time from the steps
    elif len(held_batches) >= _MIN_HELD_STEPS:
        alone_s = median(batch.step_s for batch in held_batches)
        step_cpu_s = median(batch.step_cpu_s for batch in held_batches)
    return Stream(
        info=info,
        made=max(member.made for member in members),
        remade=len(members) > 1,
        role=role,
        rank=rank,
        batches=len(steady),
        images=sum(batch.images for batch in steady) / len(steady),
        period_s=total_s / len(steady),
        wait_s=wait_s / len(steady),
        step_s=(total_s - wait_s) / len(steady),
        wait_share=wait_share,
        start_s=median(starts) if starts else 0.0,
        usual_s=usual_s,
        start_wait_share=sum(max(0.0, start_s - usual_s) for start_s in starts) / total_s,
        alone_s=alone_s,
        step_cpu_s=step_cpu_s,
        process_cpu_s=(cpu_s + sum(batch.wait_cpu_s for batch in steady)) / len(steady),
        parts=make_parts((part["stage"], part["name"], part["seconds"]) for part in parts.get("parts", ())),
        waits_s=tuple(waits),
        steps_s=tuple(period - wait_s for period, wait_s in zip(periods, waits, strict=True)),
        starts=tuple(position for position, batch in enumerate(steady) if batch.is_first),
        on_device=on_device,
        loaders=1,
        all_wait_share=wait_share,
        ahead=any(member.is_ahead for member in members),
        note=str(parts.get("failed", "")),
    )


def make_parts(values: Iterable[tuple[str, str, float]]) -> tuple[SamplePart, ...]:
    """Make the parts of a sample of stage, name and seconds each, the longest first."""
    parts = [SamplePart(WaitCause(stage), name, seconds) for stage, name, seconds in values]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


# predicting changes of a stream


def is_waiting(stream: Stream) -> bool:
    """Whether a stream waits for so much of the time that a change is worthwhile."""
    return stream.all_wait_share.median >= NEGLIGIBLE_SHARE


def can_change(stream: Stream) -> bool:
    """Whether a change may help, and enough is known to predict how much."""
    return is_waiting(stream) and not stream.ahead and stream.batches >= FEWEST


def longest_stage(stream: Stream, streams: Sequence[Stream], machine: Machine) -> WaitCause | None:
    """Name what a stream waits for most, which is the stage of its longest part, or another; None: not known.

    Args:
        stream: stream that waits.
        streams: all streams, because ranks share the CPUs.
        machine: CPUs of the machine.
    """
    if stream.start_wait_share > stream.wait_share.median / 2:
        if stream.workers > 0 and not stream.info.get("persistent"):
            return WaitCause.WORKERS
        return WaitCause.START
    if not stream.parts:
        return None
    model = _Model(stream, machine, count_ranks(stream, streams))
    if model.explained_share >= _MIN_EXPLAINED_SHARE:
        return stream.parts[0].stage
    if model.has_busy_threads:
        return WaitCause.THREADS
    return WaitCause.OTHERS if is_disturbed(machine.other_cpu_share) else WaitCause.UNSEEN


def explained_share(stream: Stream, streams: Sequence[Stream], machine: Machine) -> float:
    """Share of the wait within epochs that the parts of the samples explain; see `longest_stage`."""
    return _Model(stream, machine, count_ranks(stream, streams)).explained_share


def find_changes(stream: Stream, streams: Sequence[Stream], machine: Machine) -> list[Change]:
    """List the changes of the DataLoader that would bring more images/s; none where the stream does not wait.

    The change that brings most is first; where the stream waits most for workers that start anew, it is
    `persistent_workers`. Where nothing can be predicted, or no bound is above today's rate, the only change
    is the first one to try, with Basis.UNKNOWN.

    Args:
        stream: stream to improve.
        streams: all streams, because ranks share the CPUs.
        machine: CPUs of the machine.
    """
    if not can_change(stream) or stream.info["kind"] != "DataLoader":
        return []
    stage = longest_stage(stream, streams, machine)
    model = _Model(stream, machine, count_ranks(stream, streams))
    suggested = [_suggest_more_workers(stream, model), _suggest_pinning(stream)]
    if stage == WaitCause.THREADS or not stream.loads_too_slowly:  # more workers would have nothing to do
        suggested = suggested[1:]
    suggested.insert(0 if stage == WaitCause.WORKERS else 1, _suggest_persistent_workers(stream))
    candidates = [change for change in suggested if change is not None]
    if can_predict(stage, machine):
        enough = stream.images_per_s * (1 + NEGLIGIBLE_SHARE)
        gaining = [change for change in candidates if change.images_per_s.low > enough]
        if stage != WaitCause.WORKERS:
            gaining.sort(key=lambda change: -change.images_per_s.low)
        if gaining:
            return gaining
    return [replace(change, images_per_s=at_least(0.0), basis=Basis.UNKNOWN) for change in candidates[:1]]


def can_predict(stage: WaitCause | None, machine: Machine) -> bool:
    """Whether it can be predicted what a change brings to a stream that waits most for this stage."""
    return stage is not None and stage not in UNEXPLAINED and not is_disturbed(machine.other_cpu_share)


def count_ranks(stream: Stream, streams: Sequence[Stream]) -> int:
    """Number of ranks that have a stream of the same role; 1 where processes have no ranks."""
    return max(1, len({other.rank for other in streams if other.role == stream.role} - {None}))


class _Model:
    """Model of a stream's period, which predicts images/s with another number of workers.

    Attributes:
        cpus: CPUs that one rank may use.
        step_s: seconds of a step.
        load_s: seconds that one process takes to load a batch.
        explained_share: share of `load_s` that the parts of its samples explain, if they share the CPUs with
            the steps alone.
        has_busy_threads: whether the script uses much more CPU time than its steps and these parts need.
    """

    def __init__(self, stream: Stream, machine: Machine, ranks: int) -> None:
        self._stream = stream
        self.cpus = machine.cpus / ranks
        self._is_disturbed = is_disturbed(machine.other_cpu_share)
        # other processes slow steps down, and not always those that are timed alone
        self.step_s = stream.step_s if self._is_disturbed else stream.unhindered_s
        workers = stream.workers
        steady_s = stream.period_s - stream.start_wait_s
        if workers == 0:
            self.load_s = max(0.0, stream.wait_s - stream.start_wait_s)
            used_s = stream.process_cpu_s - stream.step_cpu_s
        else:
            self.load_s = steady_s * workers  # workers that are waited for never idle
            used_s = min(workers, self.cpus) * steady_s  # CPU time, at most
            if machine.script_cpu_share is not None:
                used_s = machine.script_cpu_share * self.cpus * stream.period_s - stream.process_cpu_s
        self._load_cpu_s = min(self.load_s, max(0.0, used_s))
        samples = stream.images / stream.loaders
        parts_s = stream.sample_s * samples
        parts_cpu_s = sum(part.seconds for part in stream.parts if part.stage != WaitCause.READ) * samples
        expected_s = parts_s
        if workers:
            expected_s = max(parts_s, (stream.step_cpu_s + parts_cpu_s) / self.cpus * workers)
        self.explained_share = min(1.0, expected_s / max(self.load_s, 1e-9))
        # a little more is usual where files come from a slow disk
        unexplained_cpu_s = used_s * _MIN_EXPLAINED_SHARE - parts_cpu_s
        self.has_busy_threads = unexplained_cpu_s > _MIN_BUSY_SHARE * self.load_s
        self._computing_share = parts_cpu_s / parts_s if parts_s else 1.0

    @property
    def max_workers(self) -> int:
        """Largest number of workers for which there is CPU time."""
        cpu_share = max(self._load_cpu_s / max(self.load_s, 1e-9), 1 / MAX_WORKERS_PER_CPU)
        if self._is_disturbed:  # a worker that waits for a CPU only seems to need little of it
            cpu_share = max(cpu_share, self._computing_share)
        return int(self.cpus / cpu_share)

    def predict_workers(self, workers: int) -> Estimate | None:
        """Predict the images/s that another number of workers brings at least; None: nothing is predicted."""
        stream = self._stream
        step_cpus = stream.step_cpu_s / max(self.step_s, 1e-9)
        if step_cpus > _MIN_THREADS and step_cpus + workers > self.cpus:
            return None
        start_s = stream.start_wait_s
        if stream.workers == 0:  # workers cannot read ahead of the first batch of an epoch
            start_s = _FIRST_LOADS * self.load_s * len(stream.starts) / stream.batches
        shared_s = self.load_s / workers
        step_share = min(1.0, step_cpus / self.cpus)
        period_s = start_s + max(
            self.step_s + step_share * shared_s,
            shared_s,
            (stream.step_cpu_s + self._load_cpu_s) / self.cpus,
        )
        return at_least(stream.images / period_s * (1 - _MODEL_ERROR))


# each of these returns None where its change does not apply


def _suggest_more_workers(stream: Stream, model: _Model) -> Change | None:
    """Suggest enough workers to keep up with the steps, as far as there is CPU time for them."""
    needed = math.ceil(model.load_s / max(model.step_s, 1e-9) * _WORKER_MARGIN)
    workers = min(needed, max(1, model.max_workers))
    if workers <= stream.workers:
        return None
    arguments: dict[str, Any] = {"num_workers": workers}
    if stream.workers == 0:
        arguments["persistent_workers"] = True
    rate = model.predict_workers(workers)
    if rate is None:
        return Change(ChangeKind.WORKERS, at_least(0.0), Basis.UNKNOWN, arguments)
    return Change(ChangeKind.WORKERS, rate, Basis.BOUND, arguments)


def _suggest_persistent_workers(stream: Stream) -> Change | None:
    """Suggest to keep workers from epoch to epoch, which saves their start, but not loading a first batch."""
    if stream.workers == 0 or stream.info.get("persistent") or stream.start_wait_share < NEGLIGIBLE_SHARE:
        return None
    extra_s = max(stream.start_s - stream.usual_s, 1e-9)
    saved_share = (
        max(0.0, 1 - _FIRST_LOADS * stream.sample_s * stream.images / extra_s) if stream.parts else 0.0
    )
    period_s = stream.period_s - stream.start_wait_s * saved_share
    rate = at_least(stream.images / period_s * (1 - _MODEL_ERROR))
    return Change(ChangeKind.PERSISTENT_WORKERS, rate, Basis.BOUND, {"persistent_workers": True})


def _suggest_pinning(stream: Stream) -> Change | None:
    """Suggest pinned memory, from which copies run beside the steps."""
    if not stream.on_device or stream.info.get("pinned"):
        return None
    return Change(ChangeKind.PIN_MEMORY, at_least(0.0), Basis.UNKNOWN, {"pin_memory": True})
