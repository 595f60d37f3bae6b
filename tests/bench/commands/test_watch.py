"""`bench watch` on scripts as people have them: what it finds, and that they run as they would alone."""

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
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

class Slow(datasets.ImageFolder):
    def __getitem__(self, index):
        time.sleep(float(sys.argv[2]))
        return super().__getitem__(index)

def main():
    torch.manual_seed(0)
    steps = [transforms.RandomResizedCrop(32), transforms.ToTensor()]
    data = Slow(sys.argv[1], transforms.Compose(steps))
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

HELD = """
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
for number, batch in enumerate(DataLoader(torch.arange(10**9), 4)):
    time.sleep(0.01)
    optimizer.step()
    if number == 50:
        print("seen", flush=True)
"""


@pytest.fixture
def scripts(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts, and 70 pictures in data/raw."""
    for name, text in {
        "train": TRAIN,
        "ranks": RANKS,
        "held": HELD,
        "kinds": KINDS,
        "endless": ENDLESS,
    }.items():
        (data / f"{name}.py").write_text(text)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return data


def streams(folder: Path) -> list[dict[str, Any]]:
    trials = json.loads((folder / "found.json").read_text())["trials"]
    return [trial for trial in trials if trial["of"]["what"] == "stream"]


@pytest.mark.usefixtures("trials_here")
def test_script_gives_what_it_would_alone_and_its_waits_are_found(scripts: Path, bench: Bench) -> None:
    words = ["train.py", "data/raw", "0.015", "0.06", "0", "2"]
    alone = subprocess.run([sys.executable, *words], cwd=scripts, capture_output=True, text=True, check=False)
    found = bench("watch", "--whole", "--json", "found.json", *words)
    assert (alone.returncode, found.returncode) == (0, 0)
    assert found.stdout.startswith(alone.stdout)
    assert found.stderr.startswith(alone.stderr)  # with what it drew at random
    train, val = streams(scripts)  # loaders that are made for each evaluation are one row
    assert (train["of"]["role"], val["of"]["role"]) == ("training", "validation")
    times = json.loads((scripts / "own.json").read_text())[37:]  # the second epoch
    asked, *times = times
    waited_s = sum(got - before for before, got in zip([asked, *times[1::2]], times[::2], strict=False))
    assert train["numbers"]["share"] == pytest.approx(waited_s / (times[-1] - asked), abs=0.1)
    assert train["of"]["info"]["where"].endswith(f"train.py:{WHERE}")
    assert found.stdout.index("Training waits") < found.stdout.index("It waits for reading files")


def test_script_is_ended_with_its_workers_once_enough_is_seen(scripts: Path, bench: Bench) -> None:
    words = ["train.py", "data/raw", "0.002", "0.001", "1", "9999"]
    ended = bench("watch", "--batches", "8", "--json", "found.json", *words)
    assert ended.returncode == 0
    left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if "9999" in line]


def test_slowest_rank_of_torchrun_is_named(scripts: Path, bench: Bench) -> None:
    found = bench("watch", "--for", "2s", "torchrun", "--standalone", "--nproc-per-node", "2", "ranks.py")
    assert found.returncode == 0
    assert "Training waits in rank 1, the slowest of 2," in found.stdout


@pytest.mark.parametrize(
    "kind",
    [
        "long",
        pytest.param("short", marks=pytest.mark.slow),  # 20 s each
        pytest.param("bad", marks=pytest.mark.slow),
    ],
)
def test_held_batches_are_served_once_and_in_order(scripts: Path, bench: Bench, kind: str) -> None:
    alone = subprocess.run(
        [sys.executable, "held.py", kind], cwd=scripts, capture_output=True, text=True, check=True
    )
    found = bench("watch", "--batches", "8", "--whole", "--json", "found.json", "held.py", kind)
    assert found.stdout.startswith(alone.stdout)
    if kind == "long":
        assert streams(scripts)[0]["numbers"]["alone_s"] == pytest.approx(0.005, abs=0.02)


def test_batches_have_the_samples_of_their_sampler(scripts: Path, bench: Bench) -> None:
    assert bench("watch", "--whole", "--json", "found.json", "kinds.py").returncode == 0
    libraries = sum(find_spec(name) is not None for name in ("torchdata", "accelerate"))
    found = streams(scripts)
    assert len(found) == 7 + libraries
    assert {stream["of"]["role"] for stream in found} == {"training"}
    assert {stream["numbers"]["images"] for stream in found} == {8}


def test_exit_code_is_the_scripts_and_a_crash_is_no_finding(scripts: Path, bench: Bench) -> None:
    (scripts / "other.py").write_text("import os; os.kill(os.getpid(), 9)")
    found = bench("watch", "-m", "other")
    assert found.returncode == 137
    assert found.stdout.startswith("\nThe script ended with exit code 137 before it asked for a batch.\n")


def test_options_behind_a_module_are_its_own(scripts: Path, bench: Bench) -> None:
    (scripts / "mine.py").write_text("import sys; print(sys.argv[1:])")
    for words in (["--batches", "5"], ["-m", "x", "--", "--help"], ["--json", "-"]):
        assert str(words) in bench("watch", "--for", "5s", "-m", "mine", *words).stdout
    check_bad_input(bench("watch", "--bathces", "9", "-m", "mine"), "--bathces")


def test_interrupted_watch_says_what_was_seen(scripts: Path) -> None:
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


def test_idle_time_of_a_device_is_read_and_never_waited_for(
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
