"""`bench watch` on training scripts: its findings, and that a script runs as it does without it."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from bench.watch import hook
from tests.bench.conftest import Bench
from tests.command import ROOT, check_bad_input

TRAIN = """
import json, sys, time
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

read = Image.open

def read_slowly(file):
    time.sleep(float(sys.argv[2]))
    return read(file)

Image.open = read_slowly

def main():
    torch.manual_seed(0)
    steps = [transforms.RandomResizedCrop(32), transforms.ToTensor()]
    data = datasets.ImageFolder(sys.argv[1], transforms.Compose(steps))
    train = DataLoader(data, 4, shuffle=True, num_workers=int(sys.argv[4]))
    unused = DataLoader(data, batch_size=2)
    net = torch.nn.Linear(3, 9)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    labels, times = [], []
    for epoch in range(int(sys.argv[5])):
        times.append(time.perf_counter())
        for images, targets in train:
            times.append(time.perf_counter())
            labels += targets.tolist()
            time.sleep(float(sys.argv[3]))
            torch.nn.functional.cross_entropy(net(images.mean((2, 3))), targets).backward()
            optimizer.step()
            times.append(time.perf_counter())
        for images, targets in DataLoader(data, batch_size=14):
            pass
    with open("own.json", "w") as file:
        json.dump(times, file)
    print(sum(net.weight.flatten().tolist()))
    print(labels, flush=True)
    print(torch.rand(2).tolist(), "to stderr", file=sys.stderr)

main()
"""
WHERE = next(number for number, line in enumerate(TRAIN.splitlines(), 1) if "train = " in line)

RANKS = """
import os, time, torch
from torch.utils.data import DataLoader

def collate(samples):
    time.sleep(0.05 * int(os.environ["RANK"]))
    return torch.stack(samples)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
for batch in DataLoader(torch.arange(10**6), batch_size=2, collate_fn=collate):
    time.sleep(0.05)
    optimizer.step()
"""

SERVED_ONCE = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 60 if sys.argv[1] == "short" else 400
    def __getitem__(self, index):
        if index == 385 and sys.argv[1] == "bad":
            raise ValueError("a bad sample")
        time.sleep(0.01)
        return index
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
seen = []
try:
    for epoch in range(2):
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
            seen += batch.tolist()
            time.sleep(0.005)
            optimizer.step()
except ValueError:
    seen.append(-1)
print(seen, flush=True)
"""

KINDS = """
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

class Pictures(Dataset):
    def __init__(self, kind):
        self.kind = kind
    def __len__(self):
        return 96
    def __getitem__(self, index):
        if self.kind == "whole batches":
            return {"epoch": torch.tensor(3), "mean": torch.zeros(2, 3), "image": torch.zeros(8, 3, 9, 9)}
        if self.kind == "lists of places":
            return torch.zeros(len(index), 3, 9, 9)
        if self.kind == "crops":
            return [torch.zeros(3, 9, 9), torch.zeros(3, 5, 5)]
        return torch.zeros(3, 9 + index % 3 * (self.kind == "sizes"), 9), index
class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(3, 9, 9) for _ in range(96))
class Endless(DataLoader):
    iterator = None
    def __iter__(self):
        if self.iterator is None:
            self.iterator = self._get_iterator()
        for _ in range(len(self)):
            yield next(self.iterator)

def train(loader):
    for _ in loader:
        optimizer.step()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
train(DataLoader(Pictures("sizes"), 8, collate_fn=lambda batch: tuple(zip(*batch))))
train(DataLoader(Pictures("samples"), 8, collate_fn=list))
train(DataLoader(Pictures("crops"), 8))
train(DataLoader(Pictures("whole batches"), None))
places = BatchSampler(SequentialSampler(range(96)), 8, False)
train(DataLoader(Pictures("lists of places"), None, sampler=places))
train(DataLoader(Stream(), 8))
train(Endless(Pictures("plain"), 8))
try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    train(StatefulDataLoader(Pictures("plain"), 8))
except ImportError:
    pass
try:
    from accelerate import Accelerator
    train(Accelerator(cpu=True).prepare(DataLoader(Pictures("plain"), 8)))
except ImportError:
    pass
"""

ENDLESS = """
import time, torch
from torch.utils.data import DataLoader

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
for number, batch in enumerate(DataLoader(torch.arange(10**7), 4)):
    time.sleep(0.01)
    optimizer.step()
    if number == 50:
        print("seen", flush=True)
"""


@pytest.fixture
def scripts(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the scripts above, and 70 pictures in data/raw."""
    for name, text in {
        "train": TRAIN,
        "ranks": RANKS,
        "served_once": SERVED_ONCE,
        "kinds": KINDS,
        "endless": ENDLESS,
    }.items():
        (data / f"{name}.py").write_text(text)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return data


def read_streams(folder: Path) -> list[dict[str, Any]]:
    """Return the trials in the result that `bench watch` has left in the folder: a stream each."""
    trials: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["trials"]
    return trials


@pytest.mark.usefixtures("trials_here")
def test_watch_finds_the_waits_of_a_script_that_runs_as_without_it(scripts: Path, bench: Bench) -> None:
    words = ["train.py", "data/raw", "0.015", "0.06", "0", "2"]
    alone = subprocess.run([sys.executable, *words], cwd=scripts, capture_output=True, text=True, check=False)
    watched = bench("watch", "--whole", "--json", "result.json", *words)
    assert (alone.returncode, watched.returncode) == (0, 0)
    assert watched.stdout.startswith(alone.stdout)
    assert watched.stderr.startswith(alone.stderr)  # it has the random numbers of the script
    train, val = read_streams(scripts)  # the loaders of all evaluations are one row
    assert (train["key"]["role"], val["key"]["role"]) == ("training", "validation")
    build = "size=32, augment=loaders.RandomAugmentation(flip=0.0), normalize=None"
    assert f"made at train.py:{WHERE}, for this split:" in watched.stdout
    assert f"\n    loaders.build('data/raw', batch_size=4, {build})\n" in watched.stdout
    assert "\n    bench recommend data/raw\n" in watched.stdout
    assert {"RandomResizedCrop", "ToTensor", "Pillow"} <= {name for _, name, _ in train["key"]["parts"]}
    start_s, *times_s = json.loads((scripts / "own.json").read_text())[37:]  # the second epoch
    arrivals_s, step_ends_s = times_s[::2], times_s[1::2]
    wait_s = sum(
        arrival - before for before, arrival in zip([start_s, *step_ends_s], arrivals_s, strict=False)
    )
    assert train["numbers"]["share"] == pytest.approx(wait_s / (times_s[-1] - start_s), abs=0.1)
    assert train["key"]["info"]["where"] == f"train.py:{WHERE}"
    answer = " ".join(watched.stdout.split())  # lines end anywhere
    assert answer.index("Training waits") < answer.index("It waits most for reading files"), answer


def test_watch_ends_a_script_and_its_workers_after_enough_batches(scripts: Path, bench: Bench) -> None:
    words = ["train.py", "data/raw", "0.002", "0.001", "1", "9999"]
    ended = bench("watch", "--batches", "8", "--json", "result.json", *words)
    assert ended.returncode == 0
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if "9999" in command]


def test_watch_names_the_slowest_rank_of_torchrun(scripts: Path, bench: Bench) -> None:
    watched = bench("watch", "--for", "2s", "torchrun", "--standalone", "--nproc-per-node", "2", "ranks.py")
    assert watched.returncode == 0
    assert "Training waits in rank 1, the slowest of 2," in watched.stdout
    # `collate` sleeps, which is no part of a sample
    assert "Loading its samples explains" in " ".join(watched.stdout.split())


@pytest.mark.parametrize(
    "kind",
    [
        "long",
        pytest.param("short", marks=pytest.mark.slow),  # 20 s each
        pytest.param("bad", marks=pytest.mark.slow),
    ],
)
def test_watch_serves_held_batches_once_and_in_order(scripts: Path, bench: Bench, kind: str) -> None:
    """Watching holds batches back for a while to time the trainer alone."""
    whole = {"long": [*range(400)] * 2, "short": [*range(60)] * 2, "bad": [*range(384), -1]}
    words = ("--batches", "8", "--whole", "--json", "result.json", "served_once.py", kind)
    assert bench("watch", *words).stdout.startswith(f"{whole[kind]}\n")
    if kind == "long":
        assert read_streams(scripts)[0]["numbers"]["alone_s"] == pytest.approx(0.005, abs=0.02)


def test_watch_counts_the_samples_of_every_kind_of_batch(scripts: Path, bench: Bench) -> None:
    assert bench("watch", "--whole", "--json", "result.json", "kinds.py").returncode == 0
    libraries = sum(find_spec(name) is not None for name in ("torchdata", "accelerate"))
    streams = read_streams(scripts)
    assert len(streams) == 7 + libraries
    assert {stream["key"]["role"] for stream in streams} == {"training"}
    assert {stream["numbers"]["images"] for stream in streams} == {8}


def test_watch_has_the_exit_code_of_a_script_that_crashes(scripts: Path, bench: Bench) -> None:
    (scripts / "other.py").write_text("import os; os.kill(os.getpid(), 9)")
    watched = bench("watch", "-m", "other")
    assert watched.returncode == 137
    assert watched.stdout.startswith("\nThe script ended with exit code 137 before it asked for a batch.\n")


@pytest.mark.parametrize(
    "words", [["--batches", "5"], ["-m", "x", "--", "--help"], ["--json", "-"]], ids=" ".join
)
def test_watch_leaves_options_behind_a_module_to_it(words: list[str], scripts: Path, bench: Bench) -> None:
    (scripts / "module.py").write_text("import sys; print(sys.argv[1:])")
    assert str(words) in bench("watch", "--for", "5s", "-m", "module", *words).stdout


def test_watch_refuses_an_unknown_option_before_a_module(bench: Bench) -> None:
    check_bad_input(bench("watch", "--bathces", "9", "-m", "module"), "--bathces")


def test_an_interrupted_watch_reports_the_batches_so_far(scripts: Path) -> None:
    words = [sys.executable, "-m", "bench", "watch", "endless.py"]
    process = subprocess.Popen(words, cwd=scripts, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "seen\n"
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Training waits" in text
    assert "was interrupted" in text
    assert not child.is_running()


def test_watch_reads_idle_time_of_a_device_without_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = mock.Mock(spec=["record", "query", "elapsed_time"])  # it cannot be waited for
    event.elapsed_time.return_value = 250.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(hook, "_FOLDER", str(tmp_path))
    stream = hook._Stream({"kind": "DataLoader", "key": "a"})
    iterator = mock.Mock()
    for event.query.return_value in (False, False, True):
        served = stream.prepare(iterator, next)
        stream.record_batch(hook._Moment(), served, [torch.zeros(2, 3)], None)
    (path,) = tmp_path.iterdir()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    idle = [(event["batch"], event["seconds"]) for event in events if event["event"] == "idle"]
    assert idle == [(0, 0.25), (1, 0.25), (2, 0.25)]
