"""What `bench watch` finds in trainings of seven kinds, beside the waits that were put into them.

    python -m bench.lab.watch
    python -m bench.lab.watch --changes photos

With --changes PHOTOS, a tree, it is instead what changes bring, beside what was predicted: each is written
into the script, which is then watched again.
"""

import json
import os
import subprocess
import sys
import tempfile
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
from bench.report.result import Result, parse_document
from bench.report.table import Table
from bench.report.watch import make_result
from bench.report.words import machine_line, percent
from precache.cli import commandline
from precache.errors import SettingError, WorkerError, check_choice

_LIBRARIES = {"lightning": "pytorch_lightning"}
_OWN = ("plain", "reference", "timm")  # need no library
_STAGES = ("read", "decode", "python")
_TRAIN = """
import sys, time, torch, torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

tree, start_s, step_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
options = dict(each.split("=") for each in sys.argv[4:])
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
_CASES = (
    # seconds that a worker takes to start, of a step (0: it computes on the CPU), today's and the change
    (0.0, 0.05, {"num_workers": 0}),
    (0.0, 0.2, {"num_workers": 0}),
    (0.0, 0.05, {"num_workers": 1}),
    (0.0, 0.0, {"num_workers": 0}),
    (0.0, 0.0, {"num_workers": 1}),
    (3.0, 0.2, {"num_workers": 1}),
)


def watched(*words: object) -> Result:
    """What `bench watch` says of it; WorkerError where it says nothing."""
    root = str(Path(bench.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "bench", "watch", "--json", "-", *map(str, words)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    start = ran.stdout.find("{\n")
    if start < 0:
        raise WorkerError(f"bench watch {words[-1]}: {(ran.stderr.strip().splitlines() or ['nothing'])[-1]}")
    document = parse_document(ran.stdout[start:], "bench watch")
    result = make_result(document.machine, document.settings, document.trials, document.skipped)
    if not result.rows:
        raise WorkerError(f"bench watch {words[-1]}: no training was found")
    return result


def waits(kinds: list[str], shares: list[float], batches: int) -> Table:
    """Each kind with each wait; the stages take turns."""
    script, rows, off, right = Path(__file__).with_name("trainings.py"), [], [], 0
    for number, (kind, share) in enumerate((kind, share) for kind in kinds for share in shares):
        stage, workers = _STAGES[number % 3], number % 2
        told = [kind, "--wait", share, "--stage", stage, "--workers", workers, "--batches", 3 * batches]
        result = watched("--batches", batches, script, *told)
        found = result.rows[0].values["wait_share"].median
        seen = _stage_of(result)
        off.append(abs(found - share) * 100)
        right += share == 0 or seen == stage
        rows.append(
            [kind, str(workers), percent(share), percent(found), stage if share else "-", seen or "-"]
        )
    middle = [
        f"median {median(off):.1f} points off, at most {max(off):.1f}",
        "",
        "",
        "",
        "",
        f"{right} right",
    ]
    titles = ("training", "workers", "wait put in", "found", "stage put in", "found stage")
    return Table(titles, [*rows, middle])


def _stage_of(result: Result) -> str:
    """The longest part of a sample."""
    numbers = result.trials[0].numbers
    end = "_part_s"
    parts = [name for name in numbers if name.endswith(end)]
    return max(parts, key=lambda name: numbers[name]).removesuffix(end) if parts else ""


def changes(tree: Path, seconds: str) -> Table:
    """Changes of the DataLoader's arguments: what was predicted, and what came when they were made."""
    rows, right, tried = [], 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(_TRAIN)
        for start_s, step_s, today in _CASES:
            before = _watch_options(script, seconds, tree, start_s, step_s, today)
            name = [
                _options(today),
                "computed" if step_s == 0 else f"{step_s * 1e3:.0f} ms",
                f"{start_s:.0f} s",
            ]
            now = before.rows[0].values["images_per_s"].median
            advised = [row for row in before.rows if _arguments(row.key.get("change", ""), before)]
            if not advised:
                rows.append([*name, f"{now:,.0f}", "none advised", "-", "-"])
            for row in advised:
                arguments = _arguments(row.key["change"], before)
                after = _watch_options(script, seconds, tree, start_s, step_s, {**today, **arguments})
                predicted = row.values["images_per_s"]
                came = after.rows[0].values["images_per_s"].median
                tried += 1
                right += predicted.low <= came <= predicted.high
                spread = f"{predicted.low:,.0f} to {predicted.high:,.0f}"
                rows.append([*name, f"{now:,.0f}", _options(arguments), spread, f"{came:,.0f}"])
    titles = ("DataLoader", "step", "a worker starts in", "images/s before", "advised", "predicted", "came")
    return Table(titles, [*rows, [f"{right} of {tried} within the range", "", "", "", "", "", ""]])


def _watch_options(
    script: Path, seconds: str, tree: Path, start_s: float, step_s: float, options: dict[str, Any]
) -> Result:
    words = [f"{name}={int(value)}" for name, value in options.items()]
    return watched("--for", seconds, script, tree.resolve(), start_s, step_s, *words)


def _arguments(change: str, result: Result) -> dict[str, Any]:
    """Arguments of the DataLoader that the change sets; empty where it is no such change."""
    found = next((trial for trial in result.trials if trial.key.get("name") == change), None)
    if found is None:
        return {}
    arguments: dict[str, Any] = json.loads(found.facts.get("arguments", "{}"))
    return arguments


def _options(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


@click.command(cls=commandline.Command)
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Trainings to watch.")
@click.option("--waits", "shares", default="0,0.2,0.4,0.6,0.8", show_default=True, help="Waits to put in.")
@click.option("--batches", default=100, show_default=True, help="Batches to watch of each training.")
@click.option("--for", "seconds", default="30s", show_default=True, help="Time of each run with --changes.")
@click.option(
    "--changes", "tree", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A tree."
)
def command(kinds: str, shares: str, batches: int, seconds: str, tree: Path | None) -> None:
    """Print the waits put in beside those found; with --changes what changes bring."""
    chosen = kinds.split(",")
    for name in chosen:
        check_choice("kind", name, KINDS)
    there = [name for name in chosen if name in _OWN or find_spec(_LIBRARIES.get(name, name))]
    for name in set(chosen) - set(there):
        click.echo(f"skipped {name}: not installed", err=True)
    if not there:
        raise SettingError(f"none of {kinds} is installed; choose plain")
    values = [float(each) for each in shares.split(",")]
    table = waits(there, values, batches) if tree is None else changes(tree, seconds)
    click.echo(table.markdown())
    click.echo(f"\n{machine_line(describe_machine(torch.device('cpu')), ('python', 'torch', 'pillow'))}")


if __name__ == "__main__":
    harness.main(command, "watch")
