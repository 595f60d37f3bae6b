"""Line of a script where a loader is made, and what the hook notes of the loaders that are made there."""

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import ToTensor

from bench.watch import hook, origin, transforms
from bench.watch.origin import Origin, find_origin
from loaders import Loader, Reading, build

HERE = os.path.relpath(__file__)


def execute(text: str, path: Path, module: str = "__main__") -> dict[str, Any]:
    """Run a module in this process, in which `loader` is a call that makes a loader."""
    names = {
        "__name__": module,
        "loader": lambda *_: find_origin(sys._getframe(1)),
        "torch": torch,
        "Path": Path,
        "Split": Enum("Split", ["TRAIN", "VAL"]),
        "ToTensor": ToTensor,
    }
    exec(compile(text, str(path), "exec"), names)
    return names


def test_line_of_the_script_is_that_of_the_innermost_call(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    made = execute("def make():\n    return loader(\n        1)\n\nmade = make()\n", script)["made"]
    assert made == Origin(f"{script}:2", (), "")


def test_line_is_relative_to_where_bench_watch_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "FOLDER", str(tmp_path))
    assert execute("made = loader()\n", tmp_path / "a/b.py")["made"].where == "a/b.py:1"


def test_library_that_makes_a_loader_is_named_with_the_line_that_calls_it(tmp_path: Path) -> None:
    library = execute("def create_loader():\n    return loader()\n", tmp_path / "timm/data.py", "timm.data")
    script = f"{os.__file__.removesuffix('os.py')}site-packages/helper.py"
    helper = execute("def run(f):\n    return f()\n", Path(script), "helper.run")
    made = helper["run"](library["create_loader"])
    assert made.where.startswith(HERE)
    assert made.libraries == ("helper", "timm")


CHOICES = {
    "def make(train):\n    return loader()\nmade = make(True)\n": "make(train=True)",
    "def make(root, is_training=False):\n    return loader()\nmade = make('a')\n": "make(is_training=False)",
    "def make(*, split):\n    return loader()\nmade = make(split='val')\n": "make(split='val')",
    "def make(data):\n    return loader()\n"
    "made = make(torch.utils.data.TensorDataset(torch.zeros(1)))\n": "make(data=...)",
    "def make(path, size):\n    return loader()\nmade = make('a/train', 9)\n": "make(path='a/train')",
    "def make(path):\n    return loader()\nmade = make(Path('imagenet_val'))\n": "make(path='imagenet_val')",
    "def make(phase):\n    return loader()\nmade = make(Split.TRAIN)\n": "make(phase='Split.TRAIN')",
    "def make(root, transform):\n    return loader()\nmade = make('a', ToTensor())\n": "make(transform=...)",
    "class Data:\n    def loader(self, train):\n        return loader()\n"
    "    def train_dataloader(self):\n        return self.loader(train=True)\n"
    "made = Data().train_dataloader()\n": "loader(train=True)",
    "def main(path, pretrained=True, model='resnet', lr=0.1):\n    return loader()\n"
    "made = main('train/photos')\n": "",
    "train = True\nmade = loader()\n": "",
}


@pytest.mark.parametrize("text", CHOICES, ids=range(len(CHOICES)))
def test_argument_that_chooses_a_split_is_found_in_the_call(text: str, tmp_path: Path) -> None:
    assert execute(text, tmp_path / "script.py")["made"].choice == CHOICES[text]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let the hook describe the DataLoaders that are made in the test, and return its events."""
    monkeypatch.setitem(sys.modules, "bench_watch_origin", origin)
    monkeypatch.setitem(sys.modules, "bench_watch_transforms", transforms)
    written: list[tuple[Any, ...]] = []
    log = mock.Mock(write=lambda event, **values: written.append((event, *values.values())))
    monkeypatch.setattr(hook, "_log", log)
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # restored after the test
    hook._watch_loader_class(DataLoader)
    return written


def line_of(word: str) -> str:
    """'file:line' of the line in this file that ends in `# word`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {word}")]
    return f"{HERE}:{number}"


@pytest.mark.parametrize("library", ["accelerate", "lightning_fabric"])
def test_loader_remade_by_a_library_is_of_the_line_of_the_first(
    library: str, events: list[tuple[Any, ...]]
) -> None:
    module = pytest.importorskip("lightning_fabric.utilities.data" if "light" in library else library)
    first = DataLoader(TensorDataset(torch.zeros(40)), 4, shuffle=True)  # remade
    if library == "accelerate":
        remade = module.Accelerator(cpu=True).prepare(first)
        remade = getattr(remade, "base_dataloader", remade)
    else:
        with module._replace_dunder_methods(DataLoader, "dataset"):
            first = DataLoader(first.dataset, 4, shuffle=True)  # by Lightning's wrapper
        remade = module._update_dataloader(first, first.sampler)
    assert remade is not first
    description = hook._find(hook._descriptions, remade)
    where = line_of("remade" if library == "accelerate" else "by Lightning's wrapper")
    assert (description["where"], description["libraries"]) == (where, ())
    assert events[-1] == ("made", where)


def test_loader_of_build_is_of_the_line_that_calls_it(
    events: list[tuple[Any, ...]], raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "__init__", Loader.__init__)  # restored after the test
    hook._watch_loader_class(Loader)
    loader = build(raw_tree, reading=Reading(workers=0))  # by build
    assert events == [("made", line_of("by build"))]
    assert hook._find(hook._descriptions, loader)["where"] == line_of("by build")


def test_loaders_that_one_line_makes_are_counted(events: list[tuple[Any, ...]]) -> None:
    for _ in range(2):
        DataLoader(TensorDataset(torch.zeros(4)))  # twice
    assert events == [("made", line_of("twice"))] * 2


def test_root_is_written_as_where_the_script_was_started(
    events: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hook._find_root(mock.Mock(root="photos")) == "photos"
    assert hook._find_root(mock.Mock(root=Path.cwd() / "photos")) == "photos"
    assert hook._find_root(torch.zeros(1)) == ""
    monkeypatch.chdir(tmp_path)  # a relative path is another one here than where `bench watch` was typed
    assert hook._find_root(mock.Mock(root="photos")) == str(tmp_path / "photos")


def test_looking_at_the_start_method_leaves_the_choice_to_the_script() -> None:
    assert hook._start_method(torch.multiprocessing.get_context("spawn")) == "spawn"
    multiprocessing = mock.Mock(wraps=torch.multiprocessing)
    with mock.patch.object(torch, "multiprocessing", multiprocessing):
        assert hook._start_method(None) in torch.multiprocessing.get_all_start_methods()
    multiprocessing.get_start_method.assert_called_once_with(allow_none=True)
    multiprocessing.get_context.assert_not_called()
