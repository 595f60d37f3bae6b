"""Result of `bench watch`: how much a training waits, for what, and what would change that. Pure.

`bench.report.waiting` has the analysis, and says what a stream and a change are. The trials in the file of a
result are streams, from which the result can be made again.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench.report import waiting
from bench.report.advice import advise
from bench.report.cages import CageFinding, find_cage
from bench.report.change import Basis, Change
from bench.report.result import Result, Row, Trial
from bench.report.sentences import describe_batches, disturbance
from bench.report.stats import Estimate, analyse_batches, exactly, is_disturbed, quotient
from bench.report.waiting import (
    BOUNDS_HELD,
    FEWEST,
    READING,
    TRAINING,
    UNEXPLAINED,
    VALIDATION,
    Machine,
    SamplePart,
    Stream,
    WaitCause,
    warm_up,
)
from bench.report.words import duration, machine_line, number, percent
from precache.reporting import quantity

_BUSY_SHARE = 0.85  # share of busy CPUs from which on more workers have nothing to run on
_MIN_SPEEDUP = 1.1  # speedup from which on the rate of steps timed alone is mentioned
_VERSIONS = ("python", "torch", "pillow")
_COLUMNS = ("images_per_s", "gain", "wait_share", "wait_s", "step_s")
_SERIES = ("waits_s", "steps_s", "starts")
_TRIAL_NAMES = {"wait_share": "share", "all_wait_share": "all_share", "start_wait_share": "start_share"}
"""Names in a result's file of those fields of `Stream` that are not named as in `Stream`."""
_CAUSES = {
    WaitCause.OTHERS: "The script needs CPUs of its own, or a time without the other work.",
    WaitCause.THREADS: "Most likely threads of OpenMP keep CPUs busy while they wait for each other: try "
    "OMP_WAIT_POLICY=passive in the environment, or fewer threads, by OMP_NUM_THREADS=1 there, "
    "torch.set_num_threads(1) or cv2.setNumThreads(1).",
    WaitCause.UNSEEN: "Likely causes are samples that take much longer than others, files that come from a "
    "disk or a network for the first time, locks, and a sampler or a collate function that waits.",
}
"""What may be behind each of UNEXPLAINED, in a sentence."""
_STAGES = {
    WaitCause.READ: "reading files",
    WaitCause.DECODE: "decoding by {name}",
    WaitCause.TRANSFORM: "{name}",
    WaitCause.PYTHON: "other Python of the dataset",
    WaitCause.COLLATE: "collating",
    WaitCause.COPY: "copying batches between processes",
    WaitCause.START: "the first batch of each epoch",
    WaitCause.WORKERS: "workers that start anew each epoch",
    WaitCause.OTHERS: "CPUs that other processes use",
    WaitCause.THREADS: "CPUs that other threads of the script use",
    WaitCause.UNSEEN: "something that its samples do not show when they are timed alone",
}
"""Description of each stage; `name` is that of a part."""
_REMEDIES = {
    WaitCause.READ: "put the files on a faster disk, or into few large files, as precache convert does",
    WaitCause.DECODE: "convert the pictures once to the size that is trained on, with precache convert",
    WaitCause.TRANSFORM: "leave {name} out for one run, to see what it costs; then find a cheaper one, or "
    "apply it to whole batches on the device",
    WaitCause.PYTHON: "profile the __getitem__ of the dataset",
    WaitCause.COLLATE: "return tensors of one shape and dtype from the dataset, and stack them",
    WaitCause.COPY: "make batches smaller in bytes: uint8 instead of float32, normalised on the device",
    WaitCause.START: "look at what the dataset does when an epoch starts",
}
"""First thing to try where no argument of the DataLoader helps, by stage."""
_SUBJECTS = {TRAINING: "Training", READING: "The script", VALIDATION: "Validation"}


def stream_to_trial(position: int, stream: Stream) -> Trial:
    """Make a trial of a stream; `stream_from_trial` reads it back.

    Args:
        position: position of the stream among all streams.
        stream: stream to store.
    """
    numbers: dict[str, float] = {}
    for name in ("wait_share", "all_wait_share"):
        numbers |= _estimate_numbers(_TRIAL_NAMES[name], getattr(stream, name))
    for name in (field.name for field in fields(Stream)):
        value = getattr(stream, name)
        if isinstance(value, (bool, int, float)) and name not in ("rank", "made", "remade"):
            numbers[_TRIAL_NAMES.get(name, name)] = float(value)
    info = {name: value for name, value in stream.info.items() if name not in ("event", "stream")}
    return Trial(
        key={
            "position": position,
            "role": stream.role,
            "rank": stream.rank,
            "info": info,
            "parts": [[part.stage.value, part.name, part.seconds] for part in stream.parts],
            "made": stream.made,
            "remade": stream.remade,
        },
        numbers=numbers,
        series={name: tuple(map(float, getattr(stream, name))) for name in _SERIES},
        facts={"note": stream.note},
    )


def stream_from_trial(trial: Trial) -> Stream:
    """Make a stream from the trial that `stream_to_trial` made."""
    numbers = trial.numbers
    return Stream(
        info=trial.key["info"],
        made=trial.key["made"],
        remade=trial.key["remade"],
        role=trial.key["role"],
        rank=trial.key["rank"],
        batches=int(numbers["batches"]),
        images=numbers["images"],
        period_s=numbers["period_s"],
        wait_s=numbers["wait_s"],
        step_s=numbers["step_s"],
        wait_share=_read_estimate(numbers, "share"),
        start_s=numbers["start_s"],
        usual_s=numbers["usual_s"],
        start_wait_share=numbers["start_share"],
        alone_s=numbers.get("alone_s"),
        step_cpu_s=numbers["step_cpu_s"],
        process_cpu_s=numbers["process_cpu_s"],
        parts=waiting.make_parts(trial.key["parts"]),
        waits_s=trial.series["waits_s"],
        steps_s=trial.series["steps_s"],
        starts=tuple(map(int, trial.series["starts"])),
        on_device=bool(numbers["on_device"]),
        ahead=bool(numbers["ahead"]),
        loaders=int(numbers["loaders"]),
        all_wait_share=_read_estimate(numbers, "all_share"),
        note=trial.facts["note"],
    )


def _estimate_numbers(name: str, value: Estimate) -> dict[str, float]:
    return {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}


def _read_estimate(numbers: Mapping[str, float], name: str) -> Estimate:
    return Estimate(numbers[name], numbers[f"{name}_low"], numbers[f"{name}_high"])


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    gpu_price: float | None = None,
) -> Result:
    """Make the result from the streams of a script.

    Args:
        settings: `script`, `exit_code`, `ended` (by bench), `interrupted`, `batches` (number seen), `fault`
            (error of the hook), `build` (lines on `loaders.build` in the place of the first stream's
            loader), the fields of `bench.report.waiting.Machine`, and those that `find_cage` reads.
        trials: streams.
        gpu_price: dollars per hour of an accelerator; None leaves money out.
    """
    streams = [stream_from_trial(trial) for trial in trials]
    cpus = Machine(settings["cpus"], settings["script_cpu_share"], settings["other_cpu_share"])
    answer: list[tuple[str, ...]] = []
    rows: list[Row] = []
    cage: CageFinding | None = None
    failed = settings["exit_code"] != 0 and not settings["ended"]
    if failed or not streams:
        changes = []
        answer.append((_explain_no_conclusion(settings, failed),))
        rows = [_make_row(stream) for stream in streams]
    else:
        first = streams[0]
        cage = find_cage(first, streams, settings)
        if cage is not None:
            cpus = cpus.with_cpus(cage.cpus)
        changes = [change for change in waiting.find_changes(first, streams, cpus) if advise(first, change)]
        if cage is not None:
            changes = []  # what they would bring is not known as long as the limit is there
        answer.append(tuple(describe_waiting(first, streams, cpus, gpu_price)))
        stage = waiting.longest_stage(first, streams, cpus)
        if cage is not None:
            answer.append((cage.sentence,))
        elif changes and changes[0].basis == Basis.UNKNOWN:
            answer.append((_explain_untested(stage, cpus),))
        elif not changes and waiting.can_change(first) and (remedy := _describe_remedy(first, stage, cpus)):
            answer.append((remedy,))
        rows.append(_make_row(first))
        rows += [_make_change_row(first, change) for change in changes]
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
        conditions=tuple(_conditions(machine, settings, streams, changes)),
        next_step=settings["build"],
        summary={
            "cage": "" if cage is None else cage.kind.value,
            "streams": [_summarise(stream, streams, cpus) for stream in streams],
        },
    )


def describe_waiting(
    stream: Stream, streams: Sequence[Stream], machine: Machine, gpu_price: float | None = None
) -> list[str]:
    """Write how much a stream waits, what that costs, and what it waits for, in sentences.

    Args:
        stream: stream of the slowest rank.
        streams: all streams, to count the ranks.
        machine: CPUs of the machine.
        gpu_price: dollars per hour of an accelerator; None leaves money out.
    """
    subject = _SUBJECTS[stream.role]
    if stream.ahead:
        return [
            f"{subject} reads its batches in a thread of its own, ahead of the steps: how much it waits "
            f"cannot be told from here."
        ]
    if stream.batches < FEWEST:
        return [
            f"Too few batches to say whether it waits: {quantity(stream.batches, 'batch', 'batches')} after "
            f"the first {warm_up(stream.info)}, and {FEWEST} are needed. Let the script train for longer."
        ]
    ranks = waiting.count_ranks(stream, streams)
    of_rank = f" in rank {stream.rank}, the slowest of {ranks}," if ranks > 1 else ""
    of_loaders = f", which come from {stream.loaders} loaders" if stream.loaders > 1 else ""
    share = stream.all_wait_share
    sentences = [
        f"{subject} waits{of_rank} {percent(share.median)} ({percent(share.low)} to {percent(share.high)}) "
        f"of the time for its batches{of_loaders}: {number(stream.images_per_s)} images/s, "
        f"{_without_waiting(stream, machine)}."
    ]
    if gpu_price is not None:
        lost = gpu_price * ranks * share.median
        sentences.append(f"That costs ${lost:.2f} of each hour.")
    if busy := disturbance(machine.other_cpu_share, ""):
        sentences.append(busy)
    if not waiting.is_waiting(stream):
        return [*sentences, "Change nothing of its loader: another one would not make it faster."]
    if stream.loaders > 1:
        sentences.append(f"It waits most for the loader of {stream.info['where']}.")
    longest = waiting.longest_stage(stream, streams, machine)
    if not longest:
        why = f" ({stream.note})" if stream.note else ""
        return [*sentences, f"What it waits for could not be told: its samples were not timed{why}."]
    if longest in UNEXPLAINED:
        explained = percent(waiting.explained_share(stream, streams, machine))
        sentences.append(f"It waits for {_STAGES[longest]}.")
        sentences.append(f"Loading its samples explains {explained} of the wait. {_CAUSES[longest]}")
    elif longest in (WaitCause.WORKERS, WaitCause.START):
        sentences.append(f"It waits for {_STAGES[longest]}.")
        sentences.append(
            f"The first batch of an epoch takes {duration(stream.start_s)}, "
            f"the others {duration(stream.usual_s)}."
        )
    else:
        part = stream.parts[0]
        part_share = percent(part.seconds / stream.sample_s)
        sentences.append(f"It waits most for {_describe_part(part)}, which takes {part_share} of a sample.")
    if stream.parts:
        shares = [(_describe_part(part), part.seconds / stream.sample_s) for part in stream.parts]
        listed = ", ".join(f"{name} {percent(value)}" for name, value in shares if value > 0.005)
        sentences.append(f"Loading a sample takes one process {duration(stream.sample_s)}: {listed}.")
    if stream.info["kind"] == "DataLoader" and not stream.shows_pictures:
        kinds = ", ".join(stream.info.get("kinds", ["something else"]))
        sentences.append(
            f"Its batches are {kinds}, and no picture is decoded: only the DataLoader can be changed."
        )
    return sentences


def _without_waiting(stream: Stream, machine: Machine) -> str:
    """Describe the images/s of the steps without waiting, and alone where workers slow them down.

    On a busy machine it is not known whether workers or other processes slow steps down.
    """
    step_share = max(1 - stream.all_wait_share.median, 1e-9)
    without = stream.images_per_s / step_share
    text = f"without waiting {number(without)}"
    if stream.alone_s is None or stream.workers == 0 or is_disturbed(machine.other_cpu_share):
        return text
    alone = stream.images / max(stream.alone_s, 1e-9)
    if alone < without * _MIN_SPEEDUP:
        return text
    return f"{text}, and {number(alone)} if no worker took CPU time from its steps"


def _describe_part(part: SamplePart) -> str:
    return _STAGES[part.stage].format(name=part.name)


def _explain_untested(stage: WaitCause | None, machine: Machine) -> str:
    """Say that a change is one to try, and why nothing is predicted of it."""
    if is_disturbed(machine.other_cpu_share):
        why = "beside so much other work nothing can be predicted"
    elif not waiting.can_predict(stage, machine):
        why = "nothing can be predicted where the samples do not explain the wait"
    else:
        why = "it is not sure to bring more than today's rate"
    return f"The first change to try is below, untested: {why}. Make it, and watch again."


def _describe_remedy(stream: Stream, stage: WaitCause | None, machine: Machine) -> str:
    """Write what to try where no argument of a DataLoader helps; empty where the cause already says it."""
    if stream.info["kind"] != "DataLoader":
        return "Try first, untested: other settings of loaders.build; bench recommend measures some."
    if stage not in _REMEDIES:
        return ""
    name = stream.parts[0].name if stream.parts else ""
    remedy = f"Try first, untested: {_REMEDIES[stage].format(name=name)}."
    if machine.script_cpu_share is None or machine.script_cpu_share < _BUSY_SHARE:
        return remedy
    cpus, busy = quantity(machine.cpus, "CPU"), percent(machine.script_cpu_share)
    return f"More workers would not help: the script keeps the {cpus} {busy} busy. {remedy}"


def _explain_no_conclusion(settings: Mapping[str, Any], failed: bool) -> str:
    """Write the sentence for a script from which nothing can be concluded."""
    batch_count = settings["batches"]
    batches = quantity(batch_count, "batch", "batches")
    if failed:
        when = f"after {batches}" if batch_count else "before it asked for a batch"
        rest = ": what is below was seen until then, and nothing follows from it" if batch_count else ""
        return f"The script ended with exit code {settings['exit_code']} {when}{rest}."
    if batch_count:
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
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    streams: Sequence[Stream],
    changes: Sequence[Change],
) -> list[str]:
    sentences = [f"{machine_line(machine, _VERSIONS)}."]
    if not streams:
        return sentences
    waits = "the device's idle time" if streams[0].on_device else "from asking for a batch to having it"
    sentences.append(f"Waits are {waits}; ranges are over parts of the run, without the first batches.")
    if any(change.basis == Basis.BOUND for change in changes):
        right, tried = BOUNDS_HELD
        sentences.append(
            f"'At least' is a bound: of {tried} such changes in the lab, {right} brought as much."
        )
    if settings["interrupted"]:
        sentences.append("It was interrupted: this is what was seen until then.")
    elif settings["ended"]:
        sentences.append(
            "bench stopped the script once it had measured enough; ignore what it printed while it stopped."
        )
    return sentences


def _summarise(stream: Stream, streams: Sequence[Stream], machine: Machine) -> dict[str, Any]:
    """Summary of a stream for programs that read the file."""
    stage = waiting.longest_stage(stream, streams, machine)
    return {
        "role": stream.role,
        "rank": stream.rank,
        "made_at": stream.info["where"],
        "dataset": stream.info["dataset"],
        "images_per_s": stream.images_per_s,
        "wait_share": stream.wait_share.median,
        "stage": stage.value if stage is not None and waiting.is_waiting(stream) else "",
        "parts": [{"stage": part.stage, "name": part.name, "seconds": part.seconds} for part in stream.parts],
    }


def _make_row(stream: Stream) -> Row:
    rank = "" if stream.rank is None else f", rank {stream.rank}"
    where = stream.info["where"]
    file_name = f" ({os.path.basename(where)})" if where else ""
    workers = f", {quantity(stream.workers, 'worker')}" if stream.info["kind"] == "DataLoader" else ""
    timed = analyse_batches(stream.waits_s, stream.steps_s, stream.starts)
    return Row(
        name=f"{stream.role}{rank}{file_name}",
        key={
            "stream": stream.role,
            "rank": stream.rank,
            "made_at": where,
            "dataset": stream.info["dataset"],
        },
        values={
            "images_per_s": exactly(stream.images_per_s),
            "wait_share": stream.wait_share,
            "wait_s": exactly(stream.wait_s),
            "step_s": exactly(stream.step_s),
            "batches": exactly(stream.batches),
        },
        texts={
            "data": " ".join(filter(None, [stream.info["dataset"], stream.info["root"]])) + workers,
            "made_at": where,
            "gain": "",
        },
        batches=timed,
        sentences=tuple(describe_batches(timed, stream.workers)),
        baseline=stream.role == TRAINING,
    )


def _make_change_row(stream: Stream, change: Change) -> Row:
    today = exactly(stream.images_per_s)
    cells = dict.fromkeys(("wait_share", "wait_s", "step_s", "batches", "data", "made_at"), "")
    values = {"images_per_s": change.images_per_s, "gain": quotient(change.images_per_s, today)}
    if change.basis == Basis.UNKNOWN:
        cells |= {"images_per_s": "untested", "gain": ""}
        values = {}
    return Row(
        name=f"with {change.kind.value}",
        key={"change": change.kind.value, "arguments": dict(change.arguments)},
        values=values,
        texts=cells,
        paste=advise(stream, change),
    )
