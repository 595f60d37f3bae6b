"""`loaders.ImageDataset` behaves like ImageFolder for the code that uses it, over every format."""

import copy
import inspect
import io
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder, VisionDataset, wrap_dataset_for_transforms_v2
from torchvision.transforms.functional import pil_to_tensor

from loaders import ImageDataset
from precache import Recipe, convert
from precache.errors import PrecacheError, SampleError, SettingError, SourceError
from precache.formats import FORMATS
from precache.pictures import images
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE
from tests.damage import flip_a_bit
from tests.precache.sources.examples import SAMPLES, TARGETS, example_source

EACH_FORMAT = pytest.mark.parametrize("kind", FORMATS)
PLACES = ["tree", *FORMATS]
"""Names of the folders that hold the same pictures: the raw tree, and one per format."""
NAMES = ("10", "9", "Zebra", "ant eater", "ante", "été", "b/inner", "b")


def number_of(picture: Any) -> int:
    """Return the number that `draw` drew into a picture, even after JPEG compression."""
    red, green, _ = np.asarray(picture, np.float64).reshape(-1, 3).mean(axis=0)
    return round(red / 16) + 16 * round(green / 16)


def draw(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 24), (number % 16 * 16, number // 16 * 16, 90)).save(path)


def make_tree(root: Path, seed: int) -> Path:
    """Make a tree that ImageFolder reads alike: no EXIF, its endings; classes not in natural order."""
    chosen = random.Random(seed)
    inner = ("", "deep/", "deep-er/", "deep/er/")
    files = [
        f"{name}/{chosen.choice(inner)}{chosen.choice('aBZ_~')}{number}.{ending}"
        for name in NAMES
        for number, ending in enumerate(chosen.choices(("png", "jpg", "PNG", "jpeg", "bmp"), k=5))
    ]
    chosen.shuffle(files)
    for number, file in enumerate(files):
        draw(root / file, number)
    (root / "b/notes.txt").write_text("no picture")
    return root


def convert_to_all(tree: Path, folder: Path) -> dict[str, Path]:
    """Convert `tree` to each format, in several shards, and return all paths, that of the tree too."""
    places = {"tree": tree}
    for kind in FORMATS:
        places[kind] = folder / kind
        convert(tree, places[kind], Recipe(format=kind, size=24, shard_bytes=9 * 24 * 24 * 3), workers=0)
    return places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("image dataset")
    return convert_to_all(make_tree(root / "tree", seed=0), root)


def relative(dataset: Any, tree: Path) -> list[tuple[str, Any]]:
    """Return `samples` with paths relative to the tree."""
    paths = [os.path.relpath(path, tree) if os.path.isabs(path) else path for path, _ in dataset.samples]
    return [(path, label) for path, (_, label) in zip(paths, dataset.samples, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_every_format_has_the_order_of_image_folder(seed: int, tmp_path: Path) -> None:
    """Saved indices and a seeded `random_split` choose the same pictures of each.

    Pictures that ImageFolder does not list are samples of the other loaders, and have ids.
    """
    tree = make_tree(tmp_path / "tree", seed)
    more = ["9/!.gif", "ante/B.GIF", "ante/tmp", "b/inner/C.tga"]
    for name, kind in zip(more, ("gif", "gif", "png", "tga"), strict=True):
        (tree / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 24)).save(tree / name, kind)
    listed = {os.path.relpath(path, tree) for path, _ in ImageFolder(tree).samples}
    scan = scan_tree(tree)
    ids = [sample.id for sample in scan.samples if sample.path in listed]
    assert {sample.path for sample in scan.samples} == {*listed, *more}
    image_folder = ImageFolder(tree)
    numbers = [number_of(picture) for picture, _ in image_folder]
    expected_part, _ = random_split(image_folder, [0.7, 0.3], torch.Generator().manual_seed(seed))
    places = convert_to_all(tree, tmp_path)
    convert(places["webdataset"], tmp_path / "again", Recipe(format="shards", size=24), workers=0)
    for place in (*places.values(), tmp_path / "again"):
        dataset = ImageDataset(place)
        assert relative(dataset, tree) == relative(image_folder, tree)
        for name in ("classes", "class_to_idx", "targets"):
            assert getattr(dataset, name) == getattr(image_folder, name), name
        assert dataset.ids.tolist() == ids
        assert [number_of(picture) for picture, _ in dataset] == numbers
        assert [label for _, label in dataset] == image_folder.targets
        part, _ = random_split(dataset, [0.7, 0.3], torch.Generator().manual_seed(seed))
        assert list(part.indices) == list(expected_part.indices)
        expected_numbers = [number_of(expected_part[i][0]) for i in range(9)]
        assert [number_of(part[i][0]) for i in range(9)] == expected_numbers


def test_a_tree_looks_like_image_folder_to_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        folder = tmp_path / f"class {number % 3}"
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (30 + number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    functions = (transforms.Resize(20), lambda label: 2 - label)
    monkeypatch.chdir(tmp_path.parent)
    name = tmp_path.name
    for root in (tmp_path, str(tmp_path), f"{tmp_path}//", name, f"./{name}", f"{name}/../{name}/"):
        image_folder, dataset = ImageFolder(root, *functions), ImageDataset(root, *functions)
        for attribute in ("classes", "class_to_idx", "targets", "samples", "imgs", "root"):
            assert getattr(dataset, attribute) == getattr(image_folder, attribute), attribute
        assert len(dataset) == len(image_folder) == 12
    assert dataset.imgs is dataset.samples
    assert isinstance(dataset, VisionDataset)
    assert str(dataset.transforms) == str(image_folder.transforms)
    assert str(image_folder).splitlines()[1:3] == str(dataset).splitlines()[1:3]
    for (picture, label), (expected, expected_label) in zip(dataset, image_folder, strict=True):
        assert (label, type(label)) == (expected_label, int)
        assert isinstance(picture, Image.Image)
        assert (picture.mode, picture.size) == (expected.mode, expected.size)
        assert picture.tobytes() == expected.tobytes()


def test_positional_parameters_are_those_of_image_folder() -> None:
    """Parameters that ImageFolder does not have are keyword-only."""

    def positional_parameters(kind: type) -> list[str]:
        parameters = inspect.signature(kind).parameters.values()
        return [
            parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    assert positional_parameters(ImageDataset) == positional_parameters(ImageFolder)


def cut(kind: Any, root: Path, **settings: Any) -> Any:
    dataset = kind(root, **settings)
    dataset.samples = dataset.samples[7:12]
    return dataset


def label_anew(kind: Any, root: Path, **settings: Any) -> Any:
    """Replace every attribute, as many scripts do."""
    dataset = kind(root, **settings)
    dataset.samples = [(path, 7 - label) for path, label in dataset.samples if label > 2]
    dataset.imgs, dataset.targets = dataset.samples, [label for _, label in dataset.samples]
    dataset.classes = dataset.classes[::-1][:5]
    dataset.class_to_idx = {name: label for label, name in enumerate(dataset.classes)}
    return dataset


def change_in_place(kind: Any, root: Path, **settings: Any) -> Any:
    dataset = kind(root, **settings)
    random.Random(3).shuffle(dataset.samples)
    dataset.samples[4] = (dataset.samples[5][0], 3)
    del dataset.samples[9:]
    return dataset


def set_targets(kind: Any, root: Path, **settings: Any) -> Any:
    """ImageFolder's `__getitem__` does not read `targets`, and so does not see that they changed."""
    dataset = kind(root, **settings)
    dataset.targets = [0] * 3
    assert len(dataset.samples) == len(dataset)
    return dataset


def find_two_classes(kind: Any, root: Path, **settings: Any) -> Any:
    class Two(kind):  # type: ignore[misc]
        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            chosen = [name for name in names if "e" in name][::-1]
            return chosen, {name: label for label, name in enumerate(chosen)}

    return Two(root, **settings)


def give_paths(kind: Any, root: Path, **settings: Any) -> Any:
    class WithLoader(kind):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            path, label = self.samples[index]
            return self.loader(path), label + len(os.path.basename(path))

    return WithLoader(root, **settings)


def skip_init(kind: Any, root: Path, **settings: Any) -> Any:
    """Use a subclass that takes samples and loader over from another dataset."""
    whole = kind(root, **settings)

    class Part(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            self.samples = whole.samples[::3]
            self.loader, self.transform, self.target_transform = whole.loader, None, lambda label: -label

    return Part()


def set_transforms(kind: Any, root: Path, **settings: Any) -> Any:
    dataset = copy.copy(kind(root, lambda picture: picture.crop((0, 0, 0, 0)), **settings))
    dataset.transform, dataset.target_transform = (lambda picture: picture.rotate(90)), str
    return dataset


CHANGES: list[Callable[..., Any]] = [
    cut, label_anew, change_in_place, set_targets, find_two_classes, give_paths, skip_init, set_transforms
]  # fmt: skip


class Listing(ImageDataset):
    """Dataset that lists the class folders by itself, as examples of torchvision do."""

    def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        return names, {name: label for label, name in enumerate(names)}


def test_class_folders_are_found_in_the_folder_of_the_split(raw_tree: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(raw_tree, tmp_path / split)
        assert Listing(tmp_path / split).samples == ImageFolder(tmp_path / split).samples
    assert Listing(tmp_path, split="val").samples == ImageFolder(tmp_path / "val").samples


def test_find_classes_that_names_no_class_is_an_error(converted: dict[str, Path]) -> None:
    with pytest.raises(FileNotFoundError, match="find_classes"):
        Listing(converted["shards"])


def test_transforms_v2_wrap_an_image_dataset_like_image_folder(converted: dict[str, Path]) -> None:
    dataset = ImageDataset(converted["webdataset"])
    assert isinstance(dataset, ImageFolder)
    picture, label = wrap_dataset_for_transforms_v2(dataset)[3]
    assert (picture, label) == dataset[3]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_by_scripts_work_as_with_image_folder(
    change: Callable[..., Any], places: dict[str, Path]
) -> None:
    image_folder = change(ImageFolder, places["tree"])
    expected = [(number_of(picture), label) for picture, label in image_folder]
    for kind in PLACES:
        dataset = change(ImageDataset, places[kind])
        assert (kind, len(dataset)) == (kind, len(image_folder))
        assert [(number_of(picture), label) for picture, label in dataset] == expected
        for name in {"classes", "class_to_idx", "targets"} & vars(image_folder).keys():
            assert getattr(dataset, name) == getattr(image_folder, name), name
    if change is not skip_init:  # its class is local to a function, and cannot be copied
        copied = copy.deepcopy(dataset)
        assert [(number_of(picture), label) for picture, label in copied] == expected


def test_an_overridden_make_dataset_lists_a_tree_only(places: dict[str, Path]) -> None:
    def make(directory: str, class_to_idx: dict[str, int], **rest: Any) -> list[tuple[str, int]]:
        assert {"extensions", "is_valid_file"} <= rest.keys()
        return [
            (os.path.join(directory, "Zebra", name), 5)
            for name in sorted(os.listdir(f"{directory}/Zebra"))[:2]
        ]

    image_folder_class, dataset_class = (
        type("Own", (kind,), {"make_dataset": staticmethod(make)}) for kind in (ImageFolder, ImageDataset)
    )
    assert dataset_class(places["tree"]).samples == image_folder_class(places["tree"]).samples != []
    for kind in FORMATS:
        with pytest.raises(SettingError, match=r"^make_dataset ", check=lambda e: "Subset" in e.remedy):
            dataset_class(places[kind])


def test_loader_and_is_valid_file_read_a_tree_like_image_folder(
    places: dict[str, Path], tmp_path: Path
) -> None:
    """`is_valid_file` may choose hidden files and files that are no pictures, as with ImageFolder."""
    tree = Path(shutil.copytree(places["tree"], tmp_path / "tree"))
    for name in NAMES:
        (tree / name / ".hidden.npy").write_bytes(name.encode())
    rules: list[dict[str, Any]] = [
        {"loader": lambda path: path.upper()},
        {
            "is_valid_file": lambda path: path.endswith(("0.PNG", "1.png", "1.PNG", "2.jpg")),
            "allow_empty": True,
        },
        {"loader": lambda path: Path(path).read_bytes(), "is_valid_file": lambda path: path.endswith(".npy")},
    ]
    for rule in rules:
        image_folder, dataset = ImageFolder(tree, **rule), ImageDataset(tree, **rule)
        assert dataset.samples == image_folder.samples != []
        if "loader" in rule:
            assert list(dataset) == list(image_folder)


@pytest.mark.parametrize("name", ["loader", "is_valid_file"])
def test_loader_and_is_valid_file_are_refused_without_a_tree(
    name: str, places: dict[str, Path], tmp_path: Path
) -> None:
    for kind in FORMATS:
        with pytest.raises(SettingError, match=f"^{name} .*{places[kind]}"):
            ImageDataset(places[kind], **{name: str.isalpha})
    with pytest.raises(SettingError, match=f"^({name}|precache) "):
        ImageDataset(places["tree"], **{name: str.isalpha}, precache=tmp_path / "out")


def test_is_valid_file_lists_the_chosen_split(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val")):
        for name in ("cat", "dog"):
            draw(tmp_path / split / name / "1.png", number)
            (tmp_path / split / name / "2.raw").write_bytes(b"2")
    image_folder = ImageFolder(
        tmp_path / "val", loader=str, is_valid_file=lambda path: "2" in Path(path).name
    )
    dataset = ImageDataset(tmp_path, None, None, str, lambda path: "2" in Path(path).name, split="val")
    assert dataset.samples == image_folder.samples
    assert dataset.classes == image_folder.classes
    assert list(dataset) == list(image_folder)
    for picture in tmp_path.rglob("*.png"):
        picture.unlink()
    with pytest.raises(SettingError, match=f"^is_valid_file: {tmp_path} .*val"):
        ImageDataset(tmp_path, is_valid_file=lambda path: "2" in path, split="val")


def make_nothing(root: Path) -> None: ...


def make_an_empty_folder(root: Path) -> None:
    root.mkdir()


def make_no_class(root: Path) -> None:
    draw(root / "1.png", 1)


def make_no_picture(root: Path) -> None:
    (root / "cat").mkdir(parents=True)
    (root / "cat/1.txt").write_text("no picture")


def make_an_empty_class(root: Path) -> None:
    draw(root / "cat/1.png", 1)
    (root / "dog/inner").mkdir(parents=True)


MISSING = [make_nothing, make_an_empty_folder, make_no_class, make_no_picture, make_an_empty_class]


@pytest.mark.parametrize("rule", [None, lambda path: path.endswith(".png")], ids=["pictures", "rule"])
@pytest.mark.parametrize("make", MISSING, ids=lambda make: make.__name__)
def test_missing_pictures_raise_the_errors_of_image_folder(
    make: Callable[[Path], None], rule: Any, tmp_path: Path
) -> None:
    """Errors are FileNotFoundError, RuntimeError (of older versions) and PrecacheError, and name the path."""
    root = tmp_path / "photos"
    make(root)
    with pytest.raises(FileNotFoundError):
        ImageFolder(root, is_valid_file=rule)
    for error in (FileNotFoundError, RuntimeError, PrecacheError):
        with pytest.raises(error, match=f"^{root}[:/]"):
            ImageDataset(root, is_valid_file=rule)
    if make in (make_no_picture, make_an_empty_class):
        image_folder, dataset = (
            kind(root, is_valid_file=rule, allow_empty=True) for kind in (ImageFolder, ImageDataset)
        )
        assert (dataset.classes, dataset.samples) == (image_folder.classes, image_folder.samples)
        assert len(dataset) == len(image_folder)


def test_a_class_without_pictures_in_this_split_is_not_empty(tmp_path: Path) -> None:
    """Labels are those of the whole tree, even if a split has no picture of some."""
    for file in ("train/cat/1.png", "train/dog/1.png", "val/dog/1.png"):
        draw(tmp_path / file, 1)
    assert ImageDataset(tmp_path, split="val").targets == [1]
    draw(tmp_path / "valid/dog/1.png", 1)
    with pytest.raises(SourceError, match=f"{tmp_path}: .*'val'.*'valid'"):
        ImageDataset(tmp_path)


def test_a_root_may_be_joined_with_the_split(tmp_path: Path) -> None:
    """The usual scripts read `os.path.join(args.data, "train")`; `args.data` may be a converted folder."""
    for number in range(9):
        draw(tmp_path / f"tree/{'train' if number % 3 else 'val'}/{'ab'[number % 2]}/{number}.png", number)
    for root in convert_to_all(tmp_path / "tree", tmp_path).values():
        for split in ("train", "val"):
            image_folder = ImageFolder(tmp_path / "tree" / split)
            dataset = ImageDataset(os.path.join(root, split, ""), allow_empty=True)
            assert [(number_of(picture), label) for picture, label in dataset] == [
                (number_of(picture), label) for picture, label in image_folder
            ]
        for name in ("test", "train/val", "trian"):
            with pytest.raises(FileNotFoundError, match=str(root / name)):
                ImageDataset(root / name)
    with pytest.raises(FileNotFoundError, match="split='train'"):
        build_loader(root / "train")


def test_a_lost_or_broken_file_raises_errors_of_image_folder(tmp_path: Path) -> None:
    """Scripts catch these types to leave such samples out; the errors name the file."""
    for number in range(3):
        draw(tmp_path / f"cat/{number}.png", number)
    image_folder = ImageFolder(tmp_path)
    datasets = [ImageDataset(tmp_path), ImageDataset(tmp_path, decode="tensor")]
    lost, broken = tmp_path / "cat/0.png", tmp_path / "cat/1.png"
    lost.unlink()
    broken.write_bytes(b"no picture")
    for index, error, path in ((0, FileNotFoundError, lost), (1, Image.UnidentifiedImageError, broken)):
        with pytest.raises(error):
            image_folder[index]
        for dataset in datasets:
            with pytest.raises(error, match=str(path)) as caught:
                dataset[index]
            assert caught.value.path == str(path)
            unpickled = pickle.loads(pickle.dumps(caught.value))
            assert (type(unpickled), str(unpickled)) == (caught.type, str(caught.value))
            assert isinstance(unpickled, PrecacheError)
    with pytest.raises(Image.UnidentifiedImageError, match=f"^{broken}: "):
        list(DataLoader(Subset(datasets[0], [1]), batch_size=None, num_workers=1))


@pytest.mark.parametrize("kind", PLACES)
def test_an_image_dataset_is_indexed_like_a_list(kind: str, places: dict[str, Path]) -> None:
    dataset = ImageDataset(places[kind])
    last = len(dataset) - 1
    for index in (last, -1, np.int64(last), np.uint8(last), torch.tensor(last)):
        assert number_of(dataset[index][0]) == number_of(dataset[last][0])
    for index in (last + 1, -last - 2):
        with pytest.raises(IndexError, match=f"{places[kind]}: sample {index} "):
            dataset[index]
    for value in (1.0, "1", slice(2), None):
        with pytest.raises(TypeError):
            dataset[value]  # type: ignore[index]
    counts = Counter(dataset.targets)
    sampler = WeightedRandomSampler([1 / counts[label] for label in dataset.targets], 20)
    loader: DataLoader[Any] = DataLoader(
        ConcatDataset([Subset(dataset, [3, 1]), dataset]), sampler=sampler, batch_size=None
    )
    assert len(list(loader)) == 20


@pytest.mark.parametrize("kind", PLACES)
def test_a_missing_path_in_samples_is_named(kind: str, places: dict[str, Path]) -> None:
    dataset = ImageDataset(places[kind])
    dataset.samples.append(("nowhere/1.png", 3))
    with pytest.raises(FileNotFoundError, match=r"nowhere/1\.png"):
        dataset[-1]


def test_settings_of_other_datasets_name_the_one_to_give(raw_tree: Path) -> None:
    for name, replacement in {
        "path": "root",
        "train": "split",
        "transforms": "transform",
        "extensions": "is_valid_file",
    }.items():
        with pytest.raises(SettingError, match=f"^{name} ") as caught:
            ImageDataset(raw_tree, **{name: "x"})
        assert replacement in caught.value.remedy
    with pytest.raises(TypeError, match=r"'transfrom'.* transform"):
        ImageDataset(raw_tree, transfrom=None)


STORED = [*FORMATS, *(f"grey-{kind}" for kind in FORMATS)]


@pytest.mark.parametrize("kind", STORED)
def test_samples_equal_those_that_a_loader_serves(
    kind: str, converted: dict[str, Path], shaped: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are whole even if the system returns less than asked for, as a network's file system may."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, start: pread(file, min(count, 999), start))
    path = {**converted, **shaped}[kind]
    pictures, tensors = (ImageDataset(path, decode=decode) for decode in ("pil", "tensor"))
    with build_loader(path, shuffle=False, workers=1, batch_size=IMAGES) as loader:
        (batch,) = loader
        order = batch.ids.argsort()
        paths = [loader.path_of(i) for i in batch.ids[order]]
    assert (tensors.ids == batch.ids[order].numpy()).all()
    assert tensors.targets == batch.labels[order].tolist() == [label for _, label in pictures]
    assert tensors.samples == list(zip(paths, tensors.targets, strict=True))
    channels = batch.images.shape[1]
    for served, (picture, _), (tensor, _) in zip(batch.images[order], pictures, tensors, strict=True):
        assert (tensor.shape, tensor.dtype) == ((channels, STORED_SIZE, STORED_SIZE), torch.uint8)
        assert torch.equal(tensor, served)
        assert torch.equal(pil_to_tensor(picture), tensor)
        tensor.zero_()  # its memory is the caller's own
    opened = [file.path for file in psutil.Process().open_files() if file.path.startswith(f"{tensors.root}/")]
    assert {os.path.basename(path) for path in opened} <= {"dataset.index"}  # which is mapped
    assert torch.equal(tensors[3][0], batch.images[order[3]])


@pytest.mark.parametrize("target", TARGETS)
def test_labels_of_every_kind_are_those_of_a_batch(target: str, tmp_path: Path) -> None:
    """Reading `samples`, which has labels in the form of the source, does not change that."""
    convert(example_source(target), tmp_path / "out", Recipe(format="shards", size=16), workers=0)
    with build_loader(tmp_path / "out", workers=1, batch_size=SAMPLES) as loader:
        (batch,) = loader
    labels = dict(zip(batch.ids.tolist(), batch.labels, strict=True))
    dataset = ImageDataset(tmp_path / "out")
    for _ in range(2):
        for id, (_, label) in zip(dataset.ids.tolist(), dataset, strict=True):
            tensor = torch.as_tensor(label)
            assert (tensor.dtype, tensor.tolist()) == (labels[id].dtype, labels[id].tolist())
        assert [label for _, label in dataset.samples] == dataset.targets


def test_a_raw_tree_gives_each_picture_in_full_size_and_upright(raw_tree: Path) -> None:
    pictures, tensors = (ImageDataset(raw_tree, decode=decode) for decode in ("pil", "tensor"))
    for (path, _), (picture, _), (tensor, _) in zip(pictures.samples, pictures, tensors, strict=True):
        expected = images.decode(Path(path).read_bytes(), path)
        assert (picture.mode, picture.tobytes()) == ("RGB", expected.tobytes())
        assert torch.equal(tensor, pil_to_tensor(picture))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_serve_each_sample_once(method: str, raw_tree: Path, converted: dict[str, Path]) -> None:
    folders = [raw_tree, *converted.values()]
    datasets = [ImageDataset(path, transform=transforms.Resize((8, 8)), decode="tensor") for path in folders]
    for dataset in datasets:
        dataset[0]  # so that forked workers inherit opened files
    datasets += [pickle.loads(pickle.dumps(dataset)) for dataset in datasets]
    datasets += [
        cut(ImageDataset, path, transform=transforms.Resize((8, 8)), decode="tensor") for path in folders
    ]
    loader: DataLoader[Any] = DataLoader(
        ConcatDataset(datasets), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    served = [
        label for pictures, labels in loader for label in labels.tolist() if pictures.shape[2:] == (8, 8)
    ]
    assert served == [label for dataset in datasets for _, label in dataset.samples]


@EACH_FORMAT
def test_a_damaged_sample_or_shard_is_named_also_in_a_worker(
    kind: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A damaged sample raises alone; a truncated or missing shard raises for all of its samples."""
    folder = Path(shutil.copytree(converted[kind], tmp_path / kind))
    shard, bad = flip_a_bit(folder, shard_number=1, row=1)
    read, unread = ImageDataset(folder, transform=pil_to_tensor), ImageDataset(folder)
    position = read.ids.tolist().index(bad)
    for _ in range(2):
        with pytest.raises(SampleError, match=f"{shard}: sample {bad} .*checksum"):
            read[position]
    assert all(read[number][0].shape[0] == 3 for number in range(IMAGES) if number != position)
    with pytest.raises(SampleError, match=rf"^{shard}: sample {bad} \([^\n]*$"):
        list(DataLoader(read, batch_size=None, num_workers=1))
    for change in (lambda: os.truncate(shard, 100), shard.unlink):
        change()
        for dataset in (read, unread):
            with pytest.raises(PrecacheError, match=shard.name):
                dataset[position]


def damaged_files() -> dict[str, bytes]:
    """Return the content of damaged pictures, by the names of their files."""
    files = {}
    for extension, kind in {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "tif": "TIFF", "ppm": "PPM"}.items():
        memory = io.BytesIO()
        Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)).save(memory, kind)
        data = memory.getvalue()
        files[f"whole.{extension}"] = data
        for share in (3, 10, 60, 99):
            files[f"cut{share}.{extension}"] = data[: len(data) * share // 100]
        files[f"flipped.{extension}"] = data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :]
        files[f"zeros.{extension}"] = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    return files | {"empty.png": b"", "text.jpg": b"no picture"}


@pytest.mark.parametrize("takes_truncated", [False, True])
@pytest.mark.parametrize("decode", ["pil", "tensor"])
def test_a_damaged_picture_is_served_where_image_folder_serves_it(
    decode: Any, takes_truncated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in damaged_files().items():
        (tmp_path / "a" / name).write_bytes(data)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", takes_truncated)
    expected, dataset = ImageFolder(tmp_path), ImageDataset(tmp_path, decode=decode)
    assert dataset.samples == expected.samples
    served = 0
    for position, (path, _) in enumerate(expected.samples):
        try:
            picture = expected[position][0]
        except Exception:
            picture = None
        if picture is None:
            with pytest.raises(PrecacheError, match=os.path.basename(path)):
                dataset[position]
        elif takes_truncated or not os.path.basename(path).startswith(("flipped", "zeros")):
            pixels = np.asarray(dataset[position][0])
            shape = (pixels.shape[1], pixels.shape[2]) if decode == "tensor" else pixels.shape[:2]
            assert shape == (picture.height, picture.width)
            served += 1
    assert served >= 15 if takes_truncated else served >= 5
