"""`bench profile`: where the time of a few steps goes, by torch's profiler."""

import json
import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.commands.options import PLACE, run_options
from bench.machine.hardware import describe_machine
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import READS, open_for
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import CHOICES, EPILOG, resolve
from bench.measure.trial import HostClock, measure
from bench.report.words import counted, machine_line, say
from precache.cli import commandline
from precache.errors import check_choice
from precache.storage.urls import Location

WAIT, STEP = "wait for batch", "train step"
_DATA = Path("data")
# A CPU computes, too: the profile of an emulated trainer would show it asleep. Ten steps of so small a model
# and batch end within half a minute on two cores.
_ON_CPU = "resnet18"
_BATCH_SIZE = {"cuda": 64, "cpu": 16}
_SHOWN = 15  # operators; the file has all


class ProfiledClock(HostClock):
    """Takes the times of so many steps under torch's profiler, whose trace has names for waits and steps."""

    def __init__(self, device: torch.device, steps: int) -> None:
        super().__init__()
        if device.type == "cpu":  # it would complain on stderr that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities)
        self._device = device
        self._names = iter((WAIT, STEP) * steps)
        self._running, self._span = ExitStack(), ExitStack()

    def mark(self) -> None:
        """End the wait or the step, begin the other."""
        if len(self._marks) % 2 == 0 and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the wait for the next batch would pay for this step
        if not self._marks:
            self._running.enter_context(self.profiler)
        self._span.close()
        super().mark()
        for name in self._names:  # none after the last step
            self._span.enter_context(record_function(name))
            break

    def close(self) -> None:
        """End the profile."""
        self._span.close()
        self._running.close()


@click.command(name="profile", cls=commandline.Command, epilog=EPILOG)
@click.argument("folder", type=PLACE, required=False)
@click.option("--backend", default="auto", show_default=True, help=f"auto or {', '.join(BACKENDS)}.")
@run_options(
    *("trainer", "trainer_rate", "warmup", "amp", "workers", "size", "device"),
    trainer={"help": f"One of: {CHOICES}; auto is resnet50 on a GPU, {_ON_CPU} on a CPU."},
)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Profiled steps.")
@click.option(
    "--batch-size", type=int, help="Samples per batch.  [default: 64 or what there is; on a CPU 16]"
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="For the files.")
def command(
    folder: Location | None,
    backend: str,
    steps: int,
    batch_size: int | None,
    out: Path,
    settings: Settings,
) -> None:
    """Say where the time of a few training steps goes: waiting, operators, and a trace to look at.

    Operators are those of the calling thread and of the GPU: threads and processes of the loader are not
    among them. Profiling slows each operator down a little.

    FOLDER defaults to the one in data/ that the backend is made for. The trace opens in
    https://ui.perfetto.dev and in chrome://tracing.
    """
    check_choice("backend", backend, [*BACKENDS, "auto"])
    kind, trainer = settings.device.type, settings.trainer
    trainer = _ON_CPU if (kind, trainer) == ("cpu", "auto") else resolve(trainer, settings.device)
    folder = folder or _DATA / ("raw" if backend == "auto" else READS[backend][0])
    data = open_for(backend, folder)
    batch_size = min(_BATCH_SIZE[kind], len(data.ids)) if batch_size is None else batch_size
    check_fills_batch(batch_size, len(data.ids))
    told = {"trainer": trainer, "batch_size": batch_size, "batches": steps}
    # not monitored: its thread would be in the trace
    settings = settings.of(backend, folder, len(data.classes), **told, monitored=False)
    out.mkdir(parents=True, exist_ok=True)
    with closing(ProfiledClock(settings.device, steps)) as clock:
        trial = measure(settings, clock=clock)
    clock.profiler.export_chrome_trace(str(out / "trace.json"))
    stage_s = {WAIT: sum(trial.wait_s), STEP: sum(trial.step_s)}
    shares = {WAIT: trial.wait_share, STEP: 1 - trial.wait_share}
    found = {"steps": steps, "stage_s": stage_s, "shares": shares, "operators": _operators(clock.profiler)}
    (out / "profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wait_ms, step_ms = (seconds / steps * 1e3 for seconds in stage_s.values())
    say(
        f"Training waits {trial.wait_share:.0%} of the time for batches: {wait_ms:,.1f} ms per step, and "
        f"computes {step_ms:,.1f} ms."
    )
    by = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
    averages = clock.profiler.key_averages()
    click.echo("\n" + averages.table(sort_by=by, row_limit=_SHOWN, max_name_column_width=40))
    say(
        f"trainer {trainer}, batch {batch_size} of {settings.size}x{settings.size}, "
        f"{counted(settings.workers or 0, 'worker')}, {counted(steps, 'step')} after {settings.warmup}; "
        f"{machine_line(describe_machine(settings.device))}"
    )
    click.echo(f"wrote {out / 'trace.json'} (open it in https://ui.perfetto.dev) and {out / 'profile.json'}")


def _operators(profiler: profile) -> list[dict[str, Any]]:
    """Name, calls and seconds without those of operators that it calls; most time on the device first."""
    operators = [
        {
            "name": event.key,
            "calls": event.count,
            "host_s": event.self_cpu_time_total / 1e6,
            "device_s": event.self_device_time_total / 1e6,
        }
        for event in profiler.key_averages()
        if event.key not in (WAIT, STEP)
    ]
    return sorted(operators, key=lambda one: (one["device_s"], one["host_s"]), reverse=True)
