"""The result of `bench watch`: how much a training waits, for what, and what would change that. Pure.

A trial is a stream of `bench.report.waiting`, what was measured of another data set in its place, or what to
write into the script for a change; so a result can be made again from its file.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench.report import spikes, waiting
from bench.report.result import Result, Row, Trial
from bench.report.stats import Estimate, disturbance, is_disturbed, quotient
from bench.report.waiting import (
    FEWEST,
    READING,
    STAGES,
    TRAINING,
    VALIDATION,
    Change,
    Machine,
    Replaced,
    Stream,
    warm_up,
)
from bench.report.words import duration, machine_line, number, percent
from precache.reporting import counted, human_bytes

STREAM, REPLACED, PASTE = "stream", "replaced", "paste"
"""What a trial is of."""
_BUSY = 0.85  # of the CPUs: more workers have nothing to run on
_WORTH_SAYING = 1.1  # times the rate: steps alone are that much quicker
_VERSIONS = ("python", "torch", "pillow")
_COLUMNS = ("images_per_s", "gain", "wait_share", "wait_s", "step_s", "takes")
_SERIES = ("waits_s", "steps_s", "starts")
_ESTIMATES = ("share", "all_share")
_WHO = {TRAINING: "Training", READING: "The script", VALIDATION: "Validation"}


def stream_to_trial(position: int, stream: Stream) -> Trial:
    """The stream as a file keeps it; `stream_from_trial` reads it back."""
    numbers: dict[str, float] = {f"{part}_part_s": seconds for part, seconds in stream.parts.items()}
    for name in _ESTIMATES:
        numbers |= _estimate_numbers(name, getattr(stream, name))
    for each in fields(Stream):
        value = getattr(stream, each.name)
        if isinstance(value, (bool, int, float)) and each.name != "rank":
            numbers[each.name] = float(value)
    info = {name: value for name, value in stream.info.items() if name not in ("event", "stream")}
    return Trial(
        key={
            "what": STREAM,
            "position": position,
            "role": stream.role,
            "rank": stream.rank,
            "info": info,
            "source": dict(stream.source),
        },
        numbers=numbers,
        series={name: tuple(map(float, getattr(stream, name))) for name in _SERIES},
        facts={"note": stream.note},
    )


def stream_from_trial(trial: Trial) -> Stream:
    """The stream that `stream_to_trial` wrote."""
    numbers = trial.numbers
    end = "_part_s"
    return Stream(
        info=trial.key["info"],
        source=trial.key["source"],
        role=trial.key["role"],
        rank=trial.key["rank"],
        batches=int(numbers["batches"]),
        images=numbers["images"],
        period_s=numbers["period_s"],
        wait_s=numbers["wait_s"],
        step_s=numbers["step_s"],
        share=_read_estimate(numbers, "share"),
        start_s=numbers["start_s"],
        usual_s=numbers["usual_s"],
        start_share=numbers["start_share"],
        alone_s=numbers.get("alone_s"),
        step_cpu_s=numbers["step_cpu_s"],
        process_cpu_s=numbers["process_cpu_s"],
        parts={name.removesuffix(end): value for name, value in numbers.items() if name.endswith(end)},
        waits_s=trial.series["waits_s"],
        steps_s=trial.series["steps_s"],
        starts=tuple(map(int, trial.series["starts"])),
        on_device=bool(numbers["on_device"]),
        ahead=bool(numbers["ahead"]),
        loaders=int(numbers["loaders"]),
        all_share=_read_estimate(numbers, "all_share"),
        note=trial.facts["note"],
    )


def _estimate_numbers(name: str, value: Estimate) -> dict[str, float]:
    return {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}


def _read_estimate(numbers: Mapping[str, float], name: str) -> Estimate:
    return Estimate(numbers[name], numbers[f"{name}_low"], numbers[f"{name}_high"])


def replaced_to_trial(replaced: Replaced) -> Trial:
    """What was measured of another data set, as a file keeps it."""
    numbers: dict[str, float] = {}
    if replaced.factor is not None:
        numbers |= _estimate_numbers("factor", replaced.factor)
    if replaced.rate is not None:
        numbers |= _estimate_numbers("rate", replaced.rate)
    return Trial({"what": REPLACED, "name": replaced.name}, numbers, facts={"cost": replaced.cost})


def _replaced_from_trial(trial: Trial) -> Replaced:
    factor = _read_estimate(trial.numbers, "factor") if "factor" in trial.numbers else None
    rate = _read_estimate(trial.numbers, "rate") if "rate" in trial.numbers else None
    return Replaced(trial.key["name"], factor, rate, trial.facts["cost"])


def paste_to_trial(change: Change, lines: Sequence[str]) -> Trial:
    """What to write into the script for the change."""
    facts = {"lines": "\n".join(lines), "arguments": json.dumps(dict(change.arguments))}
    return Trial({"what": PASTE, "name": change.name}, facts=facts)


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
    gpu_price: float | None = None,
) -> Result:
    """Work out what the streams of a script say.

    Args:
        settings: `script`, `exit_code`, `ended` (by bench), `interrupted`, `batches` (that were seen),
            `fault` (of the hook), `left_out` (sentences on what cannot replace the data set), and `cpus`,
            `ours`, `others` of `bench.report.waiting.Machine`.
        gpu_price: dollars an hour.
    """
    streams = [stream_from_trial(trial) for trial in trials if trial.key["what"] == STREAM]
    replaced = [_replaced_from_trial(trial) for trial in trials if trial.key["what"] == REPLACED]
    lines = {
        trial.key["name"]: tuple(trial.facts["lines"].splitlines())
        for trial in trials
        if trial.key["what"] == PASTE
    }
    cpus = Machine(settings["cpus"], settings["ours"], settings["others"])
    answer: list[tuple[str, ...]] = []
    rows: list[Row] = []
    failed = settings["exit_code"] != 0 and not settings["ended"]
    if failed or not streams:
        answer.append((_why_nothing(settings, failed),))
        rows = [_make_row(stream) for stream in streams]
    else:
        first = streams[0]
        changes = [
            change
            for change in waiting.find_changes(first, streams, cpus, replaced)
            if lines.get(change.name)  # else there is nothing to write for it
        ]
        answer.append(tuple(sentences(first, streams, cpus, gpu_price)))
        if not changes and (why := _why_no_change(first, cpus)):
            answer.append((why,))
        if settings["left_out"]:
            answer.append(tuple(settings["left_out"]))
        rows.append(_make_row(first))
        rows += [_make_change_row(first, change, lines.get(change.name, ())) for change in changes]
        rows += [_make_row(stream) for stream in streams[1:]]
    return Result(
        command="watch",
        question="Does the training wait for its batches?",
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(rows),
        thing="what",
        columns=_COLUMNS,
        answer=tuple(answer),
        bars="images_per_s",
        conditions=tuple(_conditions(machine, settings, streams)),
        skipped=dict(skipped),
        summary={"streams": [_summarise(stream) for stream in streams]},
    )


def sentences(
    stream: Stream, streams: Sequence[Stream], machine: Machine, gpu_price: float | None = None
) -> list[str]:
    """How much the training waits and what that costs, then what it waits for.

    Args:
        streams: all, to say which rank is the slowest.
        gpu_price: dollars an hour.
    """
    who = _WHO[stream.role]
    if stream.ahead:
        return [
            f"{who} reads its batches in a thread of its own, ahead of the steps: how much it waits cannot "
            f"be told from here."
        ]
    if stream.batches < FEWEST:
        return [
            f"Too few batches to say whether it waits: {counted(stream.batches, 'batch', 'batches')} after "
            f"the first {warm_up(stream.info)}, and {FEWEST} are needed. Let the script train for longer."
        ]
    ranks = waiting.count_ranks(stream, streams)
    of_rank = f" in rank {stream.rank}, the slowest of {ranks}," if ranks > 1 else ""
    of_loaders = f", which come from {stream.loaders} loaders" if stream.loaders > 1 else ""
    share = stream.all_share
    said = [
        f"{who} waits{of_rank} {percent(share.median)} ({percent(share.low)} to {percent(share.high)}) of "
        f"the time for its batches{of_loaders}: {number(stream.images_per_s)} images/s, "
        f"{_without_waiting(stream, machine)}."
    ]
    if gpu_price is not None:
        lost = gpu_price * ranks * share.median
        said.append(f"That costs ${lost:.2f} of each hour.")
    if busy := disturbance(machine.others, ""):
        said.append(busy)
    if not waiting.waits(stream):
        return [*said, "Change nothing: another loader would not make it faster."]
    most = waiting.stage(stream)
    of_which = f" of {_made_at(stream)}" if stream.loaders > 1 else ""
    if of_which:
        said.append(f"It waits most for the loader{of_which}.")
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


def _without_waiting(stream: Stream, machine: Machine) -> str:
    """What its steps would give; alone where workers slow them down, which a busy machine does not tell."""
    left = max(1 - stream.all_share.median, 1e-9)
    without = stream.images_per_s / left
    text = f"without waiting {number(without)}"
    if stream.alone_s is None or stream.workers == 0 or is_disturbed(machine.others):
        return text
    alone = stream.images / max(stream.alone_s, 1e-9)
    if alone < without * _WORTH_SAYING:
        return text
    return f"{text}, and {number(alone)} if no worker took CPU time from its steps"


def _why_no_change(stream: Stream, machine: Machine) -> str:
    """The sentence for a training that waits where nothing is advised; empty where that is no wonder."""
    if not waiting.can_change(stream):
        return ""
    if disturbance(machine.others):
        return "No change is advised: what each would bring is not known beside so much other work."
    if machine.ours is not None and machine.ours >= _BUSY:
        return (
            f"No change is advised: more workers would not help, for this script keeps the "
            f"{counted(machine.cpus, 'CPU')} {percent(machine.ours)} busy."
        )
    return "No change is advised: none would surely bring more than today's rate."


def _why_nothing(settings: Mapping[str, Any], failed: bool) -> str:
    """The sentence for a script of which nothing can be concluded."""
    seen = settings["batches"]
    batches = counted(seen, "batch", "batches")
    if failed:
        when = f"after {batches}" if seen else "before it asked for a batch"
        rest = ": what is below was seen until then, and nothing follows from it" if seen else ""
        return f"The script ended with exit code {settings['exit_code']} {when}{rest}."
    if seen:
        return (
            f"Too few batches to say whether it waits: {batches}, and not {FEWEST} beyond the first ones. "
            f"Let the script train for longer."
        )
    if settings["fault"]:
        return f"The batches could not be timed: {settings['fault']}"
    until = " until it was interrupted" if settings["interrupted"] else ""
    return (
        f"The script asked{until} for no batch of a DataLoader of torch, nor of loaders.build: other loaders "
        f"cannot be timed."
    )


def _conditions(
    machine: Mapping[str, str], settings: Mapping[str, Any], streams: Sequence[Stream]
) -> list[str]:
    said = [f"{machine_line(machine, _VERSIONS)}."]
    if not streams:
        return said
    of = "the device's idle time" if streams[0].on_device else "from asking for a batch to having it"
    said.append(f"Waits are {of}; ranges are over sections of what was watched, without the first batches.")
    if settings["interrupted"]:
        said.append("It was interrupted: this is what was seen until then.")
    elif settings["ended"]:
        said.append(
            "bench ended the script once it had seen enough; what it wrote while it ended is no fault."
        )
    return said


def _summarise(stream: Stream) -> dict[str, Any]:
    """What a program wants to know of a stream."""
    return {
        "role": stream.role,
        "rank": stream.rank,
        "made_at": stream.info.get("where", ""),
        "dataset": stream.info["dataset"],
        "images_per_s": stream.images_per_s,
        "wait_share": stream.share.median,
        "stage": waiting.stage(stream) if waiting.waits(stream) else "",
    }


def _made_at(stream: Stream) -> str:
    """`file:line` of its loader, below the working folder of the script as one types it."""
    where = str(stream.info.get("where", ""))
    return where.removeprefix(f"{stream.source.get('folder') or ''}/")


def _make_row(stream: Stream) -> Row:
    rank = "" if stream.rank is None else f", rank {stream.rank}"
    place = f" ({os.path.basename(_made_at(stream))})" if _made_at(stream) else ""
    workers = f", {counted(stream.workers, 'worker')}" if stream.info["kind"] == "DataLoader" else ""
    root = str(stream.source.get("root") or stream.info.get("root") or "")
    root = root.removeprefix(f"{stream.source.get('folder') or ''}/")
    timed = spikes.analyse(stream.waits_s, stream.steps_s, stream.starts, stream.workers)
    return Row(
        name=f"{stream.role}{rank}{place}",
        key={
            "stream": stream.role,
            "rank": stream.rank,
            "made_at": _made_at(stream),
            "dataset": stream.info["dataset"],
        },
        values={
            "images_per_s": _exactly(stream.images_per_s),
            "wait_share": stream.share,
            "wait_s": _exactly(stream.wait_s),
            "step_s": _exactly(stream.step_s),
            "batches": _exactly(stream.batches),
        },
        texts={
            "data": " ".join(filter(None, [str(stream.info["dataset"]), root])) + workers,
            "made_at": _made_at(stream),
            "gain": "",
            "takes": "",
        },
        batches=timed,
        findings=timed.findings,
        baseline=stream.role == TRAINING,
    )


def _make_change_row(stream: Stream, change: Change, lines: Sequence[str]) -> Row:
    today = _exactly(stream.images_per_s)
    nothing = dict.fromkeys(("wait_share", "wait_s", "step_s", "batches", "data", "made_at"), "")
    return Row(
        name=f"with {change.name}",
        key={"change": change.name},
        values={"images_per_s": change.images_per_s, "gain": quotient(change.images_per_s, today)},
        texts={**nothing, "takes": change.cost},
        paste=tuple(lines),
    )


def _exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


def convert_cost(size_bytes: float, seconds: float) -> str:
    """What converting takes."""
    return f"{human_bytes(int(size_bytes))} on disk, {duration(seconds)} to convert"
