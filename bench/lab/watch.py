"""What `bench watch` finds in trainings of seven kinds, beside the waits that were put into them.

    python -m bench.lab.watch
    python -m bench.lab.watch --cures photos

With --cures PHOTOS, a tree, it is instead what cures bring, beside what was predicted.
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
from bench.report.table import Table
from bench.report.words import machine_line, percent
from precache.cli import commandline
from precache.errors import SettingError, WorkerError, check_choice

_LIBRARIES = {"lightning": "pytorch_lightning"}
_OWN = ("plain", "reference", "timm")  # need no library
_STAGES = ("read", "decode", "python")
_CURED = """
import sys, time, torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
torch.set_num_threads(1)
steps = [transforms.RandomResizedCrop(224), transforms.ToTensor()]
data = datasets.ImageFolder(sys.argv[1], transforms.Compose(steps))
net = torch.nn.Linear(3, len(data.classes))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
while True:
    for images, labels in DataLoader(data, 32, shuffle=True, num_workers=int(sys.argv[2])):
        time.sleep(float(sys.argv[3]))
        torch.nn.functional.cross_entropy(net(images.mean((2, 3))), labels).backward()
        optimizer.step()
"""


def watched(*words: object) -> dict[str, Any]:
    """What `bench watch` says of it, as JSON; WorkerError where it says nothing."""
    root = str(Path(bench.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "bench", "watch", "--json", "-", *map(str, words)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    start = ran.stdout.find("{\n")
    if start < 0:
        raise WorkerError(f"bench watch {words[-1]}: {(ran.stderr.strip().splitlines() or ['nothing'])[-1]}")
    found: dict[str, Any] = json.loads(ran.stdout[start:])
    return found


def waits(kinds: list[str], shares: list[float], batches: int) -> Table:
    """Each kind with each wait; the stages take turns."""
    script, rows, off, right = Path(__file__).with_name("trainings.py"), [], [], 0
    for number, (kind, share) in enumerate((kind, share) for kind in kinds for share in shares):
        stage, workers = _STAGES[number % 3], number % 2
        told = [kind, "--wait", share, "--stage", stage, "--workers", workers, "--batches", 3 * batches]
        streams = watched("--batches", batches, script, *told)["streams"]
        if not streams:
            raise WorkerError(f"{kind}, {share:.0%}: no training was found")
        found, seen = streams[0]["share"][0], streams[0]["stage"]
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


def cures(tree: Path, seconds: str) -> Table:
    """More workers, and shards, in place of an ImageFolder: predicted, and what came."""
    rows, off = [], []
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(_CURED)
        for cure, workers, step_s in (
            *(("workers", workers, step_s) for workers in (0, 1) for step_s in (0.05, 0.1)),
            *(("shards", workers, step_s) for workers in (0, 2) for step_s in (0.02, 0.1)),
        ):
            told = ["--for", seconds, "--cure", cure, "--yes", "--dst", Path(scratch) / "shards"]
            found = watched(*told, script, tree.resolve(), workers, step_s)
            before, name = found["streams"][0], [cure, str(workers), f"{step_s * 1e3:.0f} ms"]
            if not found["cured"]:  # it does not wait, so that there is nothing to cure
                rows.append([*name, f"{before['images_per_s']:,.0f}", "-", "-"])
                continue
            after = found["cured"][0]
            predicted = next(each for each in found["cures"] if each["name"] == cure)["images_per_s"]
            off.append(abs(predicted["median"] / after["images_per_s"] - 1))
            rates = (before["images_per_s"], predicted["median"], after["images_per_s"])
            rows.append([*name, *(f"{rate:,.0f}" for rate in rates)])
    titles = ("cure", "workers before", "step", "images/s before", "predicted", "realised")
    return Table(titles, [*rows, [f"median {percent(median(off))} off", "", "", "", "", ""]])


@click.command(cls=commandline.Command)
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Of trainings.")
@click.option("--waits", "shares", default="0,0.2,0.4,0.6,0.8", show_default=True, help="To put in.")
@click.option("--batches", default=100, show_default=True, help="Watched of each training.")
@click.option("--for", "seconds", default="30s", show_default=True, help="Of each run with --cures.")
@click.option(
    "--cures", "tree", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A tree."
)
def command(kinds: str, shares: str, batches: int, seconds: str, tree: Path | None) -> None:
    """Print the waits put in beside those found; with --cures what changes bring."""
    chosen = kinds.split(",")
    for name in chosen:
        check_choice("kind", name, KINDS)
    there = [name for name in chosen if name in _OWN or find_spec(_LIBRARIES.get(name, name))]
    for name in set(chosen) - set(there):
        click.echo(f"skipped {name}: not installed", err=True)
    if not there:
        raise SettingError(f"none of {kinds} is installed; choose plain")
    values = [float(each) for each in shares.split(",")]
    table = waits(there, values, batches) if tree is None else cures(tree, seconds)
    click.echo(table.markdown())
    click.echo(f"\n{machine_line(describe_machine(torch.device('cpu')), ('python', 'torch', 'pillow'))}")


if __name__ == "__main__":
    harness.main(command, "watch")
