"""Check of `bench watch`: compares the waits that it finds in trainings with the waits put into them.

    python -m bench.lab.watch
    python -m bench.lab.watch --changes photos

With --changes PHOTOS, a tree, it makes the changes that are advised instead: a script of its own is watched
without each change, and with it. 'held' says whether the change brought as much as its bound. On a quiet
machine of two CPUs that takes some minutes; beside other work nothing is predicted, and nothing held.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

import bench
from bench.lab import harness
from bench.lab.trainings import KINDS
from bench.machine.hardware import describe_machine
from bench.report.change import Basis, Change
from bench.report.result import Result, parse_document
from bench.report.table import Table
from bench.report.waiting import Machine, find_changes
from bench.report.watch import make_result, stream_from_trial
from bench.report.words import machine_line, percent
from precache.errors import SettingError, WorkerError, check_choice

_LIBRARIES = {"lightning": "pytorch_lightning"}
_WITHOUT_LIBRARY = ("plain", "reference", "timm")
_STAGES = ("read", "decode", "transform")
_SCRIPT = """
import sys, time, torch, torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

tree, start_s, step_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
options = dict(word.split("=") for word in sys.argv[4:])
options = {name: int(value) for name, value in options.items()}
steps = [transforms.RandomResizedCrop(224), transforms.ToTensor()]
data = torchvision.datasets.ImageFolder(tree, transforms.Compose(steps))
data = torch.utils.data.Subset(data, range(0, len(data), max(1, len(data) // 400)))
net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 7, 4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(data, 32, shuffle=True, worker_init_fn=lambda _: time.sleep(start_s), **options)
while True:
    for images, labels in loader:
        if step_s:
            time.sleep(step_s)  # a GPU
            images = images[:1]
        for _ in range(1 if step_s else 4):  # a model on the CPU
            loss = net(images).square().mean()
            loss.backward()
        optimizer.step()
"""


@dataclass(frozen=True, slots=True)
class _Case:
    """Arguments of `_SCRIPT`.

    Attributes:
        start_s: seconds that a worker takes to start.
        step_s: seconds of a step; 0: it computes on the CPU.
        workers: workers of the DataLoader before the change.
    """

    start_s: float
    step_s: float
    workers: int


_CASES = (
    _Case(start_s=0.0, step_s=0.05, workers=0),
    _Case(start_s=0.0, step_s=0.2, workers=0),
    _Case(start_s=0.0, step_s=0.05, workers=1),
    _Case(start_s=0.0, step_s=0.0, workers=0),
    _Case(start_s=0.0, step_s=0.0, workers=1),
    _Case(start_s=3.0, step_s=0.2, workers=1),
)


def run_watch(
    *words: object, launcher: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Result:
    """Run `bench watch`, and return its result; WorkerError where it finds no training.

    Args:
        words: words behind `bench watch`.
        launcher: words before it.
        environment: further variables.
    """
    root = str(Path(bench.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, **(environment or {})}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    command = [*launcher, sys.executable, "-m", "bench", "watch", "--json", "-", *map(str, words)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    start = process.stdout.find("{\n")  # the script prints before it
    if start < 0:
        lines = process.stderr.strip().splitlines()
        raise WorkerError(f"bench watch {words[-1]}: {lines[-1] if lines else 'nothing'}")
    document = parse_document(process.stdout[start:].encode(), "bench watch")
    result = make_result(document.machine, document.settings, document.trials)
    if not result.rows:
        raise WorkerError(f"bench watch {words[-1]}: no training was found")
    return result


def compare_waits(kinds: list[str], shares: list[float], batches: int) -> Table:
    """Watch each kind of training with each share of waiting; the stages that are slow take turns."""
    script = Path(__file__).with_name("trainings.py")
    rows, errors, right_stages = [], [], 0
    for number, (kind, share) in enumerate((kind, share) for kind in kinds for share in shares):
        stage, workers = _STAGES[number % 3], number % 2
        result = run_watch(
            *("--batches", batches, script, kind, "--wait", share, "--stage", stage),
            *("--workers", workers, "--batches", 3 * batches),
        )
        found_share = result.rows[0].values["wait_share"].median
        found_stage = _longest_stage(result)
        errors.append(abs(found_share - share) * 100)
        if share == 0 or found_stage == stage:
            right_stages += 1
        rows.append(
            [
                kind,
                str(workers),
                percent(share),
                percent(found_share),
                stage if share else "-",
                found_stage or "-",
            ]
        )
    summary = [f"median {median(errors):.1f} points off, at most {max(errors):.1f}"]
    summary += ["", "", "", "", f"{right_stages} right"]
    titles = ("training", "workers", "wait put in", "found", "stage put in", "found stage")
    return Table(titles, [*rows, summary])


def _longest_stage(result: Result) -> str:
    """Return the stage of the longest part of a sample; empty where parts are not known."""
    parts = stream_from_trial(result.trials[0]).parts
    return parts[0].stage.value if parts else ""


def compare_changes(tree: Path, seconds: str) -> Table:
    """Make each advised change of the DataLoader's arguments, and compare what it brings with its bound."""
    rows, right, tried = [], 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(_SCRIPT)
        for case in _CASES:
            options = {"num_workers": case.workers}
            before = _watch_script(script, seconds, tree, case, options)
            attempts: list[Change | None] = [*_find_changes(before)] or [None]
            for change in attempts:
                cells = ["none", "", "", ""]
                if change is not None:
                    after = _watch_script(script, seconds, tree, case, {**options, **change.arguments})
                    rate = after.rows[0].values["images_per_s"].median
                    bound, verdict = "untested", ""
                    if change.basis == Basis.BOUND:
                        is_right = rate >= change.images_per_s.low
                        right, tried = right + is_right, tried + 1
                        bound, verdict = f"{change.images_per_s.low:,.0f}", "yes" if is_right else "no"
                    cells = [_format_options(change.arguments), bound, f"{rate:,.0f}", verdict]
                rows.append(
                    [
                        _format_options(options),
                        "computed" if case.step_s == 0 else f"{case.step_s * 1e3:.0f} ms",
                        f"{case.start_s:.0f} s",
                        percent(before.settings["other_cpu_share"] or 0.0),
                        f"{before.rows[0].values['images_per_s'].median:,.0f}",
                        *cells,
                    ]
                )
    titles = (
        *("DataLoader", "step", "a worker starts in", "others' CPU", "images/s before"),
        *("change", "at least", "came", "held"),
    )
    return Table(titles, [*rows, [f"{right} of {tried} held", *[""] * (len(titles) - 1)]])


def _watch_script(script: Path, seconds: str, tree: Path, case: _Case, options: dict[str, Any]) -> Result:
    """Watch `_SCRIPT` with these options of its DataLoader."""
    words = [f"{name}={int(value)}" for name, value in options.items()]
    return run_watch("--for", seconds, script, tree.resolve(), case.start_s, case.step_s, *words)


def _find_changes(result: Result) -> list[Change]:
    """Return the changes that a result advises."""
    streams = [stream_from_trial(trial) for trial in result.trials]
    settings = result.settings
    return find_changes(
        streams[0],
        streams,
        Machine(settings["cpus"], settings["script_cpu_share"], settings["other_cpu_share"]),
    )


def _format_options(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


@click.command()
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Trainings to watch.")
@click.option("--waits", "shares", default="0,0.2,0.4,0.6,0.8", show_default=True, help="Waits to put in.")
@click.option("--batches", default=100, show_default=True, help="Batches to watch of each training.")
@click.option("--for", "seconds", default="12s", show_default=True, help="Time of each run with --changes.")
@click.option(
    "--changes", "tree", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A tree."
)
def command(kinds: str, shares: str, batches: int, seconds: str, tree: Path | None) -> None:
    """Print the waits put in beside those found; with --changes what changes bring."""
    names = kinds.split(",")
    for name in names:
        check_choice("kind", name, KINDS)
    installed = []
    for name in names:
        if name in _WITHOUT_LIBRARY or find_spec(_LIBRARIES.get(name, name)):
            installed.append(name)
        else:
            click.echo(f"skipped {name}: not installed", err=True)
    if not installed:
        raise SettingError(f"none of {kinds} is installed", remedy="choose plain")
    if tree is not None:
        table = compare_changes(tree, seconds)
    else:
        table = compare_waits(installed, [float(share) for share in shares.split(",")], batches)
    click.echo(table.markdown())
    click.echo(f"\n{machine_line(describe_machine(torch.device('cpu')), ('python', 'torch', 'pillow'))}")


if __name__ == "__main__":
    harness.main(command, "watch")
