"""Advice on scripts of several kinds: its pasted lines serve what the script's own loader served."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader
from torchvision.datasets import vision

from bench import watch
from bench.watch import advice, describe
from bench.watch.advice import Advice
from bench.watch.replacements import find_replacements
from bench.watch.script import apply
from precache.cli.commandline import run
from precache.cli.main import main as precache
from tests.command import ROOT

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HEAD = """\
import sys

import torch, torchvision
from torch.utils.data import DataLoader
from torchvision import transforms as T

"""
TAIL = """
    seen.append([batch for batch in loader])
    seen.append([batch for batch in loader])
"""
ALL_REPLACEMENTS = {"ImageDataset", "ImageDataset on shards", "build", "build on shards"}


@dataclass(frozen=True)
class ScriptCase:
    """Script and the replacements that can be pasted into it.

    Attributes:
        body: lines of the script below its imports.
        expected: names of the replacements.
        reason: text in the sentences on replacements that are left out.
        normal: mean and standard deviation that the script normalises with.
        exact: whether the script shows the same part of a picture each time.
        colours: whether pictures keep their colours, which identify them.
    """

    body: str
    expected: frozenset[str] = frozenset()
    reason: str = ""
    normal: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    exact: bool = False
    colours: bool = True


def folder(steps: str, root: str = "photos") -> str:
    return f'data = torchvision.datasets.ImageFolder("{root}", T.Compose([{steps}, T.ToTensor()]))\n'


CROP = "T.RandomResizedCrop(16, scale=(0.5, 1.0)), T.RandomHorizontalFlip()"
NORMAL = "T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
CASES = {
    "plain": ScriptCase(
        folder("T.RandomResizedCrop(16)") + "loader = DataLoader(data, batch_size=4, shuffle=True)",
        frozenset(ALL_REPLACEMENTS),
    ),
    "root_of_a_split": ScriptCase(
        f'data = torchvision.datasets.ImageFolder("parts/val", T.Compose([T.Resize(20), T.CenterCrop(16), '
        f"T.ToTensor(), {NORMAL}]))\n"
        "loader = torch.utils.data.DataLoader(\n    data,\n    batch_size=4,\n    drop_last=False,  # all\n)",
        frozenset(ALL_REPLACEMENTS),
        normal=IMAGENET,
        exact=True,
    ),
    "random_split": ScriptCase(
        folder(CROP)
        + "train, val = torch.utils.data.random_split(data, [10, 8], torch.Generator().manual_seed(0))\n"
        "loader = DataLoader(train, 4, True, drop_last=True)",
        frozenset(ALL_REPLACEMENTS),
    ),
    "subset_of_a_subset_of_a_split": ScriptCase(
        folder(CROP, "parts/train") + "half = torch.utils.data.Subset(data, range(0, 18, 2))\n"
        "loader = DataLoader(torch.utils.data.Subset(half, [5, 1, 7, 3]), batch_size=2, shuffle=True)",
        frozenset(ALL_REPLACEMENTS),
    ),
    "subset_sampler": ScriptCase(
        folder(CROP) + "chosen = torch.utils.data.SubsetRandomSampler([17, 3, 5, 8, 1])\n"
        "options = {'batch_size': 2, 'num_workers': 0}\n"
        "loader = DataLoader(data, sampler=chosen, **options)",
        frozenset(ALL_REPLACEMENTS),
    ),
    "other_transforms": ScriptCase(
        folder("T.Resize((16, 16)), T.RandomRotation(30), T.RandAugment(), T.GaussianBlur(3), lambda x: x")
        + "loader = DataLoader(data, 4, shuffle=True)",
        frozenset({"ImageDataset", "ImageDataset on shards"}),
        "RandomRotation, RandAugment, GaussianBlur and a lambda",
        colours=False,
    ),
    "jitter": ScriptCase(
        folder(f"{CROP}, T.ColorJitter(0.4, 0.4, 0.4, 0.1)") + "loader = DataLoader(data, 4, shuffle=True)",
        frozenset(ALL_REPLACEMENTS),
        colours=False,
    ),
    "stretched": ScriptCase(
        folder("T.Resize((16, 24)), T.RandomHorizontalFlip(0.2)")
        + "loader = DataLoader(data, 4, shuffle=True)",
        frozenset(ALL_REPLACEMENTS - {"build"}),
    ),
    "resized_then_cropped": ScriptCase(
        folder("T.Resize(20), T.RandomCrop(16)") + "loader = DataLoader(data, 4, shuffle=True)",
        frozenset(ALL_REPLACEMENTS - {"build"}),
    ),
    "two_crops": ScriptCase(
        "class TwoCrops:\n    def __init__(self, base):\n        self.base = base\n\n"
        "    def __call__(self, x):\n        first = self.base(x)\n        return [first, self.base(x)]\n\n"
        f"steps = TwoCrops(T.Compose([{CROP}, T.ToTensor()]))\n"
        'data = torchvision.datasets.ImageFolder("photos", transform=steps)\n'
        "loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)",
        frozenset(ALL_REPLACEMENTS),
    ),
    "other_normalisation": ScriptCase(
        'data = torchvision.datasets.ImageFolder("photos", T.Compose([T.Resize(16), T.CenterCrop(16), '
        "T.ToTensor(), T.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.25))]))\n"
        "loader = DataLoader(dataset=data, batch_size=4)",
        frozenset(ALL_REPLACEMENTS),
        normal=((0.5, 0.4, 0.3), (0.2, 0.2, 0.25)),
        exact=True,
    ),
    "bytes": ScriptCase(
        'data = torchvision.datasets.ImageFolder("photos", T.Compose([T.Resize(20), T.CenterCrop(16), '
        "T.PILToTensor()]))\nloader = DataLoader(data, 4)",
        frozenset(ALL_REPLACEMENTS),
        exact=True,
    ),
    "grey": ScriptCase(
        folder(f"T.Grayscale(1), {CROP}") + "loader = DataLoader(data, 4, shuffle=True)",
        frozenset({"ImageDataset", "ImageDataset on shards"}),
        "Grayscale",
        colours=False,
    ),
    "own_class": ScriptCase(
        "class Own(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 8\n\n"
        "    def __getitem__(self, index):\n        return torch.rand(3, 16, 16), index\n\n"
        "loader = DataLoader(Own(), batch_size=4)",
        reason="this dataset is Own",
    ),
    "own_class_around_a_folder": ScriptCase(
        "class Noisy(torch.utils.data.Dataset):\n"
        "    def __init__(self, dataset):\n        self.dataset = dataset\n\n"
        "    def __len__(self):\n        return len(self.dataset)\n\n"
        "    def __getitem__(self, index):\n        return self.dataset[index]\n\n"
        + folder(CROP)
        + "loader = DataLoader(Noisy(data), batch_size=4)",
        frozenset({"ImageDataset"}),
        "the dataset is a Noisy",
    ),
    "own_reader": ScriptCase(
        "from PIL import Image\n\n"
        "def read(path):\n    return Image.open(path).convert('RGB')\n\n"
        "steps = T.Compose([T.RandomResizedCrop(16), T.ToTensor()])\n"
        'data = torchvision.datasets.ImageFolder("photos", steps, loader=read)\n'
        "loader = DataLoader(data, 4)",
        reason="has a reader of its own, read",
    ),
    "dicts": ScriptCase(
        "def collate(samples):\n"
        "    images, labels = zip(*samples)\n"
        "    return {'pixel_values': torch.stack(images), 'labels': torch.tensor(labels)}\n\n"
        + folder(CROP)
        + "loader = DataLoader(data, 4, collate_fn=collate)",
        frozenset({"ImageDataset", "ImageDataset on shards"}),
        "the batches are made by collate",
    ),
    "weights": ScriptCase(
        folder(CROP) + "chosen = torch.utils.data.WeightedRandomSampler([1.0] * 6 + [0.0] * 12, 18)\n"
        "loader = DataLoader(data, batch_size=4, sampler=chosen)",
        frozenset(ALL_REPLACEMENTS - {"build on shards"}),
    ),
    "one_line_for_two": ScriptCase(
        "steps = T.Compose([T.RandomResizedCrop(16), T.ToTensor()])\n"
        'both = {x: torchvision.datasets.ImageFolder("parts/" + x, steps) for x in ["train", "val"]}\n'
        "made = {x: DataLoader(both[x], batch_size=4, shuffle=True) for x in both}\n"
        'loader = made["train"]',
        frozenset({"ImageDataset"}),
        "one line makes the loaders of several datasets",
    ),
    "name_that_is_taken": ScriptCase(
        folder(CROP) + "loaders = {'train': DataLoader(data, batch_size=4, shuffle=True)}\n"
        "loader = loaders['train']",
        frozenset(ALL_REPLACEMENTS),
    ),
    "own_subclass": ScriptCase(
        "class Doubled(torchvision.datasets.ImageFolder):\n"
        "    def __getitem__(self, index):\n        image, label = super().__getitem__(index)\n"
        "        return image, 2 * label\n\n"
        'data = Doubled("photos", T.Compose([T.RandomResizedCrop(16), T.ToTensor()]))\n'
        "loader = DataLoader(data, batch_size=4, shuffle=True)",
        frozenset({"ImageDataset"}),
        "the dataset is a Doubled",
    ),
}
IN_A_LOOP = (
    "data = torchvision.datasets.ImageFolder('photos', T.Compose([T.RandomResizedCrop(16), T.ToTensor()]))\n"
    "for epoch in range(2):\n"
    "    batches = []\n"
    "    for images, labels in DataLoader(data, 4, shuffle=True):\n"
    "        batches.append((images, labels))\n"
    "    seen.append(batches)\n"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a working folder with `photos`, `parts/train` and `parts/val`; each picture has its own colour."""
    root = tmp_path_factory.mktemp("work")
    for top, per_class in (("photos", 6), ("parts/train", 6), ("parts/val", 3)):
        number = 0
        for name in ("ant", "bee", "cat"):
            (root / top / name).mkdir(parents=True)
            for index in range(per_class):
                draw(number, 24 + number % 3 * 8, 32).save(root / top / name / f"{index}.png")
                number += 1
    return root


def draw(number: int, height: int, width: int) -> Image.Image:
    """Draw a picture in the colour of a number, a little brighter on the right and darker below."""
    down, right = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    shade = (16 * right - 8 * down)[..., None]
    return Image.fromarray((colour(number) + shade).astype(np.uint8))


def colour(number: int) -> np.ndarray[Any, Any]:
    return 40.0 + 60 * np.array([number % 4, number // 4 % 4, number // 16 % 4])


def execute(path: Path, argv: list[str]) -> list[Any]:
    """Run a script in this process, and return what it appended to `seen`: batches, epoch by epoch."""
    seen: list[Any] = []
    code = compile(path.read_text(), str(path), "exec")
    with mock.patch.object(sys, "argv", [str(path), *argv]):
        exec(code, {"__name__": "__main__", "__file__": str(path), "seen": seen})
    return seen


@contextlib.contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    """Collect the records of the loaders that are iterated in the block, made as the hook makes them."""
    records: list[dict[str, Any]] = []
    make, root_of, iterate = DataLoader.__init__, vision.VisionDataset.__init__, DataLoader.__iter__

    def __init__(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        describe.note_loader(self, dataset)
        make(self, dataset, *args, **kwargs)

    def __iter__(self: Any) -> Any:
        batches = list(iterate(self))
        record = {**describe.describe(self), "batch": describe.describe_batch(batches[0])}
        records.append(json.loads(json.dumps(record)))
        return iter(batches)

    with (
        mock.patch.multiple(DataLoader, __init__=__init__, __iter__=__iter__),
        mock.patch.object(describe, "_HERE", os.path.dirname(__file__)),
        mock.patch.object(describe, "_FOLDER", os.getcwd()),
        mock.patch.dict(describe._counts, clear=True),
    ):
        describe.watch_datasets(vision)
        try:
            yield records
        finally:
            vision.VisionDataset.__init__ = root_of


def paste(replacement: Advice, script: Path, name: str) -> Path:
    """Run the commands of an advice, and write the script with its edits to a file beside it."""
    for command in replacement.commands:
        program, *words = shlex.split(command)
        assert program == "precache"
        assert run(precache, "precache", [*words, "--workers", "0"]) == 0
    text = script.read_text()
    assert {edit.path for edit in replacement.edits} <= {str(script)}
    pasted = script.with_name(name)
    pasted.write_text(apply(replacement.edits, text))
    return pasted


def sorted_samples(epoch: list[Any], case: ScriptCase) -> list[tuple[Any, ...]]:
    """List label, number of the picture, views, shape and dtypes of each sample, sorted."""
    samples = []
    for batch in epoch:
        images, labels = batch.values() if isinstance(batch, Mapping) else batch
        views = images if isinstance(images, list) else [images]
        for index, label in enumerate(labels.tolist()):
            numbers = {picture_number(view[index], case) if case.colours else 0 for view in views}
            assert len(numbers) == 1
            samples.append((label, *numbers, len(views), views[0].dtype, views[0].shape[1:], labels.dtype))
    return sorted(samples, key=str)


def picture_number(image: torch.Tensor, case: ScriptCase) -> int:
    """Number of the picture that has the colour of an image."""
    pixels = image.float().mean((1, 2)).numpy() * (1 if image.dtype == torch.uint8 else 255)
    if case.normal is not None:
        mean, std = map(np.array, case.normal)
        pixels = (image.mean((1, 2)).numpy() * std + mean) * 255
    return int(np.argmin([np.abs(pixels - colour(number)).sum() for number in range(64)]))


def sorted_pixels(epoch: list[Any], case: ScriptCase) -> list[Any]:
    """Pixels of each picture, 0-255, [height, width, 3], in the order of their numbers."""
    images = [image for images, _ in epoch for image in images]
    mean, std = map(np.array, case.normal or ((0.0,) * 3, (1.0,) * 3))
    scale = 1 if images[0].dtype == torch.uint8 else 255
    ordered = sorted(images, key=lambda image: picture_number(image, case))
    return [(image.permute(1, 2, 0).numpy() * std + mean) * scale for image in ordered]


@pytest.mark.parametrize("name", CASES)
def test_pasted_replacement_serves_the_pictures_of_the_script(
    name: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.chdir(work)
    script = work / f"{name}.py"
    body = "".join(f"    {line}\n" if line else "\n" for line in case.body.splitlines())
    script.write_text(f'{HEAD}if __name__ == "__main__":\n{body}{TAIL}')
    with recording() as records:
        own = execute(script, [])
    (work / "shards").mkdir(exist_ok=True)  # a folder that must not be written to
    replacements = find_replacements(records[0], "shards")
    assert {replacement.name for replacement in replacements.advices} == case.expected
    assert case.reason in " ".join(replacements.left_out)
    for replacement in replacements.advices:
        pasted = execute(paste(replacement, script, f"{name}_pasted.py"), [])
        if name == "weights":
            samples = {sample[:2] for sample in sorted_samples(pasted[0], case)}
            assert samples <= {(0, number) for number in range(6)}
            continue
        assert len(pasted) == 2
        for epoch in pasted:
            assert len(epoch) == len(own[0])
            if name != "random_split":  # drops another sample in each epoch
                assert sorted_samples(epoch, case) == sorted_samples(own[0], case), replacement.name
            if case.exact:
                pairs = zip(sorted_pixels(epoch, case), sorted_pixels(own[0], case), strict=True)
                for image, own_image in pairs:
                    assert np.abs(image - own_image).max() <= 2


FRAMEWORKS = {
    "transformers": (
        "args = TrainingArguments('out', dataloader_num_workers=1)\nTrainer(args).train()\n",
        "args = TrainingArguments('out', dataloader_num_workers=2, dataloader_persistent_workers=True)",
    ),
    "transformers by its parser": (
        "args = HfArgumentParser(TrainingArguments).parse_args()\nTrainer(args).train()\n",
        "--dataloader_num_workers 2 --dataloader_persistent_workers True",
    ),
    "timm": (
        "val = create_loader(data)\nparser.add_argument('-j', '--workers')\n"
        "more = dict(num_workers=args.workers)\ntrain = create_loader(data, is_training=True, **more)\n",
        '--workers 2 train = create_loader(data, is_training=True, **{**more, "persistent_workers": True})',
    ),
    "fastai": (
        "learner = 1\ndls = block.dataloaders(path, bs=8)\n",
        "dls = block.dataloaders(path, bs=8, num_workers=2, persistent_workers=True)",
    ),
    "ultralytics": ("model.train(data='photos', workers=0)\n", "model.train(data='photos', workers=2)"),
    "another": (
        "train(make(data, num_workers=0))\n",
        "Give num_workers=2, persistent_workers=True to another: another makes the DataLoader, called at "
        "script.py:1.",
    ),
}


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_advice_has_the_name_that_a_library_gives_an_argument(library: str, tmp_path: Path) -> None:
    text, expected = FRAMEWORKS[library]
    script = tmp_path / "script.py"
    script.write_text(text)
    lines = text.splitlines()
    made = {"path": str(script), "line": len(lines), "column": None}
    package = library.split(maxsplit=1)[0]
    record = {"libraries": [package], "made": made, "main": str(script), "guarded": True, "start": "fork"}
    change = advice.set_arguments(record, {"num_workers": 2, "persistent_workers": True})
    assert change is not None
    texts = [*change.options, *(line for edit in change.edits for line in edit.new), *change.notes]
    assert " ".join(texts).replace(f"{tmp_path}/", "") == expected


def test_pillow_simd_is_installed_for_the_python_of_the_script() -> None:
    (command,) = advice.put_simd({"python": "/envs/my own/bin/python"}).commands
    assert command.count("'/envs/my own/bin/python' -m pip") == command.count(" -m pip") == 3


def test_advice_is_none_where_a_library_takes_no_such_argument() -> None:
    record = {"libraries": ["ultralytics"], "made": None, "main": "", "guarded": True, "start": "fork"}
    assert advice.set_arguments(record, {"pin_memory": True}) is None


def run_and_record(
    work: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "script.py", argv: Any = ()
) -> tuple[Path, dict[str, Any]]:
    """Run a script, and return it with the record of its first loader."""
    monkeypatch.chdir(work)
    script = work / name
    script.write_text(text)
    with recording() as records:
        execute(script, list(argv))
    return script, records[0]


ARGUMENTS = {
    "keyword": ("DataLoader(data, 4, num_workers=0, shuffle=True)", ""),
    "position": ("DataLoader(data, 4, True, None, None, 0)", ""),
    "unpacked": ("DataLoader(data, **{'batch_size': 4, 'num_workers': 0})", ""),
    "unpacked_twice": ("DataLoader(data, **{'batch_size': 4}, **{'num_workers': 0})", ""),
    "unpacked_option": ("DataLoader(data, **options)", "--num-workers 1"),
    "many_lines": ("DataLoader(\n    data,  # all\n    batch_size=(4),\n)", ""),
    "option": ("DataLoader(data, 4, num_workers=args.num_workers)", "--num-workers 1"),
}


@pytest.mark.parametrize("style", ARGUMENTS)
def test_pasted_argument_reaches_the_loader(style: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, option = ARGUMENTS[style]
    text = (
        f"{HEAD}import argparse\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('-j', '--num-workers', type=int, default=0)\nargs = parser.parse_args()\n"
        "options = dict(batch_size=4, num_workers=args.num_workers)\n"
        f"data = [[image] for image in torch.rand(8, 3, 4, 4)]\nloader = {call}\n"
        "seen.append((loader.num_workers, loader.persistent_workers, len(list(loader))))\n"
    )
    script, record = run_and_record(work, monkeypatch, text)
    change = advice.set_arguments(record, {"num_workers": 1, "persistent_workers": True})
    assert change is not None
    assert " ".join(change.options) == option
    pasted = paste(change, script, "pasted.py")
    assert execute(pasted, option.split()) == [(1, True, 2)]
    if style == "option":
        assert execute(pasted, []) == [(0, False, 2)]


def test_loader_made_in_a_loop_moves_out_and_is_still_shuffled(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "".join(f"    {line}\n" for line in IN_A_LOOP.splitlines())
    script, record = run_and_record(work, monkeypatch, f'{HEAD}if __name__ == "__main__":\n{body}')
    persistent = advice.set_arguments(record, {"num_workers": 1, "persistent_workers": True})
    assert persistent is not None
    for change in (persistent, find_build(record, "out")):
        first, second = execute(paste(change, script, "pasted.py"), [])
        labels = [torch.cat([labels for _, labels in epoch]).tolist() for epoch in (first, second)]
        assert labels[0] != labels[1]
        assert sorted(labels[0]) == sorted(labels[1])
    assert "DataLoader" not in script.with_name("pasted.py").read_text().partition("for epoch")[2]


def find_build(record: dict[str, Any], dst: str) -> Advice:
    """Find the advice to use `loaders.build` on the tree."""
    (build,) = [change for change in find_replacements(record, dst).advices if change.name == "build"]
    return build


WATCHED = """\
import json, os, sys
import torch, torchvision
from torch.utils.data import DataLoader, random_split
from torchvision import transforms as T

def main():
    data = torchvision.datasets.ImageFolder("photos", T.Compose([T.RandomResizedCrop(16), T.ToTensor()]))
    train, val = random_split(data, [8, 10], torch.Generator().manual_seed(0))
    labels = []
    for epoch in range(2):
        for images, targets in DataLoader(train, 4, shuffle=True):
            labels += targets.tolist()
    print(json.dumps([labels, sorted(data.targets[i] for i in train.indices)]))

if __name__ == "__main__":
    main()
"""


def test_advice_from_a_watched_process_serves_the_same_subset(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    script = work / "watched.py"
    script.write_text(WATCHED)
    hook = {"BENCH_WATCH": str(tmp_path), "PYTHONPATH": str(Path(watch.__file__).parent / "inject")}
    (tmp_path / "config.json").write_text("{}")
    assert run_script(script, hook)[0]
    events = [
        json.loads(line) for path in tmp_path.glob("events-*") for line in path.read_text().splitlines()
    ]
    assert not [event for event in events if event["event"] == "fault"]
    record = next(event["record"] for event in events if event["event"] == "described")
    assert (record["guarded"], record["root"]) == (True, str(work / "photos"))
    names = {replacement.name for replacement in find_replacements(record, "halves").advices}
    assert names == ALL_REPLACEMENTS
    build = find_build(record, "halves")
    labels, half = run_script(paste(build, script, "watched_pasted.py"), {"PYTHONPATH": str(ROOT)})
    assert sorted(labels[:8]) == sorted(labels[8:]) == half
    assert labels[:8] != labels[8:]


def run_script(script: Path, environment: dict[str, str]) -> Any:
    """Run a script in a process of its own, and parse the JSON that it prints last."""
    command = [sys.executable, str(script)]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def test_loader_that_needs_a_loop_variable_stays_in_the_loop(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = IN_A_LOOP.replace("DataLoader(data, 4", "DataLoader(data, 4 + epoch")
    _, record = run_and_record(work, monkeypatch, HEAD + text)
    change = advice.set_arguments(record, {"num_workers": 1, "persistent_workers": True})
    assert change is not None
    assert "made anew" in change.notes[0]
    assert change.edits[0].new[0].endswith("DataLoader(data, 4 + epoch, shuffle=True, num_workers=1):")
    assert "made anew in a loop" in find_replacements(record, "out").left_out[0]


def test_relative_root_is_resolved_when_the_dataset_is_made(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = "T.Compose([T.RandomResizedCrop(16), T.ToTensor()])"
    text = (
        f"{HEAD}import os\n\nos.chdir('parts')\ndata = torchvision.datasets.ImageFolder('train', {steps})\n"
        "data.samples = [(os.path.abspath(path), label) for path, label in data.samples]\n"
        "os.chdir('..')\nloader = DataLoader(data, 4)\nseen.append([batch for batch in loader])\n"
    )
    _, record = run_and_record(work, monkeypatch, text)
    assert record["root"] == str(work / "parts" / "train")


def test_build_in_a_script_without_main_guard_uses_threads(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + CASES["plain"].body + "\nseen.append([batch for batch in loader])\n"
    script, record = run_and_record(work, monkeypatch, text)
    build = find_build(record, "out")
    assert "workers=0" in build.edits[-1].new[0]
    pasted = execute(paste(build, script, "pasted.py"), [])
    own = execute(script, [])
    assert sorted_samples(pasted[0], CASES["plain"]) == sorted_samples(own[0], CASES["plain"])


def test_subset_is_left_out_where_precache_finds_more_pictures(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(4):
            draw(index, 24, 24).save(tmp_path / "photos" / name / f"{index}.png")
    (tmp_path / "photos/ant/3.png").rename(tmp_path / "photos/ant/without_an_extension")
    whole = HEAD + CASES["plain"].body
    end = "\nseen.append([batch for batch in loader])\n"
    _, record = run_and_record(tmp_path, monkeypatch, whole + end)
    for replacement in find_replacements(record, "out").advices:
        assert "8 pictures where ImageFolder finds 7" in " ".join(replacement.notes)
    half = whole.replace("DataLoader(data", "DataLoader(torch.utils.data.Subset(data, [4, 5])")
    _, record = run_and_record(tmp_path, monkeypatch, half + end)
    replacements = find_replacements(record, "out")
    assert replacements.advices == []
    assert "a subset would be other pictures" in replacements.left_out[0]


LEFT_OUT = {
    "samples that were cut": (
        folder(CROP) + "data.samples = data.samples[:9]\nloader = DataLoader(data, 4)",
        "the script has changed its samples",
    ),
    "a sampler that is not seen": (
        folder(CROP)
        + "options = {'sampler': torch.utils.data.SubsetRandomSampler([1, 2, 3])}\n"
        + "loader = DataLoader(data, batch_size=2, **options)",
        "does not say its sampler",
    ),
    "a Subset that is drawn in the call": (
        folder(CROP)
        + "half = torch.utils.data.Subset(data, range(9))\n"
        + "loader = DataLoader(torch.utils.data.random_split(half, [5, 4])[0], 4)",
        "the Subset is made in the call",
    ),
    "flat pictures": (
        folder(f"{CROP}, T.ToTensor(), T.Lambda(torch.flatten)").replace(", T.ToTensor()]", "]")
        + "loader = DataLoader(data, 4)",
        "the batches are not images and labels",
    ),
    "a list of batches": (
        folder(CROP) + "loader = DataLoader(data, batch_sampler=[[1, 2], [3]])",
        "the script makes its batches itself",
    ),
    "two folders": (
        folder(CROP) + "loader = DataLoader(data + data, 4)",
        "the samples are of 2 datasets",
    ),
    "splits as classes": (
        folder(CROP, "parts") + "loader = DataLoader(data, 4)",
        "which loaders takes for splits",
    ),
    "floats in another size": (
        folder("T.RandomResizedCrop(16, interpolation=T.InterpolationMode.BICUBIC)")
        + "loader = DataLoader(data, 4)",
        "interpolation=",
    ),
    "labels that are changed": (
        folder(CROP).replace("T.ToTensor()])", "T.ToTensor()]), target_transform=float")
        + "loader = DataLoader(data, 4)",
        "target_transform",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_build_is_left_out_where_it_would_serve_other_batches(
    name: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, reason = LEFT_OUT[name]
    _, record = run_and_record(work, monkeypatch, f"{HEAD}{body}\nseen.append([batch for batch in loader])\n")
    replacements = find_replacements(record, "out")
    assert reason in " ".join(replacements.left_out)
    assert not [change for change in replacements.advices if change.name.startswith("build")]


def test_pictures_that_exif_turns_are_counted(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos" / "ant").mkdir(parents=True)
    exif = Image.Exif()
    for index in range(4):
        exif[ExifTags.Base.Orientation] = 6 if index else 1
        draw(index, 24, 32).save(tmp_path / "photos" / "ant" / f"{index}.jpg", exif=exif)
    text = HEAD + CASES["plain"].body + "\nseen.append([batch for batch in loader])\n"
    _, record = run_and_record(tmp_path, monkeypatch, text)
    for replacement in find_replacements(record, "out").advices:
        assert "EXIF turns 3 of 4 pictures" in " ".join(replacement.notes)


def test_script_module_named_loaders_is_reported(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").symlink_to(work / "photos")
    (tmp_path / "loaders.py").touch()
    text = HEAD + CASES["plain"].body + "\nseen.append([batch for batch in loader])\n"
    _, record = run_and_record(tmp_path, monkeypatch, text)
    replacements = find_replacements(record, "out")
    assert replacements.advices == []
    assert str(tmp_path / "loaders.py") in replacements.left_out[0]


@pytest.mark.parametrize("library", ["accelerate", "pytorch_lightning"])
def test_loader_remade_by_a_library_has_the_record_of_the_first(
    library: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    steps = "T.Compose([T.RandomResizedCrop(16), T.ToTensor()])"
    text = (
        f"{HEAD}data = torchvision.datasets.ImageFolder('photos', {steps})\n"
        "loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)\n"
    )
    if library == "accelerate":
        text += "import accelerate\nloader = accelerate.Accelerator(cpu=True).prepare(loader)\n"
    else:
        text = text.replace("loader = ", "with replaced(DataLoader, 'dataset'):\n    loader = ")
        text = f"from lightning_fabric.utilities.data import _replace_dunder_methods as replaced\n{text}"
    text += "seen.append([batch for batch in loader])\n"
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "DataLoader(data" in line)
    _, record = run_and_record(work, monkeypatch, text)
    assert (record["made"]["line"], record["libraries"]) == (line, [])
    assert record["sampler"]["name"] == "RandomSampler"
    assert record["arguments"]["drop_last"]
    names = {replacement.name for replacement in find_replacements(record, "out").advices}
    assert names == ALL_REPLACEMENTS
