"""`bench watch` on scripts as people have them: what it finds, and that they run as they would alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from bench.watch import hook
from precache.dataset.converted import is_converted
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
    val, unused = DataLoader(data, batch_size=14), DataLoader(data, batch_size=2)
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
        for images, targets in val:
            pass
    with open("own.json", "w") as file:
        json.dump(times, file)
    print(sum(net.weight.flatten().tolist()))
    print(labels, flush=True)
    print(torch.rand(2).tolist(), "to stderr", file=sys.stderr)

main()
sys.exit(7)
"""
WHERE = next(number for number, line in enumerate(TRAIN.splitlines(), 1) if "train = " in line)

NAMED = """
import os, subprocess, sys
import mydata

print("x" * 2_000_000)
for batch in mydata.batches():
    pass
child = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"])
os._exit(child.returncode + 2)
"""

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


@pytest.fixture
def scripts(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts, and 70 pictures in data/raw."""
    mydata = "def batches():\n    yield from [[1]] * 50\n"
    for name, text in {"train": TRAIN, "named": NAMED, "ranks": RANKS, "mydata": mydata}.items():
        (data / f"{name}.py").write_text(text)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return data


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.usefixtures("trials_here")
def test_a_script_gives_what_it_would_alone_its_waits_are_found_and_a_cure_changes_no_label(
    scripts: Path, bench: Bench
) -> None:
    words = ["train.py", "data/raw", "0.015", "0.06", "0", "1"]
    alone = subprocess.run([sys.executable, *words], cwd=scripts, capture_output=True, text=True, check=False)
    cure = ("--cure", "shards", "--yes", "--dst", "out")
    found = bench("watch", "--whole", *cure, "--json", "found.json", *words)
    assert (alone.returncode, found.returncode) == (7, 7)
    assert found.stdout.startswith(alone.stdout)
    assert found.stderr.startswith(alone.stderr)  # with what it drew at random
    train, val = content(scripts)["streams"]  # a loader that is only built is not measured
    assert (train["role"], val["role"]) == ("training", "validation")
    asked, *times = json.loads((scripts / "own.json").read_text())[6:]  # the first batches are not counted
    waited_s = sum(got - before for before, got in zip([asked, *times[1::2]], times[::2], strict=False))
    cured = content(scripts)["cured"][0]
    assert cured["share"][0] == pytest.approx(waited_s / (times[-1] - asked), abs=0.1)
    assert train["where"].endswith(f"train.py:{WHERE}")
    assert train["stage"] == "read"
    assert found.stdout.index("Training waits") < found.stdout.index("It waits for reading files")
    assert f"train.py:{WHERE}: DataLoader(..., num_workers=" in found.stdout
    first, second = [line for line in found.stdout.splitlines() if line.startswith("[")]
    assert first == second
    assert len(json.loads(first)) == 70
    assert is_converted(scripts / "out")
    assert "With shards:" in found.stdout


def test_a_script_is_ended_with_its_workers_once_enough_is_measured(scripts: Path, bench: Bench) -> None:
    words = ["train.py", "data/raw", "0.002", "0.001", "1", "9999"]
    ended = bench("watch", "--batches", "6", "--json", "found.json", *words)
    assert ended.returncode == 0
    assert content(scripts)["ended"]
    left = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if "9999" in line]


def test_the_slowest_rank_of_torchrun_is_named(scripts: Path, bench: Bench) -> None:
    found = bench("watch", "--for", "2s", "torchrun", "--standalone", "--nproc-per-node", "2", "ranks.py")
    assert found.returncode == 0
    assert "Training waits in rank 1, the slowest of 2," in found.stdout


def test_an_iterator_that_is_named_is_timed_and_the_exit_code_is_the_scripts(
    scripts: Path, bench: Bench
) -> None:
    found = bench("watch", "--loader", "mydata:batches", "--json", "found.json", "named.py")
    assert found.returncode == 5
    assert found.stdout.startswith("x" * 2_000_000)
    assert content(scripts)["streams"][0]["batches"] == 47
    (scripts / "other.py").write_text("import os; os.kill(os.getpid(), 9)")
    found = bench("watch", "-m", "other")
    assert found.returncode == 137
    assert "No batch was asked for" in found.stdout
    check_bad_input(bench("watch", "--loader", "mydata:other", "named.py"), "--loader", "no such function")
    check_bad_input(bench("watch", "--cure", "shards", "--dst", ".", "named.py"), "is not empty")


def test_idle_time_of_a_device_is_read_when_it_is_known_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = mock.Mock(spec=["record", "query", "elapsed_time"])  # it cannot be waited for
    event.elapsed_time.return_value = 250.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(hook, "_FOLDER", str(tmp_path))
    stream = hook._Stream({"kind": "named"})
    for event.query.return_value in (False, False, True):
        stream.ask()
        stream.got(0.0, [torch.zeros(2, 3)])
    (path,) = tmp_path.iterdir()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event for event in events if event[0] == "idle"] == [["idle", 0, n, 0.25] for n in range(3)]
