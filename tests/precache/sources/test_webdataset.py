"""What is peculiar to tars of WebDataset: keys, parts, labels and fields."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precache.errors import ImageError, SourceError
from precache.sources.shard_files import find_split
from precache.storage.objects import ObjectStore
from tests.precache.sources.archives import JPEG, Files, files_of, make_tar, scan_of

SAMPLE = {"a.jpg": JPEG, "a.cls": b"1"}
SPLITS = {
    "train": "train-00000 birds-train-0000 cc3m-train-0000 train train2017 TRAIN_001 train-00000-of-00002 "
    "speed-test-train-00 my.training.0 train/0000 train/shard-0 train2017/0",
    "val": "val-00000 imagenet1k-validation-00 birds-valid-0 dev-0 Validation/0000 val/birds-0",
    "test": "test-00000 birds_test_0 testing/0 birds-eval-0",
    "": "shard-000000 trains-0000 trainval-0 contest-0 00000 latest-0 validated-1 photos/0000",
}
"""Names of tars, as data sets are published with them, by the split that they say."""


def test_splits_are_in_the_names_of_tars(tmp_path: Path) -> None:
    for split, names in SPLITS.items():
        for number, name in enumerate(names.split()):
            folder = tmp_path / f"{split} {number}"
            (folder / name).parent.mkdir(parents=True)
            assert scan_of(make_tar(folder / f"{name}.tar", SAMPLE).parent).samples.split_names == (
                split if "/" not in name else find_split(f"{Path(name).name}.tar"),
            )
            assert scan_of(folder).samples.split_names == (split,), name


def test_tars_with_and_without_a_split_in_their_names_are_refused(tmp_path: Path) -> None:
    for name in ("train-0", "birds-validation-0", "extra-0"):
        make_tar(tmp_path / f"{name}.tar", SAMPLE)
    with pytest.raises(SourceError, match=r"'birds-validation-0\.tar'.* 'extra-0\.tar'"):
        scan_of(tmp_path)
    os.remove(tmp_path / "extra-0.tar")
    assert [ref.split for ref in scan_of(tmp_path).samples] == ["val", "train"]


LAYOUTS: list[tuple[str, str]] = [
    ("0.tar 1.tar", "0.tar 1.tar"),
    ("0.tgz 1.tar.gz 2.tar.xz", "0.tgz 1.tar.gz 2.tar.xz"),
    ("train/0.tar train/0.json val/0.tar README.md", "train/0.tar val/0.tar"),
    ("0.tar 0.parquet 0_stats.json _tmp/0.jpg .cache/1.tar .2.tar", "0.tar"),  # as img2dataset leaves it
    ("0.tar empty/", "0.tar"),
    ("0.tar cat/1.jpg", ""),
    ("0.tar birds/cat/1.jpg", ""),
    ("cat/1.jpg cat/0.tar", ""),
    ("0.zip", ""),
]
"""What lies in a folder, and which of it are tars of samples: none where it is a tree."""


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize(("paths", "tars"), LAYOUTS)
def test_tars_are_found_in_folders_and_beside_what_is_none(
    paths: str, tars: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "empty").mkdir()
    folder, modes = tmp_path / "folder", {".tgz": "w:gz", ".gz": "w:gz", ".xz": "w:xz"}
    for path in map(folder.joinpath, paths.split()):
        (path if path.name == "empty" else path.parent).mkdir(parents=True, exist_ok=True)
        if "tar" in path.name or path.suffix == ".tgz":
            make_tar(path, SAMPLE, mode=modes.get(path.suffix, "w"))
        elif path.name != "empty":
            path.write_bytes(JPEG)
    source: Any = folder
    if place == "bucket":
        source = request.getfixturevalue("bucket") / "tars"
        for path in filter(Path.is_file, folder.rglob("*")):
            ObjectStore(source).upload(path, str(path.relative_to(folder)))
    found = tars.split()
    if found:
        expected = {f"{tar}/a.jpg" if len(found) > 1 else "a.jpg" for tar in found}
        assert {ref.path for ref in scan_of(source).samples} == expected
    else:
        with suppress(SourceError):  # where no class folder is found, as the tree says
            assert scan_of(source).classes


def test_shards_that_lie_too_deep_are_refused_with_the_folder_to_name(tmp_path: Path) -> None:
    for name in ("default/train/0.tar", "default/val/0.tar", "default/notes/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        make_tar(tmp_path / name, SAMPLE)
    with pytest.raises(SourceError, match=rf"{tmp_path}/default$"):
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
def test_members_are_samples_as_the_webdataset_library_has_them(tmp_path: Path, data: st.DataObject) -> None:
    """But for hidden files in a folder, which it takes for parts of a sample without a name."""
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
    scan, found = scan_of(tar), {}
    for ref in scan.samples:
        folder, _, name = ref.path.rpartition("/")
        content = scan.source.read(ref, 999), scan.classes[ref.label].encode()
        found[os.path.join(folder, name.partition(".")[0])] = content
    assert found == expected


def test_options_name_the_parts_of_samples(tmp_path: Path) -> None:
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
    path = make_tar(tmp_path / "x.tar", files)
    for image, label, content, classes in (
        ("input.jpg", "target.cls", b"in", ("0", "1")),  # whole numbers are indices
        ("Depth.png", "other.cls", b"far", ("owl",)),
        ("input.jpg", "name.txt", b"in", ("x",)),
        ("input.jpg", "kind", b"in", ("owl",)),  # a key of .json
    ):
        scan = scan_of(path, image=image, label=label)
        assert scan.classes == classes
        assert scan.source.read(scan.samples[1], 9) == content
        assert scan.samples.fields["width"].tolist() == [0, 1]
    for options, named in (
        ({"label": "target.cls"}, "input.jpg and depth.png"),
        ({"image": "input.jpg"}, "target.cls, other.cls"),
        ({"image": "jpg", "label": "target.cls"}, "'jpg'.*'input.jpg'"),
        ({"image": "input.jpg", "label": "nothing"}, "'nothing'"),
    ):
        with pytest.raises(SourceError, match=named):
            scan_of(path, **options)


def test_tars_of_samples_are_told_from_class_folders(raw_tree: Path, tmp_path: Path) -> None:
    def classes_of(name: str, files: Files) -> tuple[str, ...]:
        return scan_of(make_tar(tmp_path / name, files)).classes

    assert classes_of("a.tar", {"1.jpg": JPEG, "1.json": b"{}"}) == ()
    assert classes_of("b.tar", {"x/1.jpg": JPEG, "x/1.json": b"{}", "x/1.txt": b""}) == ("x",)
    assert classes_of("c.tar", {"x/1.jpg": JPEG, "x/1.cls": b"bird"}) == ("bird",)
    shutil.copytree(raw_tree, tmp_path / "tree")
    make_tar(tmp_path / "tree/x.tar", files_of(raw_tree))
    assert len(scan_of(tmp_path / "tree").samples) == 70, "beside class folders it is none of them"


def test_labels_are_indices_names_or_numbers(tmp_path: Path) -> None:
    for one, other, options, target, classes, labels in (
        ("3\n", "1", {}, "class", ("0", "1", "2", "3"), [3, 1]),
        ("dog", "cat", {}, "class", ("cat", "dog"), [1, 0]),
        ("3", "1", {"target": "class"}, "class", ("1", "3"), [1, 0]),
        ("0.5", "1.5", {}, "number", (), [0.5, 1.5]),
    ):
        files = {"0.jpg": JPEG, "0.cls": one.encode(), "1.jpg": JPEG, "1.cls": other.encode()}
        scan = scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert (scan.target, scan.classes) == (target, classes)
        assert [ref.label if classes else ref.target for ref in scan.samples] == labels


def test_a_test_split_labelled_minus_one_is_left_out_by_name(tmp_path: Path) -> None:
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
    ({"cls": b"cat"}, {}, ["sample 'b'", "'cat'", "the index"]),
    ({"cls": b"100000"}, {}, ["sample 'b'", "'100000'", "the index of a class, 0 to"]),
    ({}, {}, ["sample 'b': missing .cls"]),
    ({"cls": b"1", "json": b"[" * 9999}, {}, ["sample 'b'.json is not JSON"]),
    ({"cls": b"1", "json": b" " * (1 << 20) + b"{}"}, {}, ["'b.json' has 1,048,578 bytes"]),
    ({"cls": b"1", "png": JPEG}, {}, ["'b.png' is the second picture", "--image png"]),
    ({"cls": b"1", "json": b"{}"}, {"fields": ("some",)}, ["sample 'b' has no 'some'"]),
]


def test_what_is_wrong_with_a_sample_is_named(tmp_path: Path) -> None:
    for second, options, mentions in BAD:
        files = {"a.jpg": JPEG, "a.cls": b"0", "a.json": b'{"some": 1}', "b.jpg": JPEG}
        files |= {f"b.{extension}": content for extension, content in second.items()}
        with pytest.raises(SourceError, match=r"x\.tar: ") as caught:
            scan_of(make_tar(tmp_path / "x.tar", files), **options)
        assert [mention for mention in mentions if mention not in str(caught.value)] == []


LISTS = {"jpg": JPEG, "cls": b"0", "boxes.json": b"[[1, 2, 3, 4]]"}


def test_parts_of_a_sample_need_not_lie_together(tmp_path: Path) -> None:
    files = {"b.cls": b"0", "a.cls": b"1", "b.jpg": b"b", "d/a.b.jpg": b"ab", "d/a.cls": b"2", "a.JPG": b"a"}
    scan = scan_of(make_tar(tmp_path / "x.tar", files))
    read = [(ref.path, ref.label, scan.source.read(ref, 9)) for ref in scan.samples]
    assert read == [("b.jpg", 0, b"b"), ("a.JPG", 1, b"a"), ("d/a.b.jpg", 2, b"ab")]
    parts = ((f"{key}.{part}", content) for key in "ab" for part, content in LISTS.items())
    scan = scan_of(make_tar(tmp_path / "x.tar", dict(parts)))
    assert len(scan.ignored) == 2
    assert len({it.reason for it in scan.ignored}) == 1, "a reason is of many samples, and names none"
    path = make_tar(tmp_path / "x.tar", {"a.jpg": b"picture", "a.seg.png": b"mask", "a.cls": b"0"})
    for chosen in ("jpg", "seg.png"):
        assert [ref.path for ref in scan_of(path, image=chosen).samples] == [f"a.{chosen}"]


def test_a_key_that_is_in_two_tars_is_two_samples_and_one_without_a_picture_a_reject(tmp_path: Path) -> None:
    for name in ("1.tar", "2.tar"):
        make_tar(tmp_path / name, {"a.jpg": name.encode(), "a.cls": b"0", "lone.cls": b"0"})
    scan = scan_of(tmp_path)
    refs = list(scan.samples)
    assert [ref.path for ref in refs] == ["1.tar/a.jpg", "1.tar/lone", "2.tar/a.jpg", "2.tar/lone"]
    assert [scan.source.read(ref, 9) for ref in refs[::2]] == [b"1.tar", b"2.tar"]
    with pytest.raises(ImageError, match=r"2\.tar/lone: has no picture"):
        scan.source.read(refs[3], 100)
