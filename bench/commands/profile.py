"""`bench profile`: where the time of a few steps goes, by torch's profiler."""

import itertools
import json
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from bench.commands.options import PATH, PLACE, chosen_trainer, option, run_options
from bench.machine.hardware import accelerator_of, describe_machine
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import READS
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import CHOICES, EPILOG, resolve
from bench.measure.trial import measure
from bench.report.words import counted
from loaders.dataset import RAW, open_split
from precache.console import commandline
from precache.console.tables import new_console
from precache.errors import DatasetError, SettingError, check_choice, check_range
from precache.storage.urls import Location

WAIT, STEP = "wait for batch", "train step"
_DATA = Path("data")
_WIDTH = 100
_STEPS, _BATCH_SIZE = 20, 64
# A CPU computes, too: the profile of an emulated trainer would show it asleep. So few and small steps end
# within half a minute on two cores.
_ON_CPU, _CPU_STEPS, _CPU_BATCH_SIZE = "resnet18", 10, 16
_NAME_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operator over all steps; seconds are its own, without those that it calls."""

    name: str
    calls: int
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiled run spent its time on.

    Attributes:
        stage_s: seconds of the calling thread in each stage; on a GPU the step is over when its work is.
        operators: those with the most time of their own on the device, or on the host without a GPU.
    """

    steps: int
    stage_s: dict[str, float]
    operators: tuple[Operator, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time, 0 to 1, of each stage."""
        total_s = sum(self.stage_s.values())
        return {name: seconds / total_s for name, seconds in self.stage_s.items()}


class ProfiledClock:
    """Takes the times of so many steps, all under torch's profiler; a context manager."""

    def __init__(self, device: torch.device, steps: int) -> None:
        if device.type == "cpu":  # it would complain on stderr that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities)
        self._device = device
        self._running = ExitStack()
        self._span = ExitStack()
        self._names = iter((WAIT, STEP) * steps)
        self._marks: list[float] = []

    def __enter__(self) -> "ProfiledClock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.close()
        self._running.close()

    def mark(self) -> None:
        """End the wait or the step, begin the other."""
        if not self._marks:
            _synchronise(self._device)
            self._running.enter_context(self.profiler)
        elif len(self._marks) % 2 == 0:
            _synchronise(self._device)  # else the wait for the next batch would pay for this step
        self._span.close()
        self._marks.append(time.perf_counter())
        name = next(self._names, None)
        if name is not None:  # else the last step has ended
            self._span.enter_context(record_function(name))

    def intervals_s(self) -> tuple[float, ...]:
        """Seconds of each wait and step; ends the profile."""
        self.__exit__(None, None, None)
        return tuple(stop - start for start, stop in itertools.pairwise(self._marks))


def profile_trial(spec: Settings, trace_path: Path, top: int) -> Profile:
    """Run the trial of `spec` with its timed batches under the profiler; its trace goes to `trace_path`."""
    with ProfiledClock(spec.device, spec.batches) as clock:
        trial = measure(spec, clock=clock)
    clock.profiler.export_chrome_trace(str(trace_path))
    stage_s = {WAIT: sum(trial.wait_s), STEP: sum(trial.step_s)}
    return Profile(spec.batches, stage_s, _top_operators(clock.profiler, top))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _top_operators(profiler: Any, top: int) -> tuple[Operator, ...]:
    found = [
        Operator(event.key, event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
        for event in profiler.key_averages()
        if event.key not in (WAIT, STEP)
    ]
    return tuple(sorted(found, key=lambda one: (one.device_s, one.host_s), reverse=True)[:top])


@click.command(name="profile", cls=commandline.Command, epilog=EPILOG)
@click.argument("folder", type=PLACE, required=False)
@click.option("--backend", default="auto", show_default=True, help=f"auto or {', '.join(BACKENDS)}.")
@option("trainer", {"help": f"One of: {CHOICES}; auto is resnet50 on a GPU, {_ON_CPU} on a CPU."})
@option("trainer_rate")
@click.option("--steps", type=int, help=f"Profiled steps.  [default: {_STEPS}; auto on a CPU: {_CPU_STEPS}]")
@click.option(
    "--batch-size",
    type=int,
    help=f"Samples per batch.  [default: {_BATCH_SIZE}, or what there is; auto on a CPU: {_CPU_BATCH_SIZE}]",
)
@run_options("warmup", "amp", "workers", "size", "device")
@click.option("--top", default=15, show_default=True, help="Operators in the table.")
@click.option("--out", type=PATH, required=True, help="Folder for the files.")
def command(
    folder: Location | None,
    backend: str,
    trainer: str,
    trainer_rate: float | None,
    steps: int | None,
    batch_size: int | None,
    top: int,
    out: Path,
    settings: Settings,
) -> None:
    """Say where the time of a few training steps goes: waiting, operators, and a trace to look at.

    Operators are those of the calling thread and of the GPU: threads and processes of the loader are not
    among them. Profiling slows each operator down a little.

    FOLDER defaults to the one in data/ that the backend is made for. The trace opens in
    https://ui.perfetto.dev and in chrome://tracing.
    """
    device = settings.device
    trainer = chosen_trainer(trainer, trainer_rate) or trainer
    small = trainer == "auto" and device.type == "cpu"
    trainer = _ON_CPU if small else resolve(trainer, device)
    steps = steps if steps is not None else _CPU_STEPS if small else _STEPS
    for name, value in (("steps", steps), ("top", top)):
        check_range(name, value, 1)
    settings = replace(settings, trainers=(trainer,), batches=steps)
    check_choice("backend", backend, [*BACKENDS, "auto"])
    if out.exists() and not out.is_dir():
        raise SettingError(f"{out}: is a file; name a folder")
    if folder is None:
        folder = _DATA / ("raw" if backend == "auto" else READS[backend][0])
    data = open_split(folder, "train")
    if batch_size is None:
        batch_size = max(1, min(_CPU_BATCH_SIZE if small else _BATCH_SIZE, len(data.ids)))
    if backend != "auto" and data.kind not in READS[backend]:
        kind = "pytorch" if data.kind == RAW else data.kind
        raise DatasetError(
            f"{folder}: holds {data.kind}, which {backend} does not read; use backend {kind!r}"
        )
    check_fills_batch(batch_size, len(data.ids))
    settings = replace(settings, batch_size=batch_size)
    spec = replace(
        settings.trial(backend=backend, path=folder, trainer=trainer, classes=len(data.classes)),
        monitored=False,  # its thread would be in the trace
    )
    data.served_size(spec.size)
    out.mkdir(parents=True, exist_ok=True)
    found = profile_trial(spec, out / "trace.json", top)
    content = {**asdict(found), "shares": found.shares}
    (out / "profile.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _print(found)
    click.echo(
        f"trainer {trainer}, batch {batch_size} of {spec.size}x{spec.size}, "
        f"{counted(spec.workers or 0, 'worker')}, {counted(steps, 'step')} after {spec.warmup};"
    )
    click.echo(_machine(device))
    click.echo(f"wrote {out / 'trace.json'} (open it in https://ui.perfetto.dev) and {out / 'profile.json'}")


def _machine(device: torch.device) -> str:
    machine = describe_machine(device)
    return (
        f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; torch "
        f"{machine['torch']}; {machine['date']}"
    )


def _answer(found: Profile) -> str:
    """Whether training waits, first of all that is printed."""
    wait_ms, step_ms = (found.stage_s[name] / found.steps * 1e3 for name in (WAIT, STEP))
    return (
        f"Training waits {found.shares[WAIT]:.0%} of the time for batches: {wait_ms:,.1f} ms per step, and "
        f"computes {step_ms:,.1f} ms."
    )


def _print(found: Profile) -> None:
    click.echo(f"{_answer(found)}\n")
    on_device = any(one.device_s for one in found.operators)
    table = Table(box=None, pad_edge=False)
    table.add_column("operator", no_wrap=True, max_width=_NAME_WIDTH)
    for title in ("calls", "host ms", *(["device ms"] if on_device else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found.operators:
        times_s = (one.host_s, one.device_s) if on_device else (one.host_s,)
        table.add_row(one.name, f"{one.calls:,}", *(f"{seconds * 1e3:,.1f}" for seconds in times_s))
    if found.operators:
        new_console(width=_WIDTH).print(table)
    else:
        click.echo("No operators: this trainer computes nothing. --trainer resnet18 shows those of a step.")
