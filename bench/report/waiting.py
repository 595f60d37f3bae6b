"""Is a training waiting for its batches, for what, and what would change that: from its own times. Pure.

`bench.watch.hook` says which events there are. A stream is what is iterated at one place of the script,
epoch after epoch: the training's batches, or those of a validation. What it waits is the time from asking for
a batch to having it, what it computes the time from there until it asks for the next one, so a loader that
reads ahead of a slow step costs nothing. On CUDA the wait is the time for which the device had nothing to do.

A change is predicted from three times of a batch: what starting workers takes, what loading takes, and what
the step takes when no worker is busy. Where loading and step share the CPUs, the best case is that no CPU
ever idles, and the worst that loading stands still on the CPUs that the step uses; the range holds both.
"""

import math
from bisect import bisect, bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

from bench.report.stats import NEGLIGIBLE_SHARE, Estimate, is_disturbed

Event: TypeAlias = Mapping[str, Any]
TRAINING, VALIDATION, READING = "training", "validation", "reading"
STAGES = {
    "read": "reading files",
    "decode": "decoding",
    "resize": "resizing",
    "python": "transforms in Python",
    "collate": "collating",
    "copy": "copying batches between processes",
    "start": "the first batch of each epoch",
    "workers": "workers that start anew each epoch",
}
FEWEST = 8
"""Batches that say something."""
_WARM_UP = 3  # batches of a process that are not counted: it allocates, tunes and compiles
_SECTIONS = 5  # of what was watched, whose figures make the range
_SECTION_BATCHES = 4  # at least
_FEWEST_HELD = 2  # steps that were timed alone
_MODEL_ERROR = 0.1  # of every prediction: steps get slower or faster when data comes otherwise
_KEEPING_UP = 1.25  # times the rate of the training, which the workers asked for should give
_MOST_WORKERS_PER_CPU = 8
_SIMD = (0.2, 0.5)  # of the time that resizing takes with Pillow, by Pillow-SIMD


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One stream of one process, as far as it was steady.

    Attributes:
        info: what its loader is, as the hook says it.
        source: what `bench.watch.describe` says of it.
        role: training, validation, or reading where no optimizer was seen.
        rank: of its process, where it has one.
        batches: counted ones.
        images: of a batch.
        period_s: from batch to batch; `wait_s` and `step_s` make it up.
        share: of the time that is waited; the range is that of its sections.
        start_s: what the first batch of a further epoch takes, the end of the last one and the making of
            its iterator included; 0 where there was none. `usual_s`: what another batch takes.
        start_share: of the time, that goes to the starts of epochs beyond what is usual.
        alone_s: what a step takes when no worker is busy; None where that was not measured.
        step_cpu_s: CPU time of a step, alone if that was measured.
        process_cpu_s: CPU time of the script's own process from batch to batch.
        parts: seconds that a sample takes in one process, by stage; empty where that could not be told.
        waits_s, steps_s: of each batch, in seconds. `starts`: positions of the first batches of epochs.
        on_device: whether waits are the device's idle time.
        ahead: whether another thread than the training asks for the batches.
        loaders: that each step takes batches from; `images` are those of all of them.
        all_share: of the time, that is waited for any of them.
        note: why its parts could not be told.
    """

    info: Mapping[str, Any]
    source: Mapping[str, Any]
    role: str
    rank: int | None
    batches: int
    images: float
    period_s: float
    wait_s: float
    step_s: float
    share: Estimate
    start_s: float
    usual_s: float
    start_share: float
    alone_s: float | None
    step_cpu_s: float
    process_cpu_s: float
    parts: Mapping[str, float]
    waits_s: tuple[float, ...]
    steps_s: tuple[float, ...]
    starts: tuple[int, ...]
    on_device: bool
    ahead: bool
    loaders: int
    all_share: Estimate
    note: str

    @property
    def images_per_s(self) -> float:
        """Images of a second of training."""
        return self.images / self.period_s

    @property
    def unhindered_s(self) -> float:
        """What a step takes where nothing is waited for, as far as that is known."""
        return self.step_s if self.alone_s is None else min(self.step_s, self.alone_s)

    @property
    def workers(self) -> int:
        """Worker processes of its DataLoader."""
        return int(self.info.get("workers", 0))

    @property
    def starting_s(self) -> float:
        """What starting epochs takes, shared out among the batches."""
        return self.period_s * self.start_share

    @property
    def loads_too_slowly(self) -> bool:
        """Whether it waits also where no epoch starts."""
        return self.wait_s - self.starting_s >= NEGLIGIBLE_SHARE * self.period_s

    @property
    def shows_pictures(self) -> bool:
        """Whether its batches or its samples are pictures."""
        return bool(self.info.get("side")) or self.parts.get("decode", 0.0) > 0


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and what it would bring.

    Attributes:
        name: what is changed.
        images_per_s: predicted.
        arguments: of the DataLoader, that it sets.
        cost: size and time, where it has a price.
    """

    name: str
    images_per_s: Estimate
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cost: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredReplacement:
    """What a data set in another's place takes, measured on a sample of its pictures.

    Attributes:
        name: of the change.
        factor: its seconds for a sample over those of today's; the range is over samples. None: the whole
            loader is replaced.
        rate: images/s of the loader that replaces it, which had all CPUs; None where the DataLoader stays.
        cost: what it takes.
    """

    name: str
    factor: Estimate | None
    rate: Estimate | None
    cost: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The CPUs, and who used them while the training was watched.

    Attributes:
        cpus: that the script may use.
        ours: share of them, 0 to 1, that the script used; None where that is not known.
        others: share of them that other processes took; None where that is not known.
    """

    cpus: int
    ours: float | None
    others: float | None


def warm_up(info: Mapping[str, Any]) -> int:
    """Batches of a stream that are not counted: those that were read ahead while it began."""
    return max(_WARM_UP, int(info.get("workers", 0)) * int(info.get("prefetch", 0)))


# from events to streams


def find_streams(processes: Sequence[Sequence[Event]]) -> list[Stream]:
    """What was iterated, training first, the slowest rank first.

    Loaders that are made at one place for one thing, as a framework makes one for each evaluation, are one
    stream.
    """
    streams = [stream for events in processes for stream in _of_process(events)]
    if not any(stream.role == TRAINING for stream in streams):
        streams = [replace(stream, role=READING) for stream in streams]
    order = {TRAINING: 0, READING: 1, VALIDATION: 2}
    streams.sort(key=lambda one: (order[one.role], -one.wait_s * one.batches))
    parts = {one.info["key"]: one.parts for one in streams if one.parts}  # one rank is asked for them
    return [replace(one, parts=parts.get(one.info["key"], {})) for one in streams]


@dataclass(slots=True)
class _Batch:
    """One batch: waited for, then computed on.

    Attributes:
        is_first: of an epoch.
        is_clean: whether the training asked for the next batch, and did nothing else before, as validate.
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
    """The events of one loader of a process."""

    info: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    parts: Mapping[str, Any] = field(default_factory=dict)
    is_ahead: bool = False


def _of_process(events: Sequence[Event]) -> list[Stream]:
    rank, loaders = _read_events(events)
    trains = {number: _is_training(loader.events, by_epoch=True) for number, loader in loaders.items()}
    if not any(trains.values()):  # it may take each batch from an iterator of its own
        trains = {number: _is_training(loader.events, by_epoch=False) for number, loader in loaders.items()}
    other_times = sorted(
        event["asked_s"]
        for number, loader in loaders.items()
        if not trains[number]
        for event in loader.events
        if event["event"] == "batch"
    )
    streams: list[tuple[Stream, list[float]]] = []
    for members, is_training in _grouped(loaders, trains):
        batches = [
            batch for one in members for batch in _batches(one.events, other_times if is_training else ())
        ]
        stream = _summarised(members, batches, TRAINING if is_training else VALIDATION, rank)
        if stream is not None:
            streams.append((stream, [batch.got_s for batch in batches]))
    found = []
    for stream, got_s in streams:
        fed_by = [stream]
        for other, others_s in streams:
            if other is not stream and stream.role == other.role == TRAINING and _alternate(got_s, others_s):
                fed_by.append(other)
        found.append(_with_all(stream, fed_by))
    return found


def _read_events(events: Sequence[Event]) -> tuple[int | None, dict[int, _Loader]]:
    """The rank of a process, and its loaders by the numbers of their streams."""
    rank: int | None = None
    loaders: dict[int, _Loader] = {}
    for event in events:
        kind = event["event"]
        if kind == "process":
            rank = int(event["rank"]) if event["rank"].isdecimal() else None
        elif kind == "stream":
            loaders[event["stream"]] = _Loader(dict(event))
        elif kind == "described":
            loader = loaders[event["stream"]]
            loader.source = dict(event["source"])
            loader.info |= {name: event[name] for name in ("side", "bytes", "kinds")}
        elif kind == "parts":
            loaders[event["stream"]].parts = event
        elif kind == "ahead":
            loaders[event["stream"]].is_ahead = True
        elif kind in ("epoch", "batch", "end", "idle"):
            loaders[event["stream"]].events.append(event)
    return rank, loaders


def _alternate(times_s: Sequence[float], others_s: Sequence[float]) -> bool:
    """Whether batches of the one come between those of the other, as where each step takes from both."""
    between = [bisect(others_s, a) < bisect(others_s, b) for a, b in pairwise(times_s)]
    return bool(between) and sum(between) > len(between) / 2


def _with_all(stream: Stream, fed_by: Sequence[Stream]) -> Stream:
    """The stream, with what it is of a step that takes from all of `fed_by`."""
    shares = [one.share for one in fed_by]
    return replace(
        stream,
        loaders=len(fed_by),
        images=sum(one.images * stream.period_s / one.period_s for one in fed_by),
        all_share=Estimate(
            min(1.0, sum(share.median for share in shares)),
            min(1.0, sum(share.low for share in shares)),
            min(1.0, sum(share.high for share in shares)),
        ),
    )


def _grouped(
    loaders: Mapping[int, _Loader], trains: Mapping[int, bool]
) -> Iterator[tuple[list[_Loader], bool]]:
    """Loaders of one key and role that were iterated one after the other, and whether they train."""
    groups: list[tuple[list[_Loader], bool]] = []
    for number, loader in loaders.items():
        times = [event["asked_s"] for event in loader.events if event["event"] == "batch"]
        if not times:
            continue
        for members, is_training in groups:
            last = [event["asked_s"] for event in members[-1].events if event["event"] == "batch"][-1]
            is_same = (members[0].info["key"], is_training) == (loader.info["key"], trains[number])
            if is_same and last < times[0]:
                members.append(loader)
                break
        else:
            groups.append(([loader], trains[number]))
    yield from groups


def _is_training(events: Sequence[Event], by_epoch: bool) -> bool:
    """Whether optimizers step between batches of the stream.

    Args:
        by_epoch: only what happens between two batches of an epoch counts: between two validations there are
            steps, too.
    """
    steps, followed, batches = None, 0, 0
    for event in events:
        if event["event"] == "epoch":
            if by_epoch:
                steps = None
        elif event["event"] in ("batch", "end"):
            if steps is not None and event["steps"] > steps:
                followed += 1
            if event["event"] == "batch":
                batches += 1
            steps = event["steps"]
    return followed > 0 and followed >= 0.02 * batches


def _batches(events: Sequence[Event], others: Sequence[float]) -> list[_Batch]:
    """Batches with what was waited and computed.

    Args:
        others: when, in order, validations asked for a batch.
    """
    batches: list[_Batch] = []
    last: _Batch | None = None
    making_s, of_epoch = 0.0, 0
    for event in events:
        kind = event["event"]
        if kind == "epoch":
            if last is not None:  # the epoch was broken off
                last.step_s = event["begin_s"] - last.got_s
                last.step_cpu_s = event["begin_cpu_s"] - last.got_cpu_s
                last.is_clean = not _any_between(others, last.got_s, event["begin_s"])
            making_s += event["end_s"] - event["begin_s"]
            of_epoch, last = 0, None
        elif kind == "idle" and event["batch"] < len(batches):
            batches[event["batch"]].idle_s = event["seconds"]
        elif kind in ("batch", "end"):
            asked_s = event["asked_s"]
            if last is not None:
                last.step_s = asked_s - last.got_s
                last.is_clean = not _any_between(others, last.got_s, asked_s)
                last.step_cpu_s = event["asked_cpu_s"] - last.got_cpu_s
            if kind == "end":
                making_s, last = event["got_s"] - asked_s, None
                continue
            last = _Batch(
                images=event["images"],
                served=event["served"],
                is_first=of_epoch == 0,
                wait_s=making_s + event["got_s"] - asked_s,
                got_s=event["got_s"],
                got_cpu_s=event["got_cpu_s"],
                wait_cpu_s=event["got_cpu_s"] - event["asked_cpu_s"],
            )
            batches.append(last)
            making_s, of_epoch = 0.0, of_epoch + 1
    return batches


def _any_between(times_s: Sequence[float], after_s: float, before_s: float) -> bool:
    """Whether one of the times, which are in order, lies between."""
    return bisect(times_s, after_s) < bisect_left(times_s, before_s)


def _steady(batches: Sequence[_Batch], skip: int) -> list[_Batch]:
    """Batches that count: not the first ones, nor those that were held, nor as many after them."""
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


def _summarised(
    members: Sequence[_Loader], batches: Sequence[_Batch], role: str, rank: int | None
) -> Stream | None:
    info: dict[str, Any] = {}
    for member in members:
        info |= member.info
    steady = _steady(batches, warm_up(info))
    if not steady:
        return None
    on_device = sum(batch.idle_s is not None for batch in steady) > len(steady) / 2
    if on_device:
        steady = [batch for batch in steady if batch.idle_s is not None]
    waits = [batch.idle_s if on_device and batch.idle_s is not None else batch.wait_s for batch in steady]
    periods = [batch.wait_s + batch.step_s for batch in steady]
    sections = max(1, min(_SECTIONS, len(steady) // _SECTION_BATCHES))
    edges = [len(periods) * each // sections for each in range(sections + 1)]
    shares = [sum(waits[a:b]) / sum(periods[a:b]) for a, b in pairwise(edges)]
    total_s, wait_s = sum(periods), sum(waits)
    starts = [wait_s for batch, wait_s in zip(steady, waits, strict=True) if batch.is_first]
    others = [wait_s for batch, wait_s in zip(steady, waits, strict=True) if not batch.is_first]
    usual_s = sum(others) / len(others) if others else 0.0
    if info["workers"] == 0 and not others:  # nothing starts
        usual_s = wait_s / len(waits)
    held = [batch for batch in batches if batch.served == "held" and batch.is_clean]
    timed = [member.parts for member in members if member.parts]
    cpu_s = sum(batch.step_cpu_s for batch in steady)
    share = wait_s / total_s
    estimated_share = Estimate(share, min(share, *shares), max(share, *shares))
    alone_s = None
    step_cpu_s = cpu_s / len(steady)
    if info["workers"] == 0:
        alone_s = (total_s - wait_s) / len(steady)  # nothing else is at work
    elif len(held) >= _FEWEST_HELD:
        alone_s = median(batch.step_s for batch in held)
        step_cpu_s = median(batch.step_cpu_s for batch in held)
    return Stream(
        info=info,
        source=next((member.source for member in members if member.source), {}),
        role=role,
        rank=rank,
        batches=len(steady),
        images=sum(batch.images for batch in steady) / len(steady),
        period_s=total_s / len(steady),
        wait_s=wait_s / len(steady),
        step_s=(total_s - wait_s) / len(steady),
        share=estimated_share,
        start_s=median(starts) if starts else 0.0,
        usual_s=usual_s,
        start_share=sum(max(0.0, each - usual_s) for each in starts) / total_s,
        alone_s=alone_s,
        step_cpu_s=step_cpu_s,
        process_cpu_s=(cpu_s + sum(batch.wait_cpu_s for batch in steady)) / len(steady),
        parts=dict(timed[0].get("parts", {})) if timed else {},
        waits_s=tuple(waits),
        steps_s=tuple(period - wait_s for period, wait_s in zip(periods, waits, strict=True)),
        starts=tuple(position for position, batch in enumerate(steady) if batch.is_first),
        on_device=on_device,
        loaders=1,
        all_share=estimated_share,
        ahead=any(member.is_ahead for member in members),
        note=str(timed[0].get("failed", "")) if timed else "",
    )


# from streams to changes


def waits(stream: Stream) -> bool:
    """Whether so much is waited that it is worth a change."""
    return stream.all_share.median >= NEGLIGIBLE_SHARE


def can_change(stream: Stream) -> bool:
    """Whether a change may bring something, and enough is known to say what."""
    return waits(stream) and not stream.ahead and stream.batches >= FEWEST


def stage(stream: Stream) -> str:
    """What it waits for most, of STAGES; empty where that is not known."""
    if stream.start_share > stream.share.median / 2:
        if stream.workers > 0 and not stream.info.get("persistent"):
            return "workers"
        return "start"
    return max(stream.parts, key=lambda part: stream.parts[part], default="")


def find_changes(
    stream: Stream, streams: Sequence[Stream], machine: Machine, replaced: Sequence[MeasuredReplacement] = ()
) -> list[Change]:
    """Changes that would bring more, the most first; none where the training does not wait.

    Args:
        streams: all of them: ranks share the CPUs.
        replaced: what other data sets take.
    """
    if not can_change(stream):
        return []
    model = _Model(stream, machine, count_ranks(stream, streams))
    changes: list[Change] = []
    if stream.info["kind"] == "DataLoader":
        changes += [*_persistent(stream), *_pinned(stream)]
        if stream.loads_too_slowly:
            changes += [*_more_workers(stream, model), *_simd(stream, model)]
    for one in replaced:
        if one.rate is not None:
            changes.append(Change(one.name, model.rate_of_loader(one.rate), {}, one.cost))
        elif one.factor is not None and stream.loads_too_slowly:
            changes.append(Change(one.name, model.rate_of_samples(one.factor), {}, one.cost))
    today = stream.images_per_s
    worth = [
        change
        for change in changes
        if change.images_per_s.low > today and change.images_per_s.median > today * (1 + NEGLIGIBLE_SHARE)
    ]
    worth.sort(key=lambda change: -change.images_per_s.median)
    if stage(stream) == "workers":
        worth.sort(key=lambda change: change.name != "persistent_workers")
    return worth


def count_ranks(stream: Stream, streams: Sequence[Stream]) -> int:
    """Processes that train as this one does."""
    return max(1, len([one for one in streams if one.role == stream.role and one.rank is not None]))


class _Model:
    """Predicts the time from batch to batch for a loader that takes other times."""

    def __init__(self, stream: Stream, machine: Machine, ranks: int) -> None:
        self._stream = stream
        self.cpus = machine.cpus / ranks
        self._others = 0.0
        if is_disturbed(machine.other_share) and machine.other_share is not None:
            self._others = min(machine.other_share, 0.95)
        self.step_s = stream.unhindered_s
        if self._others:  # which take CPU time from steps that are timed alone, and not always as much
            self.step_s = stream.step_s
        workers = stream.workers
        steady_s = stream.period_s - stream.starting_s
        if workers == 0:
            self.load_s = max(0.0, stream.wait_s - stream.starting_s)
            self._load_cpu_s = min(self.load_s, max(0.0, stream.process_cpu_s - stream.step_cpu_s))
            return
        self.load_s = steady_s * workers  # workers that are waited for are always at work
        used_s = min(workers, self.cpus) * steady_s  # CPU time, at most
        if machine.script_share is not None:
            used_s = machine.script_share * self.cpus * stream.period_s - stream.process_cpu_s
        self._load_cpu_s = min(self.load_s, max(0.0, used_s))

    @property
    def most_workers(self) -> int:
        """Workers for which there is CPU time."""
        working = max(self._load_cpu_s / max(self.load_s, 1e-9), 1 / _MOST_WORKERS_PER_CPU)
        return int(self.cpus / working)

    def rate_of_workers(self, workers: int) -> Estimate:
        """Images/s with so many workers."""
        starting_s = self._stream.starting_s if self._stream.workers else 0.0
        return self._rate([self._periods(self.load_s, self._load_cpu_s, workers, starting_s)])

    def rate_of_samples(self, factor: Estimate) -> Estimate:
        """Images/s where loading takes `factor` of its time."""
        stream = self._stream
        return self._rate(
            [
                self._periods(self.load_s * each, self._load_cpu_s * each, stream.workers, stream.starting_s)
                for each in (factor.low, factor.high)
            ]
        )

    def rate_of_loader(self, rate: Estimate) -> Estimate:
        """Images/s of a loader that gives `rate` where it has all CPUs, and starts no processes."""
        found = []
        for each in (rate.low, rate.high):
            load_cpu_s = self._stream.images / each * self.cpus
            found.append(self._periods(load_cpu_s, load_cpu_s, self.cpus, 0.0))
        return self._rate(found)

    def _periods(
        self, load_s: float, load_cpu_s: float, workers: float, starting_s: float
    ) -> tuple[float, float]:
        """Seconds from batch to batch, at best and at worst.

        Args:
            load_s: what one process takes to load a batch.
            load_cpu_s: how much of that is CPU time.
            workers: that share the loading; 0: the training does it.
            starting_s: what starting epochs takes of each batch.
        """
        stream = self._stream
        steps_s = [self.step_s]
        if (
            stream.alone_s is None and not stream.on_device and not self._others
        ):  # the workers may have slowed it down
            steps_s.append(min(stream.step_s, stream.step_cpu_s / self.cpus))
        found = []
        for step_s in steps_s:
            for cpus in (self.cpus, self.cpus * (1 - self._others)):
                if workers == 0:
                    found += [step_s + load_s] * 2
                    continue
                apart_s = load_s / workers
                best_s = max(step_s, apart_s, (stream.step_cpu_s + load_cpu_s) / cpus)
                taken = min(1.0, stream.step_cpu_s / max(step_s * cpus, 1e-9))
                found += [best_s, max(best_s, step_s + taken * apart_s)]
        return starting_s + min(found), starting_s + max(found)

    def _rate(self, periods: Sequence[tuple[float, float]]) -> Estimate:
        best_s, worst_s = min(best for best, _ in periods), max(worst for _, worst in periods)
        images = self._stream.images
        middle_s = max((best_s + worst_s) / 2, 1e-9)
        low = images / max(worst_s, 1e-9) * (1 - _MODEL_ERROR)
        high = images / max(best_s, 1e-9) * (1 + _MODEL_ERROR)
        most = images / max(self.step_s, 1e-9)
        return Estimate(images / middle_s, low, max(images / middle_s, min(high, most)))


def _more_workers(stream: Stream, model: _Model) -> Iterator[Change]:
    """Workers that keep up, as many as there are CPUs for; more where they wait for files."""
    needed = math.ceil(model.load_s / max(model.step_s, 1e-9) * _KEEPING_UP)
    workers = min(needed, max(1, model.most_workers))
    if workers <= stream.workers:
        return
    arguments: dict[str, Any] = {"num_workers": workers}
    if stream.workers == 0:
        arguments["persistent_workers"] = True
    yield Change("workers", model.rate_of_workers(workers), arguments)


def _persistent(stream: Stream) -> Iterator[Change]:
    """What is saved is the start of workers; the first batch of an epoch is still loaded."""
    if stream.workers == 0 or stream.info.get("persistent") or stream.start_share < NEGLIGIBLE_SHARE:
        return
    batch_s = sum(stream.parts.values()) * stream.images
    more_s = max(stream.start_s - stream.usual_s, 1e-9)
    kept = [min(1.0, times * batch_s / more_s) for times in (1.0, 0.0, 2.0)]
    rates = [stream.images / (stream.period_s - stream.starting_s * (1 - each)) for each in kept]
    rate = Estimate(rates[0], min(rates) * (1 - _MODEL_ERROR), max(rates) * (1 + _MODEL_ERROR))
    yield Change("persistent_workers", rate, {"persistent_workers": True})


def _pinned(stream: Stream) -> Iterator[Change]:
    """A copy from pinned memory runs beside the computing: at most what the copy takes today is gained."""
    if not stream.on_device or stream.info.get("pinned"):
        return
    saved_s = [min(stream.info.get("bytes", 0) / rate, stream.wait_s) for rate in (12e9, 4e9)]
    rates = [stream.images / (stream.period_s - each) for each in (saved_s[0], 0.0, saved_s[1])]
    rate = Estimate(rates[0], rates[1] * (1 - _MODEL_ERROR), rates[2] * (1 + _MODEL_ERROR))
    yield Change("pin_memory", rate, {"pin_memory": True})


def _simd(stream: Stream, model: _Model) -> Iterator[Change]:
    total_s = sum(stream.parts.values())
    if "post" in stream.info.get("pillow", "post") or not stream.parts.get("resize"):
        return
    resizing = stream.parts["resize"] / total_s
    factors = [1 - resizing * (1 - kept) for kept in _SIMD]
    yield Change("pillow-simd", model.rate_of_samples(Estimate(sum(factors) / 2, *factors)))
