"""A few fed steps under torch's profiler: the trace, and which operators take the time."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from bench.machine.hardware import describe_machine
from bench.measure.candidates import Candidate, open_candidates
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import resolve
from bench.measure.trial import HostClock, measure
from bench.report.words import machine_line, say
from precache.errors import DatasetError
from precache.reporting import quantity

WAIT, STEP = "wait for batch", "train step"
STEPS = 10
# A CPU computes, too: the profile of an emulated trainer would show it asleep.
_ON_CPU = "resnet18"
_SHOWN = 15  # operators; the trace has all


def profile(
    candidates: Sequence[Candidate], settings: Settings, workers: int, batch_size: int, folder: Path
) -> None:
    """Profile STEPS steps that the first of the candidates feeds; print the operators, write the trace.

    Operators are those of the calling thread and of the GPU: threads and processes of the loader are not
    among them. Profiling slows each operator down a little.

    Args:
        folder: gets `trace.json`, which opens in https://ui.perfetto.dev and in chrome://tracing.
    """
    opened, failed = open_candidates(candidates)
    if not opened:
        raise DatasetError("; ".join(failed.values()))
    one = opened[0]
    device = settings.device
    asked = resolve(settings.trainer, device)
    is_emulated = asked.startswith("emulated")
    trainer = _ON_CPU if is_emulated else asked
    batch_size = min(batch_size, len(one.data))
    check_fills_batch(batch_size, len(one.data))
    settings = replace(
        settings.of(one.backend, one.reads, len(one.data.classes)),
        trainer=trainer,
        batch_size=batch_size,
        workers=workers,
        batches=STEPS,
        monitored=False,  # its thread would be in the trace
    )
    folder.mkdir(parents=True, exist_ok=True)
    with closing(_ProfiledClock(device, STEPS)) as clock:
        trial = measure(settings, clock=clock)
    trace = folder / "trace.json"
    clock.profiler.export_chrome_trace(str(trace))
    wait_ms, step_ms = (sum(trial.series[name]) / STEPS * 1e3 for name in ("wait_s", "step_s"))
    say(
        f"{one.label}: training waits {trial.numbers['wait_share']:.0%} of the time for batches: "
        f"{wait_ms:,.1f} ms a step, and computes {step_ms:,.1f} ms."
    )
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = clock.profiler.key_averages()
    click.echo("\n" + averages.table(sort_by=by, row_limit=_SHOWN, max_name_column_width=40))
    instead = f" (instead of {asked}, which does not compute)" if is_emulated else ""
    say(
        f"trainer {trainer}{instead}, batch {batch_size} of {settings.size}x{settings.size}, "
        f"{quantity(workers, 'worker')}, {quantity(STEPS, 'step')} after {settings.warmup}; "
        f"{machine_line(describe_machine(device))}"
    )
    click.echo(f"wrote {trace}: open it in https://ui.perfetto.dev")


class _ProfiledClock(HostClock):
    """Takes the times of so many steps under torch's profiler, whose trace has names for waits and steps."""

    def __init__(self, device: torch.device, steps: int) -> None:
        super().__init__()
        if device.type == "cpu":  # it would complain on stderr that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = torch_profile(activities=activities)
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
        name = next(self._names, None)
        if name is not None:  # none after the last step
            self._span.enter_context(record_function(name))

    def close(self) -> None:
        """End the profile."""
        self._span.close()
        self._running.close()
