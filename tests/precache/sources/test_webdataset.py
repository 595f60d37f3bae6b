"""WebDataset tars as sources: keys, parts, labels, fields and splits."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precache.errors import ImageError, SourceError
from precache.sources import find_split
from tests.precache.sources.tars import JPEG, Files, files_of, make_tar, scan_of

SAMPLE = {"a.jpg": JPEG, "a.cls": b"1"}
SPLITS = {
    "train": "train-00000 birds-train-0000 cc3m-train-0000 train train2017 TRAIN_001 train-00000-of-00002 "
    "speed-test-train-00 my.training.0 train/0000 train/shard-0 train2017/0",
    "val": "val-00000 imagenet1k-validation-00 birds-valid-0 dev-0 Validation/0000 val/birds-0",
    "test": "test-00000 birds_test_0 testing/0 birds-eval-0",
    "": "shard-000000 trains-0000 trainval-0 contest-0 00000 latest-0 validated-1 photos/0000",
}
"""Names of tars in published datasets, by the split that they say."""


@pytest.mark.parametrize("split", SPLITS)
def test_names_of_tars_and_folders_say_the_split(split: str, tmp_path: Path) -> None:
    for number, name in enumerate(SPLITS[split].split()):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        tar = make_tar(folder / f"{name}.tar", SAMPLE)
        assert scan_of(folder).samples.split_names == (split,), name
        if "/" in name:  # the folder `train` as a source says nothing, but the tar in it may
            assert scan_of(tar.parent).samples.split_names == (find_split(tar.name),), name


def test_tars_with_and_without_a_split_in_their_names_are_refused(tmp_path: Path) -> None:
    for name in ("train-0", "birds-validation-0", "extra-0"):
        make_tar(tmp_path / f"{name}.tar", SAMPLE)
    with pytest.raises(SourceError, match=r"'birds-validation-0\.tar'.* 'extra-0\.tar'") as raised:
        scan_of(tmp_path)
    assert raised.value.path == tmp_path
    os.remove(tmp_path / "extra-0.tar")
    assert [ref.split for ref in scan_of(tmp_path).samples] == ["val", "train"]


LAYOUTS: list[tuple[str, str]] = [
    ("0.tar 1.tar", "0.tar 1.tar"),
    ("train/0.tar train/0.json val/0.tar README.md", "train/0.tar val/0.tar"),
    ("0.tar 0.parquet 0_stats.json _tmp/0.jpg .cache/1.tar .2.tar", "0.tar"),  # as img2dataset leaves it
    ("0.tar empty/", "0.tar"),
    ("0.tar cat/1.jpg", ""),
    ("0.tar birds/cat/1.jpg", ""),
    ("cat/1.jpg cat/0.tar", ""),
    ("0.zip", ""),
]
"""Files in a folder, and those that are tars of samples; none if the folder is a tree."""


@pytest.mark.parametrize(("paths", "tars"), LAYOUTS)
def test_tars_are_found_unless_the_folder_is_a_tree(paths: str, tars: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for path in map(folder.joinpath, paths.split()):
        (path if path.name == "empty" else path.parent).mkdir(parents=True, exist_ok=True)
        if path.suffix == ".tar":
            make_tar(path, SAMPLE)
        elif path.name != "empty":
            path.write_bytes(JPEG)
    tar_names = tars.split()
    if not tar_names:
        with suppress(SourceError):  # a tree without class folders
            assert scan_of(folder).classes
        return
    expected = {"a.jpg"}
    if len(tar_names) > 1:  # paths begin with the tar's name, since a key is in several tars
        expected = {f"{tar}/a.jpg" for tar in tar_names}
    assert {ref.path for ref in scan_of(folder).samples} == expected


def test_shards_that_lie_too_deep_are_refused_with_the_folder_to_name(tmp_path: Path) -> None:
    for name in ("default/train/0.tar", "default/val/0.tar", "default/notes/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        make_tar(tmp_path / name, SAMPLE)
    with pytest.raises(SourceError, check=lambda error: error.remedy.endswith(f"{tmp_path}/default")):
        scan_of(tmp_path)
    assert scan_of(tmp_path / "default").samples.split_names == ("train", "val")


KEYS = st.text("abC é_-0", min_size=1, max_size=4) | st.sampled_from(["__a__", "x" * 120])
FOLDERS = st.sampled_from(["", "", "a/", "b.c/", "a/b.d/", "./", "__meta__/", "__a.b/", ".hidden/", "d__/"])
PICTURES = st.sampled_from(["jpg", "JPG", "input.jpg", "2 x.Png", "05.png", "jpeg"])
CLASSES = st.sampled_from(["cls", "CLS", "target.cls", "05.cls"])
OTHERS = st.sampled_from(["txt", "a.json", "b.json", "seg.npy", "x", "jpg.md5", "cls2"])
STRAYS = ["nodot", "a/nodot", "b.c/nodot", ".jpg", "._1.jpg", "__x__", "__x.y__", "__m__/1.jpg", "README.md"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_samples_are_those_of_the_webdataset_library(tmp_path: Path, data: st.DataObject) -> None:
    """Compare tars without hidden files in folders, which the library takes for parts of a sample."""
    tariterators = pytest.importorskip("webdataset.tariterators", reason="'bench' is not installed")
    files: Files = {"first.jpg": JPEG, "first.cls": b"first"}
    paths = st.tuples(FOLDERS, KEYS).map("".join)
    for number, path in enumerate(data.draw(st.lists(paths, max_size=6, unique_by=os.path.normpath))):
        others = data.draw(st.lists(OTHERS, max_size=3, unique=True))
        for part in data.draw(st.permutations([data.draw(PICTURES), data.draw(CLASSES), *others])):
            files[f"{path}.{part}"] = b"class %d" % number
    files |= dict.fromkeys(data.draw(st.lists(st.sampled_from(STRAYS), unique=True)), b"stray")
    tar = make_tar(tmp_path / "x.tar", files)
    expected = {}
    with open(tar, "rb") as file:
        members = tariterators.tar_file_expander([{"url": str(tar), "stream": file}])
        for sample in tariterators.group_by_keys(members):
            picture = [part for part in sample if part.rpartition(".")[2] in ("jpg", "png", "jpeg")]
            label = [part for part in sample if part.rpartition(".")[2] == "cls"]
            if picture and label:
                expected[os.path.normpath(sample["__key__"])] = sample[picture[0]], sample[label[0]]
    scan = scan_of(tar)
    samples = {}
    for ref in scan.samples:
        folder, _, name = ref.path.rpartition("/")
        content = scan.source.read(ref, 999), scan.classes[ref.label].encode()
        samples[os.path.join(folder, name.partition(".")[0])] = content
    assert samples == expected


@pytest.fixture
def tar_of_many_parts(tmp_path: Path) -> Path:
    """Write a tar of two samples with several pictures, labels and texts each."""
    files: Files = {}
    for number in range(2):
        parts = {
            "input.jpg": b"in",
            "depth.png": b"far",
            "target.cls": b"1",
            "other.cls": b"owl",
            "name.txt": b"x",
        }
        parts["meta.json"] = b'{"width": %d, "kind": "owl"}' % number
        files |= {f"s{number}.{part}": content for part, content in parts.items()}
    return make_tar(tmp_path / "x.tar", files)


def test_options_choose_the_parts_of_samples(tar_of_many_parts: Path) -> None:
    for image, label, content, classes in (
        ("input.jpg", "target.cls", b"in", ("0", "1")),  # whole numbers are indices
        ("Depth.png", "other.cls", b"far", ("owl",)),
        ("input.jpg", "name.txt", b"in", ("x",)),
        ("input.jpg", "kind", b"in", ("owl",)),  # a key of .json
    ):
        scan = scan_of(tar_of_many_parts, image=image, label=label)
        assert scan.classes == classes
        assert scan.source.read(scan.samples[1], 9) == content
        assert scan.samples.fields["width"].tolist() == [0, 1]


def test_ambiguous_and_missing_parts_are_refused_by_name(tar_of_many_parts: Path) -> None:
    for options, details in (
        ({"label": "target.cls"}, "input.jpg and depth.png"),
        ({"image": "input.jpg"}, "target.cls, other.cls"),
        ({"image": "jpg", "label": "target.cls"}, "'jpg'.*'input.jpg'"),
        ({"image": "input.jpg", "label": "nothing"}, "'nothing'"),
    ):
        with pytest.raises(SourceError, match=details) as raised:
            scan_of(tar_of_many_parts, **options)
        assert str(raised.value.path) == str(tar_of_many_parts)


def test_tars_of_samples_and_of_class_folders_are_distinguished(raw_tree: Path, tmp_path: Path) -> None:
    def classes_of(name: str, files: Files) -> tuple[str, ...]:
        return scan_of(make_tar(tmp_path / name, files)).classes

    assert classes_of("a.tar", {"1.jpg": JPEG, "1.json": b"{}"}) == ()
    assert classes_of("c.tar", {"x/1.jpg": JPEG, "x/1.cls": b"bird"}) == ("bird",)
    for files in ({"x/1.jpg": JPEG, "x/1.json": b"{}", "x/1.txt": b""}, {"x/1.jpg": JPEG}, {"1.jpg": JPEG}):
        with pytest.raises(SourceError, match="tar xf"):
            classes_of("b.tar", files)
    shutil.copytree(raw_tree, tmp_path / "tree")
    make_tar(tmp_path / "tree/x.tar", files_of(raw_tree))
    assert len(scan_of(tmp_path / "tree").samples) == 70, "a tar beside class folders is ignored"


def test_labels_in_tars_are_indices_names_or_numbers(tmp_path: Path) -> None:
    for first, second, options, target, classes, labels in (
        ("3\n", "1", {}, "class", ("0", "1", "2", "3"), [3, 1]),
        ("dog", "cat", {}, "class", ("cat", "dog"), [1, 0]),
        ("3", "1", {"target": "class"}, "class", ("1", "3"), [1, 0]),
        ("0.5", "1.5", {}, "number", (), [0.5, 1.5]),
    ):
        files = {"0.jpg": JPEG, "0.cls": first.encode(), "1.jpg": JPEG, "1.cls": second.encode()}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert (scan.target, scan.classes) == (target, classes)
        assert [ref.label if classes else ref.target for ref in scan.samples] == labels


def test_labels_may_be_parts_of_some_samples_and_in_json_of_others(tmp_path: Path) -> None:
    for part, value, classes in ((b"2", 1, ("0", "1", "2")), (b"owl", "heron", ("heron", "owl"))):
        files = {"a.jpg": JPEG, "a.kind": part, "b.jpg": JPEG, "b.json": json.dumps({"kind": value}).encode()}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), label="kind")
        assert [scan.classes[ref.label] for ref in scan.samples] == [part.decode(), str(value)]
        assert scan.classes == classes


def test_target_none_takes_tars_without_their_labels(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "x.tar", {"a.jpg": JPEG, "a.cls": b"3", "b.jpg": JPEG, "b.txt": b"owl"})
    scan = scan_of(tar, target="none")
    assert [(ref.path, ref.label) for ref in scan.samples] == [("a.jpg", -1), ("b.jpg", -1)]
    assert (scan.target, scan.classes) == ("none", ())


def test_a_split_labelled_minus_one_is_left_out_with_a_warning(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-0.tar", {"a.jpg": JPEG, "a.cls": b"2", "b.jpg": JPEG, "b.cls": b"0"})
    make_tar(tmp_path / "test-0.tar", {"c.jpg": JPEG, "c.cls": b"-1"})
    scan = scan_of(tmp_path)
    assert [(ref.path, ref.split, ref.label) for ref in scan.samples] == [
        ("a.jpg", "train", 2), ("b.jpg", "train", 0)
    ]  # fmt: skip
    assert scan.classes == ("0", "1", "2")
    assert any("split test" in warning for warning in scan.warnings)
    assert scan_of(tmp_path / "test-0.tar").target == "none"


BAD: list[tuple[dict[str, bytes], dict[str, Any], list[str]]] = [
    ({"cls": b"cat"}, {}, ["sample 'b'", "'cat'"]),
    ({"cls": b"100000"}, {}, ["sample 'b'", "'100000'", "99,999"]),
    ({}, {}, ["sample 'b'", ".cls"]),
    ({"cls": b"1", "json": b"[" * 9999}, {}, ["sample 'b'.json"]),
    ({"cls": b"1", "json": b" " * (1 << 20) + b"{}"}, {}, ["'b.json'", "1,048,578 bytes"]),
    ({"cls": b"1", "png": JPEG}, {}, ["'b.png'", "--image png"]),
    ({"cls": b"1", "json": b"{}"}, {"fields": ("some",)}, ["sample 'b'", "'some'"]),
]
"""Parts of the second sample besides its picture, options, and names and values in the error."""


@pytest.mark.parametrize(("parts", "options", "details"), BAD, ids=range(len(BAD)))
def test_a_bad_sample_is_refused_with_its_tar_and_key(
    parts: dict[str, bytes], options: dict[str, Any], details: list[str], tmp_path: Path
) -> None:
    files = {"a.jpg": JPEG, "a.cls": b"0", "a.json": b'{"some": 1}', "b.jpg": JPEG}
    files |= {f"b.{part}": content for part, content in parts.items()}
    tar = make_tar(tmp_path / "x.tar", files)
    with pytest.raises(SourceError) as raised:
        scan_of(tar, **options)
    assert str(raised.value.path).startswith(str(tar))
    assert [detail for detail in details if detail not in str(raised.value)] == []


def test_parts_of_a_sample_need_not_be_next_to_each_other(tmp_path: Path) -> None:
    files = {"b.cls": b"0", "a.cls": b"1", "b.jpg": b"b", "d/a.b.jpg": b"ab", "d/a.cls": b"2", "a.JPG": b"a"}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    samples = [(ref.path, ref.label, scan.source.read(ref, 9)) for ref in scan.samples]
    assert samples == [("b.jpg", 0, b"b"), ("a.JPG", 1, b"a"), ("d/a.b.jpg", 2, b"ab")]


def test_parts_are_ignored_for_one_reason_in_all_samples(tmp_path: Path) -> None:
    parts = {"jpg": JPEG, "cls": b"0", "boxes.json": b"[[1, 2, 3, 4]]"}
    files = {f"{key}.{part}": content for key in "ab" for part, content in parts.items()}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    assert len(scan.ignored) == 2
    assert len({ignored.reason for ignored in scan.ignored}) == 1


def test_the_option_image_chooses_one_of_two_pictures(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", {"a.jpg": b"picture", "a.seg.png": b"mask", "a.cls": b"0"})
    for image in ("jpg", "seg.png"):
        assert [ref.path for ref in scan_of(path, image=image).samples] == [f"a.{image}"]


def test_one_key_in_two_tars_is_two_samples(tmp_path: Path) -> None:
    for name in ("1.tar", "2.tar"):
        make_tar(tmp_path / name, {"a.jpg": name.encode(), "a.cls": b"0"})
    scan = scan_of(tmp_path)
    assert [ref.path for ref in scan.samples] == ["1.tar/a.jpg", "2.tar/a.jpg"]
    assert [scan.source.read(ref, 9) for ref in scan.samples] == [b"1.tar", b"2.tar"]


def test_a_key_that_comes_again_in_a_tar_is_warned_of(tmp_path: Path) -> None:
    for number, mode in enumerate("wa"):
        make_tar(tmp_path / "x.tar", {"a.jpg": b"%d" % number, "a.cls": b"%d" % number}, mode=mode)
    scan = scan_of(tmp_path / "x.tar")
    assert [scan.source.read(ref, 9) for ref in scan.samples] == [b"1"]
    (warning,) = scan.warnings
    assert "1 picture is left out" in warning
    assert "'a.jpg'" in warning


def test_a_key_without_a_picture_is_rejected_by_name(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "x.tar", {"a.jpg": JPEG, "a.cls": b"0", "lone.cls": b"0"})
    scan = scan_of(tar)
    assert [ref.path for ref in scan.samples] == ["a.jpg", "lone"]
    with pytest.raises(ImageError, check=lambda error: error.path == f"{tar}/lone"):
        scan.source.read(scan.samples[1], 100)
