"""Is a training waiting for its batches, for what, and what would change that: from its own times. Pure.

`bench.watch.hook` says which events there are. A stream is what is iterated at one place of the script,
epoch after epoch: the training's batches, or those of a validation. What it waits is the time from asking for
a batch to having it, what it computes the time from there until it asks for the next one, so a loader that
reads ahead of a slow step costs nothing. On CUDA the wait is the time for which the device had nothing to do.
"""

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

from bench.report.stats import NEGLIGIBLE_SHARE, Estimate
from bench.report.words import counted, duration, number, percent
from precache.cli.commandline import human_bytes

Event: TypeAlias = list[Any]
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
_WARM_UP = 3  # batches of a process that are not counted: it allocates, tunes and compiles
_SECTIONS = 5  # of what was watched, whose figures make the range
_FEWEST = 4  # batches that say something
_MODEL_ERROR = 0.1  # of every prediction: steps get slower or faster when data comes otherwise
_KEEPING_UP = 1.25  # times the rate of the training, which the workers asked for should give
_SIMD = (0.2, 0.5)  # of the time that resizing takes with Pillow, by Pillow-SIMD


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One stream of one process, as far as it was steady.

    Attributes:
        info: what it is, as the hook says it.
        role: training, validation, or reading where no optimizer was seen.
        rank: of its process, where it has one.
        batches: counted ones.
        images: of a batch.
        period_s: from batch to batch; `wait_s` and `step_s` make it up.
        share: of the time that is waited; the range is that of its sections.
        start_s: what the first batch of a further epoch takes, the end of the last one and the making of
            its iterator included; 0 where there was none. `usual_s`: what another batch takes.
        start_share: of the time, that goes to the starts of epochs beyond what is usual.
        parts: seconds that a sample takes in one process, by stage; empty where that could not be told.
        spread: how much samples differ: the quartiles, beside the median.
        on_device: whether waits are the device's idle time.
        ahead: whether another thread than the training asks for the batches.
        note: why its parts could not be told.
    """

    info: Mapping[str, Any]
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
    parts: Mapping[str, float]
    spread: tuple[float, float]
    on_device: bool
    ahead: bool
    note: str

    @property
    def images_per_s(self) -> float:
        """That are trained on."""
        return self.images / self.period_s

    @property
    def workers(self) -> int:
        """Of its DataLoader."""
        return int(self.info.get("workers", 0))

    @property
    def shows_pictures(self) -> bool:
        """Whether its batches or its samples are pictures."""
        return bool(self.info.get("side")) or self.parts.get("decode", 0.0) > 0


@dataclass(frozen=True, slots=True)
class Cure:
    """A change, and what it would bring.

    Attributes:
        name: as `--cure` takes it where it can be done for the user.
        images_per_s: predicted.
        write: the line of the script, and what to write there.
        cost: size and time, where it has a price.
        keywords: of the DataLoader, that it sets.
    """

    name: str
    images_per_s: Estimate
    write: str
    cost: str = ""
    keywords: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a data set in another's place takes, measured on a sample of its pictures.

    Attributes:
        name: of the cure.
        factor: its seconds for a sample over those of today's; the range is over samples.
        rate: images/s of a loader that has all CPUs, instead; None where the DataLoader stays.
        write: what to write.
        cost: what it takes.
    """

    name: str
    factor: Estimate
    rate: Estimate | None
    write: str
    cost: str = ""


def warm_up(info: Mapping[str, Any]) -> int:
    """Batches of a stream that are not counted: those that were read ahead while it began."""
    return max(_WARM_UP, int(info.get("workers", 0)) * int(info.get("prefetch", 0)))


def find_streams(processes: Sequence[Sequence[Event]]) -> list[Stream]:
    """Those that were iterated for long enough to say something, training first, the slowest rank first."""
    found = [stream for events in processes for stream in _of_process(events)]
    if not any(stream.role == TRAINING for stream in found):
        found = [replace(stream, role=READING) for stream in found]
    order = {TRAINING: 0, READING: 1, VALIDATION: 2}
    found.sort(key=lambda one: (order[one.role], -one.share.median if one.rank is not None else 0))
    known = {one.info["key"]: one for one in found if one.parts or one.note}
    return [
        replace(one, parts=known[one.info["key"]].parts, spread=known[one.info["key"]].spread)
        if not one.parts and one.info["key"] in known
        else one
        for one in found
    ]


@dataclass(slots=True)
class _Pair:
    """One batch: waited for, then computed on."""

    got_s: float
    until_s: float
    wait_s: float
    images: int
    number: int
    is_first: bool


def _of_process(events: Sequence[Event]) -> Iterator[Stream]:
    head = next((event for event in events if event[0] == "process"), None)
    said = "" if head is None else head[2].get("RANK") or ""  # as the environment of the script had it
    rank = int(said) if said.isdecimal() else None
    infos: dict[int, dict[str, Any]] = {}
    own: dict[int, list[Event]] = {}
    for event in events:
        if event[0] == "stream":
            infos[event[1]] = dict(event[2])
            own[event[1]] = []
        elif event[0] == "seen":
            infos[event[1]].update(event[2])
        elif event[0] in ("epoch", "batch", "end", "idle", "ahead", "probe"):
            own[event[1]].append(event)
    trains = {key: _is_training(mine) for key, mine in own.items()}
    others = sorted(
        event[2] for key, mine in own.items() if not trains[key] for event in mine if event[0] == "batch"
    )
    for key, mine in own.items():
        role = TRAINING if trains[key] else VALIDATION
        stream = _summarised(infos[key], mine, role, rank, others if trains[key] else ())
        if stream is not None:
            yield stream


def _is_training(events: Sequence[Event]) -> bool:
    """Whether optimizers step between batches of the stream, within its epochs."""
    steps, followed, batches = None, 0, 0
    for event in events:
        if event[0] == "epoch":
            steps = None
        elif event[0] in ("batch", "end"):
            followed += steps is not None and event[4] > steps
            batches += event[0] == "batch"
            steps = event[4]
    return followed > 0 and followed >= 0.02 * batches


def _pairs(events: Sequence[Event], others: Sequence[float]) -> list[_Pair]:
    """Batches with what was waited and computed.

    A batch is left out where the training did something else before it asked for the next one: it broke off
    the epoch, or validated.
    """
    pairs: list[_Pair] = []
    last: _Pair | None = None
    made_s, count, total = 0.0, 0, 0
    for event in events:
        kind = event[0]
        if kind == "epoch":
            made_s, count, last = made_s + event[3] - event[2], 0, None
        elif kind in ("batch", "end"):
            asked_s, got_s = event[2], event[3]
            if last is not None:
                last.until_s = asked_s
                if not any(last.got_s < other < asked_s for other in _near(others, last.got_s, asked_s)):
                    pairs.append(last)
            if kind == "end":
                last, made_s = None, got_s - asked_s
                continue
            last = _Pair(got_s, got_s, made_s + got_s - asked_s, event[5], total, count == 0)
            made_s, count, total = 0.0, count + 1, total + 1
    return pairs


def _near(others: Sequence[float], low: float, high: float) -> Sequence[float]:
    """Those of the sorted `others` that may lie between."""
    return others[bisect(others, low) : bisect(others, high)]


def _summarised(
    info: Mapping[str, Any], events: Sequence[Event], role: str, rank: int | None, others: Sequence[float]
) -> Stream | None:
    pairs = _pairs(events, others)
    idle = {event[2]: event[3] for event in events if event[0] == "idle"}
    skip = warm_up(info)
    counted_pairs = [pair for pair in pairs if pair.number >= skip]
    if len(counted_pairs) < _FEWEST:
        counted_pairs = [pair for pair in pairs if pair.number > 0]
    if len(counted_pairs) < _FEWEST:
        return None
    on_device = sum(pair.number in idle for pair in counted_pairs) > len(counted_pairs) / 2
    if on_device:
        counted_pairs = [pair for pair in counted_pairs if pair.number in idle]
    waits = [idle[pair.number] if on_device else pair.wait_s for pair in counted_pairs]
    periods = [pair.wait_s + pair.until_s - pair.got_s for pair in counted_pairs]
    sections = min(_SECTIONS, len(counted_pairs) // _FEWEST)
    edges = [len(periods) * each // sections for each in range(sections + 1)]
    shares = [sum(waits[a:b]) / sum(periods[a:b]) for a, b in pairwise(edges)]
    total_s, wait_s = sum(periods), sum(waits)
    starts = [wait_s for pair, wait_s in zip(counted_pairs, waits, strict=True) if pair.is_first]
    usual_s = (wait_s - sum(starts)) / max(1, len(waits) - len(starts))
    probed: dict[str, Any] = next((event[2] for event in events if event[0] == "probe"), {}) or {}
    parts = dict(probed.get("parts", {}))
    low, high = probed.get("quartiles", (0.0, 0.0))
    middle = (low + high) / 2 or 1.0
    share = wait_s / total_s
    return Stream(
        info=info,
        role=role,
        rank=rank,
        batches=len(counted_pairs),
        images=sum(pair.images for pair in counted_pairs) / len(counted_pairs),
        period_s=total_s / len(counted_pairs),
        wait_s=wait_s / len(counted_pairs),
        step_s=(total_s - wait_s) / len(counted_pairs),
        share=Estimate(share, min(share, *shares), max(share, *shares)),
        start_s=median(starts) if starts else 0.0,
        usual_s=usual_s,
        start_share=sum(max(0.0, each - usual_s) for each in starts) / total_s,
        parts=parts,
        spread=(low / middle, high / middle) if low and high else (1.0, 1.0),
        on_device=on_device,
        ahead=any(event[0] == "ahead" for event in events),
        note=str(probed.get("failed", "")),
    )


def waits(stream: Stream) -> bool:
    """Whether so much is waited that it is worth a change."""
    return stream.share.median >= NEGLIGIBLE_SHARE


def stage(stream: Stream) -> str:
    """What it waits for most, of STAGES; empty where that cannot be told."""
    if stream.start_share > stream.share.median / 2:
        fresh = stream.workers > 0 and not stream.info.get("persistent")
        return "workers" if fresh else "start"
    return max(stream.parts, key=lambda part: stream.parts[part], default="")


def find_cures(
    stream: Stream, *, cpus: int, busy: float | None, replaced: Sequence[Replaced] = ()
) -> list[Cure]:
    """What would bring more, most first; none where the training does not wait.

    Args:
        cpus: of the machine.
        busy: share of them, 0 to 1, that the training uses; None where that is not known.
        replaced: what another data set takes.
    """
    if not waits(stream) or stream.ahead:
        return []
    found = []
    if stream.info["kind"] == "DataLoader":
        found += [*_more_workers(stream, cpus, busy), *_persistent(stream), *_pinned(stream), *_simd(stream)]
    for one in replaced:
        if one.rate is None:
            rate = _ranged(stream, [_slower(stream, factor) for factor in _three(one.factor)])
        else:
            rate = _ranged(stream, [max(stream.step_s, stream.images / each) for each in _three(one.rate)])
        found.append(Cure(one.name, rate, f"{_place(stream)}: {one.write}", one.cost, {}))
    worth = [
        cure for cure in found if cure.images_per_s.median > stream.images_per_s * (1 + NEGLIGIBLE_SHARE)
    ]
    return sorted(worth, key=lambda cure: -cure.images_per_s.median)


def _three(value: Estimate) -> tuple[float, float, float]:
    return value.median, value.low, value.high


def _slower(stream: Stream, factor: float) -> float:
    """Seconds from batch to batch where samples take `factor` of the time."""
    if stream.workers == 0:
        return stream.step_s + stream.wait_s * factor
    return max(stream.step_s, stream.period_s * factor)  # workers that are waited for are always at work


def _ranged(stream: Stream, periods_s: Sequence[float]) -> Estimate:
    """Images/s of the first of those periods; the range holds all, and the error of the model."""
    rates = [stream.images / period_s for period_s in periods_s]
    return Estimate(rates[0], min(rates) * (1 - _MODEL_ERROR), max(rates) * (1 + _MODEL_ERROR))


def _place(stream: Stream) -> str:
    return str(stream.info.get("where", ""))


def _more_workers(stream: Stream, cpus: int, busy: float | None) -> Iterator[Cure]:
    """As many as keep up, if the CPUs have the time."""
    one_s = stream.wait_s if stream.workers == 0 else stream.period_s * stream.workers
    needed = math.ceil(one_s / max(stream.step_s, 1e-9) * _KEEPING_UP)
    workers = min(needed, max(cpus, 1))
    if workers <= stream.workers:
        return
    if busy is None:  # a worker, or the script itself, keeps a CPU busy
        busy = min(1.0, max(1, stream.workers) / max(cpus, 1))
    limit_s = stream.period_s * busy  # all CPUs at work for the whole of it
    period_s = max(stream.step_s, one_s / workers)
    rate = _ranged(stream, [max(period_s, limit_s), period_s, max(period_s, limit_s * 1.1)])
    keywords = {"num_workers": workers, **({} if stream.workers else {"persistent_workers": True})}
    write = ", ".join(f"{name}={value}" for name, value in keywords.items())
    yield Cure("workers", rate, f"{_place(stream)}: DataLoader(..., {write})", "", keywords)


def _persistent(stream: Stream) -> Iterator[Cure]:
    if stream.workers == 0 or stream.info.get("persistent") or stream.start_share < NEGLIGIBLE_SHARE:
        return
    batch_s = sum(stream.parts.values()) * stream.images
    more_s = max(stream.start_s - stream.usual_s, 1e-9)
    kept = [min(1.0, times * batch_s / more_s) for times in (1.0, 0.0, 2.0)]
    periods_s = [stream.period_s * (1 - stream.start_share * (1 - each)) for each in kept]
    write = f"{_place(stream)}: DataLoader(..., persistent_workers=True)"
    yield Cure("persistent_workers", _ranged(stream, periods_s), write, "", {"persistent_workers": True})


def _pinned(stream: Stream) -> Iterator[Cure]:
    """A copy from pinned memory runs beside the computing: at most what the copy takes today is gained."""
    if not stream.on_device or stream.info.get("pinned"):
        return
    slow_s, fast_s = (stream.info.get("bytes", 0) / rate for rate in (4e9, 12e9))
    periods_s = [stream.period_s - min(each, stream.wait_s) for each in (fast_s, slow_s, 0.0)]
    yield Cure(
        "pin_memory", _ranged(stream, periods_s), f"{_place(stream)}: DataLoader(..., pin_memory=True)"
    )


def _simd(stream: Stream) -> Iterator[Cure]:
    total_s = sum(stream.parts.values())
    if "post" in stream.info.get("pillow", "post") or not stream.parts.get("resize"):
        return
    share = stream.parts["resize"] / total_s
    factors = [1 - share * (1 - kept) for kept in (sum(_SIMD) / 2, *_SIMD)]
    write = "pip uninstall pillow && pip install pillow-simd"
    yield Cure("pillow-simd", _ranged(stream, [_slower(stream, each) for each in factors]), write)


def sentences(stream: Stream, streams: Sequence[Stream], gpu_price: float | None = None) -> list[str]:
    """How much the training waits and what that costs, then what it waits for.

    Args:
        streams: all, to say which rank is the slowest.
        gpu_price: dollars an hour.
    """
    who = {TRAINING: "Training waits", READING: "The script waits", VALIDATION: "Validation waits"}[
        stream.role
    ]
    ranks = [one for one in streams if one.role == stream.role and one.rank is not None]
    of_rank = f" in rank {stream.rank}, the slowest of {len(ranks)}," if len(ranks) > 1 else ""
    share = stream.share
    answer = (
        f"{who}{of_rank} {percent(share.median)} ({percent(share.low)} to {percent(share.high)}) of the time "
        f"for its batches: {number(stream.images_per_s)} images/s, without waiting "
        f"{number(stream.images / max(stream.step_s, 1e-9))}."
    )
    if stream.ahead:
        return [
            f"{who[:-6]} reads its batches in a thread of its own, ahead of the steps: how much it waits "
            f"cannot be told. Name the iterator that the steps take from: --loader MODULE:FUNCTION."
        ]
    said = [answer]
    if gpu_price is not None:
        lost = gpu_price * max(1, len(ranks)) * share.median
        said.append(f"That costs ${lost:.2f} of each hour.")
    if not waits(stream):
        return [*said, "Change nothing: another loader would not make it faster."]
    most = stage(stream)
    if not most:
        why = f" ({stream.note})" if stream.note else ""
        return [*said, f"What it waits for could not be told: its samples were not timed{why}."]
    said.append(f"It waits for {STAGES[most]}.")
    if most in ("workers", "start"):
        said.append(
            f"The first batch of an epoch takes {duration(stream.start_s)}, "
            f"the others {duration(stream.usual_s)}."
        )
    elif total_s := sum(stream.parts.values()):
        parts = sorted(stream.parts.items(), key=lambda each: -each[1])
        told = ", ".join(f"{STAGES[name]} {percent(s / total_s)}" for name, s in parts if s > 0.005 * total_s)
        said.append(f"Of the {duration(total_s)} that a sample takes in one process: {told}.")
    if stream.info["kind"] == "DataLoader" and not stream.shows_pictures:
        kinds = ", ".join(stream.info.get("kinds", ["something else"]))
        said.append(
            f"Its batches are {kinds}, and no picture is decoded: only the DataLoader can be changed."
        )
    return said


def convert_cost(size_bytes: float, seconds: float) -> str:
    """What converting takes."""
    return f"{human_bytes(int(size_bytes))} on disk, {duration(seconds)} to convert"


def compared(cure: Cure, before: Stream, after: Stream) -> str:
    """What a cure brought beside what was predicted."""
    predicted = cure.images_per_s
    return (
        f"With {cure.name}: {number(after.images_per_s)} images/s, "
        f"{after.images_per_s / before.images_per_s:.2f} times as many as before; predicted were "
        f"{number(predicted.median)} ({number(predicted.low)} to {number(predicted.high)}). It waits "
        f"{percent(after.share.median)} of the time, before {percent(before.share.median)}."
    )


def row(stream: Stream) -> list[str]:
    """Of the table of streams."""
    rank = "" if stream.rank is None else f"rank {stream.rank}"
    workers = counted(stream.workers, "worker") if stream.info["kind"] == "DataLoader" else ""
    what = f"{stream.info.get('dataset')} {stream.info.get('root') or ''}".strip()
    return [
        " ".join(filter(None, [stream.role, rank])),
        ", ".join(filter(None, [what, workers])),
        str(stream.info.get("where", "")),
        f"{stream.batches:,}",
        percent(stream.share.median),
        duration(stream.wait_s),
        duration(stream.step_s),
    ]


TITLES = ("stream", "data", "made at", "batches", "waits", "wait", "step")


def to_json(stream: Stream) -> dict[str, Any]:
    """Plain JSON values."""
    figures = (
        "batches",
        "images",
        "images_per_s",
        "period_s",
        "wait_s",
        "step_s",
        "start_s",
        "start_share",
    )
    return {
        "role": stream.role,
        "rank": stream.rank,
        **{name: getattr(stream, name) for name in figures},
        "share": [stream.share.median, stream.share.low, stream.share.high],
        "stage": stage(stream) if waits(stream) else "",
        "parts": dict(stream.parts),
        **{name: value for name, value in stream.info.items() if name != "key"},
    }
