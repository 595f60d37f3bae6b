"""Profile of a few training steps by torch: a trace, and a table of the operators that take the time."""

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
from bench.measure.trainers import resolve_trainer
from bench.measure.trial import HostClock, measure
from bench.report.result import is_emulated
from bench.report.words import machine_line, say
from precache.errors import DatasetError
from precache.reporting import quantity

WAIT, STEP = "wait for batch", "train step"
"""Names of waits and steps in the trace."""
STEPS = 10
_INSTEAD_OF_EMULATED = "resnet18"
"""Trainer that is profiled instead of an emulated one, which sleeps and runs no operators."""
_OPERATORS_IN_TABLE = 15  # the trace has all of them


def profile(
    candidates: Sequence[Candidate], settings: Settings, workers: int, batch_size: int, folder: Path
) -> None:
    """Profile STEPS training steps with the first of the candidates; print the operators, write the trace.

    The table has operators of the calling thread and of the GPU, not those of the loader's threads and
    processes. Profiling slows each operator down a little.

    Args:
        workers: processes or threads of the loader.
        batch_size: samples per batch; at most all samples.
        folder: `trace.json` is written into it, which opens in https://ui.perfetto.dev and in
            chrome://tracing.

    Raises:
        DatasetError: no candidate can be opened.
    """
    opened, failures = open_candidates(candidates)
    if not opened:
        raise DatasetError("; ".join(failures.values()))
    candidate = opened[0]
    device = settings.device
    chosen_trainer = resolve_trainer(settings.trainer, device)
    trainer = _INSTEAD_OF_EMULATED if is_emulated(chosen_trainer) else chosen_trainer
    batch_size = min(batch_size, len(candidate.data))
    check_fills_batch(batch_size, len(candidate.data))
    settings = replace(
        settings.for_loader(candidate.backend, candidate.loader_path, len(candidate.data.classes)),
        trainer=trainer,
        batch_size=batch_size,
        workers=workers,
        batches=STEPS,
        monitored=False,  # the monitor's thread would be in the trace
    )
    folder.mkdir(parents=True, exist_ok=True)
    with closing(_ProfiledClock(device, STEPS)) as clock:
        trial = measure(settings, clock=clock)
    trace = folder / "trace.json"
    clock.profiler.export_chrome_trace(str(trace))
    wait_ms, step_ms = (sum(trial.series[name]) / STEPS * 1e3 for name in ("wait_s", "step_s"))
    say(
        f"{candidate.label}: training waits {trial.numbers['wait_share']:.0%} of the time for batches: "
        f"{wait_ms:,.1f} ms a step, and computes {step_ms:,.1f} ms."
    )
    sort_by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = clock.profiler.key_averages()
    table = averages.table(sort_by=sort_by, row_limit=_OPERATORS_IN_TABLE, max_name_column_width=40)
    click.echo("\n" + table)
    replaced = f" (instead of {chosen_trainer}, which does not compute)" if trainer != chosen_trainer else ""
    say(
        f"trainer {trainer}{replaced}, batch {batch_size} of {settings.size}x{settings.size}, "
        f"{quantity(workers, 'worker')}, {quantity(STEPS, 'step')} after {settings.warmup}; "
        f"{machine_line(describe_machine(device))}"
    )
    click.echo(f"wrote {trace}: open it in https://ui.perfetto.dev")


class _ProfiledClock(HostClock):
    """Clock of the host that runs torch's profiler from its first mark on, and names waits and steps in it.

    Args:
        device: the device that trains.
        steps: number of steps to name.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        super().__init__()
        if device.type == "cpu":  # the profiler would complain on stderr that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = torch_profile(activities=activities)
        self._device = device
        self._names = iter((WAIT, STEP) * steps)
        self._run, self._span = ExitStack(), ExitStack()

    def mark(self) -> None:
        """End the wait and begin the step, or the other way round."""
        if len(self._marks) % 2 == 0 and self._device.type == "cuda":
            torch.cuda.synchronize(
                self._device
            )  # or this step's time would be in the wait for the next batch
        if not self._marks:
            self._run.enter_context(self.profiler)
        self._span.close()
        super().mark()
        name = next(self._names, None)
        if name is not None:  # the last step has ended where there is none
            self._span.enter_context(record_function(name))

    def close(self) -> None:
        """End the profile."""
        self._span.close()
        self._run.close()
