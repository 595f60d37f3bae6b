"""The command `bench evidence`: everything that has to be measured on a GPU, step by step."""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from bench.evidence import document, findings
from bench.evidence.runner import NOT_YET, Outcome, Run, forget, run_steps
from bench.evidence.steps import FULL, PREPARE, SMOKE, STEPS
from bench.machine.hardware import describe_machine
from bench.measure.fresh import run_fresh
from precache.console import commandline
from precache.console.commandline import note
from precache.errors import SettingError, check_choice
from precache.executors import available_cpus
from precache.storage import atomic_write

_RESULTS = Path("bench/results")
_PAGE, _TABLES = "gpu-evidence.html", "gpu-tables.md"
_PATH = click.Path(path_type=Path)
_ALL = "all"


@click.command(name="evidence", cls=commandline.Command)
@click.option(
    "--out", type=_PATH, help=f"Folder of the results.  [default: {_RESULTS}, where that is a folder]"
)
@click.option(
    "--data", type=_PATH, default=Path("data/evidence"), show_default=True, help="For pictures and logs."
)
@click.option("--again", multiple=True, metavar="STEP", help="Measure this step anew, or 'all'.")
@click.option(
    "--minutes", default=25.0, show_default=True, help="What is not done by then is left for the next run."
)
@click.option("--smoke", is_flag=True, help="The same steps in miniature on the CPU, to try the command out.")
def command(out: Path | None, data: Path, again: tuple[str, ...], minutes: float, smoke: bool) -> None:
    """Measure whether this machine's GPU waits for data, with every loader; needs no network.

    Each step is a process of its own with a time limit. One that has its result in --out is not measured
    again: killed, the same command goes on. It ends with exit code 1 where something is wrong that was
    checked, and 2 where a step has no result.
    """
    until_s = time.monotonic() + minutes * 60
    if not smoke and not torch.cuda.is_available():
        raise SettingError(
            "torch finds no GPU here, and this measures one; 'bench evidence --smoke' runs the same steps in "
            "miniature on the CPU"
        )
    if sys.platform == "win32":
        raise SettingError(
            "bench evidence ends the processes of a step as a group, which needs Linux or macOS"
        )
    if not minutes > 0:
        raise SettingError(f"minutes must be positive, got {minutes:g}")
    for name in again:
        check_choice("step", name, [*(step.name for step in STEPS), _ALL])
    run = _open_run(out, data, smoke, until_s)
    outcomes = dict.fromkeys((step.name for step in STEPS), NOT_YET)
    with _alone(run.data):
        for step in STEPS:
            if step.name in again or _ALL in again:
                forget(run, step)
        try:
            for step, outcome in run_steps(run, PREPARE, STEPS):
                if outcome is not NOT_YET:
                    note(f"{step.name}: {outcome.note}")
                outcomes[step.name] = outcome
        finally:
            _publish(run, outcomes, smoke)
    for line in document.sentences(STEPS, outcomes, smoke):
        click.echo(line)
    click.get_current_context().exit(_exit_code(outcomes))


def _open_run(out: Path | None, data: Path, smoke: bool, until_s: float) -> Run:
    """Look at the folders and the machine; a smoke run has folders of its own, and no GPU."""
    if smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of the steps: their results are of this machine
        data = data.with_name(f"{data.name}-smoke")
        out = out or data / "results"
    out = out or (_RESULTS if _RESULTS.is_dir() else data / "results")
    for folder in (out, data):  # now, not after minutes of measuring
        _check_writable(folder)
    scale = SMOKE if smoke else FULL
    # in a process of its own: this one would hold memory of the GPU
    machine = run_fresh(describe_machine, torch.device(scale.device))
    return Run(
        data=data,
        results=out,
        prefix="smoke" if smoke else _prefix(machine["accelerator"]),
        machine=machine,
        scale=scale,
        until_s=until_s,
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """SettingError where another run uses `folder`: side by side both would measure less."""
    import fcntl  # not on Windows, where the other commands run

    with open(folder / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system gives it back, however this ends
        except BlockingIOError as error:
            raise SettingError(
                f"{folder}: another 'bench evidence' runs there; wait until it ends"
            ) from error
        yield


def _prefix(accelerator: str) -> str:
    """Of the result files: each machine has its own."""
    slug = re.sub("[^a-z0-9]+", "-", accelerator.lower().removeprefix("nvidia")).strip("-")
    return f"gpu-{slug}-{available_cpus()}cpu"


def _check_writable(folder: Path) -> None:
    """OSError, which names the folder, unless files can be written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / ".writable"):
        pass
    (folder / ".writable").unlink()


def _publish(run: Run, outcomes: Mapping[str, Outcome], smoke: bool) -> None:
    """Write the page and the tables of what there is so far."""
    shown = {step.name: outcomes[step.name] for step in STEPS}
    for name, render in ((_PAGE, document.html), (_TABLES, document.markdown)):
        path = run.results / name
        with atomic_write(path) as file:
            file.write(render(STEPS, shown, run.machine, smoke).encode())
        note(f"wrote {path}")


def _exit_code(outcomes: Mapping[str, Outcome]) -> int:
    steps = [step for step in STEPS if outcomes[step.name].content is not None]
    if len(steps) < len(STEPS):
        return 2
    return int(any(findings.section(step, outcomes[step.name]).wrong for step in steps))
