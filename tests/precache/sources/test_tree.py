"""Trees of class folders as sources: samples, class depths, splits, links, permissions and warnings."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from precache.errors import SourceError
from precache.sources.tree import scan_tree
from tests.command import run_here
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.tars import JPEG, put


def lay(root: Path, *names: str) -> Path:
    """Write files of these names, which a scan takes for pictures if they have such extensions."""
    return put(root, dict.fromkeys(names, JPEG))


NO_PICTURES = {
    "198.spider/RENAME2": "neither an image extension nor an image signature",
    "198.spider/._198_0001.jpg": "a hidden file",
    "198.spider/drawing.svg": "SVG: a drawing",
    "198.spider/.ipynb_checkpoints/tmp-checkpoint.jpg": "a hidden folder",
    "056.dog/greg/@eaDir/x.jpg/SYNOPHOTO_THUMB_M.jpg": "a folder of the system",
    "lost+found/x.jpg": "a folder of the system",
    "__MACOSX/056.dog/x.jpg": "a folder of the system",
    "notes.txt": "a file beside the class folders",
    "cover.jpg": "a file beside the class folders",
    ".git/x.jpg": "a hidden folder",
}


def test_files_that_are_no_pictures_are_ignored_with_a_reason(tmp_path: Path) -> None:
    """Caltech-256 holds 056.dog/greg/ and 198.spider/RENAME2; Caltech-101 holds a JPEG named tmp."""
    pictures = ["056.dog/056_0001.jpg", "056.dog/greg/vision309/x.jpg", "198.spider/tmp"]
    lay(tmp_path, *pictures)
    (tmp_path / "empty/folder").mkdir(parents=True)
    put(tmp_path, dict.fromkeys(NO_PICTURES, b"#!/bin/sh\nmv a b\n"))
    scan = scan_tree(tmp_path)
    assert [s.path for s in scan.samples] == pictures
    assert scan.scanned == len(scan.samples) + len(scan.ignored) == len(pictures) + len(NO_PICTURES)
    for name, reason in NO_PICTURES.items():
        reasons = [ignored.reason for ignored in scan.ignored if name.startswith(ignored.path)]
        assert any(other.startswith(reason) for other in reasons), name


TREES: list[tuple[str, int, str, str]] = [
    ("train/b/1 train/c/2 val/a/3", 1, "train/b/1:b:train train/c/2:c:train val/a/3:a:val", ""),
    ("train/b/1 val/a/3 val/x", 1, "train/b/1:b:train val/a/3:a:val", "val/x"),
    ("train/b/1 train/c/2 train/x", 1, "train/b/1:b:train train/c/2:c:train", "train/x"),
    ("train/b/1 test/3 test/4 x", 1, "train/b/1:b:train", "test/3 test/4 x"),
    ("train/b/1 train/c/2 some/3", 1, "train/b/1:b:train train/c/2:c:train", "some/3"),
    ("train/b/1 val/b/2 more/b/3", 1, "train/b/1:b:train val/b/2:b:val", "more/b/3"),
    ("Train/b/1 VALID/b/2", 1, "Train/b/1:b:train VALID/b/2:b:val", ""),
    ("Testing/b/1 Training/b/2", 1, "Testing/b/1:b:test Training/b/2:b:train", ""),
    (
        "dev/b/1 evaluation/b/2 train_set/b/3",
        1,
        "dev/b/1:b:val evaluation/b/2:b:test train_set/b/3:b:train",
        "",
    ),
    ("train2017/b/1 val2017/b/2", 1, "train2017/b/1:b:train val2017/b/2:b:val", ""),
    ("steam_train/1 test_tube/2", 1, "steam_train/1:steam_train: test_tube/2:test_tube:", ""),
    (
        "steam_train/a/1 train_station/a/2",
        1,
        "steam_train/a/1:steam_train: train_station/a/2:train_station:",
        "",
    ),
    ("train/n1/images/1 val/n1/images/2", 1, "train/n1/images/1:n1:train val/n1/images/2:n1:val", ""),
    ("__MACOSX/train/b/1 lost+found/2 train/b/3", 1, "train/b/3:b:train", ""),
    # classes whose names happen to be those of splits
    (
        "bus/1 train/2 train/3 train/old/4",
        1,
        "bus/1:bus: train/2:train: train/3:train: train/old/4:train:",
        "",
    ),
    ("bus/a/1 train/a/2", 1, "bus/a/1:bus: train/a/2:train:", ""),
    ("test/1 train/2", 1, "test/1:test: train/2:train:", ""),
    ("test/1 train/2 val/3", 0, "test/1::test train/2::train val/3::val", ""),
    ("1 train/2", 0, "1:: train/2::", ""),
    ("a/b/1 a/b-c/2 a/3", 0, "a/3:: a/b/1:: a/b-c/2::", ""),
    (
        "a/b/2 a/b/1 d/e/1 a/x above d/e/f/1 a/.b/1",
        2,
        "a/b/1:a/b: a/b/2:a/b: d/e/1:d/e: d/e/f/1:d/e:",
        "a/x above",
    ),
    ("a-b/c/1 a/c/2", 2, "a-b/c/1:a-b/c: a/c/2:a/c:", ""),
    ("train/a/b/1 test/a/b/2", 2, "test/a/b/2:a/b:test train/a/b/1:a/b:train", ""),
]


"""Names of pictures, class depth, 'path:class:split' of each sample, and pictures that are ignored."""


@pytest.mark.parametrize(("names", "depth", "samples", "ignored_names"), TREES)
def test_classes_and_splits_are_found_at_each_class_depth(
    names: str, depth: int, samples: str, ignored_names: str, tmp_path: Path
) -> None:
    lay(tmp_path, *(f"{name}.jpg" for name in names.split()))
    (tmp_path / "link").symlink_to(".")  # leads in a circle
    scan = scan_tree(tmp_path, depth)
    classes = (*scan.classes, "")  # the label -1 has no class
    parts = [f"{s.path.removesuffix('.jpg')}:{classes[s.label]}:{s.split}" for s in scan.samples]
    assert " ".join(parts) == samples
    ignored = {path.path for path in scan.ignored if path.path.endswith(".jpg")}
    assert ignored == {f"{name}.jpg" for name in ignored_names.split()}
    warnings = "\n".join(scan.warnings)
    assert all(repr(path) in warnings for path in ignored)


def test_two_folders_of_one_split_are_refused_unless_one_is_empty(tmp_path: Path) -> None:
    lay(tmp_path, "train/a/1.jpg", "val/a/2.jpg")
    (tmp_path / "valid").mkdir()
    assert scan_tree(tmp_path).samples.split_names == ("train", "val")
    lay(tmp_path, "valid/a/3.jpg")
    with pytest.raises(SourceError, match="'val' and 'valid'") as raised:
        scan_tree(tmp_path)
    assert raised.value.path == tmp_path


ADVICE = [
    ("birds/heron/1 birds/owl/2 pets/dog/3", 1, "--class-depth 2"),
    ("photos/heron/1 photos/owl/2", 1, "photos/photos instead"),
    ("train/photos/heron/1 train/photos/owl/2 val/photos/heron/3", 1, "--class-depth 2"),
    ("n1/images/1 n2/images/2", 1, ""),  # such class folders would be no better
    ("heron/1 heron/2023/2 heron/2024/3", 1, ""),
    ("bus/a/1 train/a/2", 1, "'train'"),
    ("test/1 train/2", 1, "--class-depth 0"),
    ("a/b/1", 3, "--class-depth 2"),
    ("1", 1, "--class-depth 0"),
]


"""Names of pictures, class depth, and what the warning or the error advises, if there is one."""


@pytest.mark.parametrize(("names", "depth", "advice"), ADVICE)
def test_another_class_depth_is_advised_if_it_helps(
    names: str, depth: int, advice: str, tmp_path: Path
) -> None:
    root = lay(tmp_path / "photos", *(f"{name}.jpg" for name in names.split()))
    try:
        messages = list(scan_tree(root, depth).warnings)
    except SourceError as error:
        messages = [str(error)]
    if advice:
        (message,) = messages
        assert advice in message
    else:
        assert messages == []


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "above/tree"
    lay(tmp_path, "above/tree/b/1.jpg", "above/x.jpg", "y.jpg", "far/z.jpg")
    links = {"a": ".", "c": "..", "d": "../..", "b/inner": "..", "self": "self", "b/gone.jpg": "gone.jpg"}
    followed = {"b/link.jpg": "../../x.jpg", "e": "../../far", "f": "e"}
    for name, target in {**links, **followed}.items():
        (tree / name).symlink_to(target)
    scan = scan_tree(tree)
    assert [s.path for s in scan.samples] == ["b/1.jpg", "b/link.jpg", "e/z.jpg", "f/z.jpg"]
    assert {i.path for i in scan.ignored} == links.keys()
    warnings = "\n".join(scan.warnings)
    assert "'f' is 'e'" in warnings, "one folder under two names"
    assert "'a', 'c', 'd'" in warnings, "links to folders above them"


def test_links_between_two_class_folders_are_followed_once(tmp_path: Path) -> None:
    lay(tmp_path, "a/1.jpg", "b/2.jpg")
    (tmp_path / "a/to-b").symlink_to("../b")
    (tmp_path / "b/to-a").symlink_to("../a")
    scan = scan_tree(tmp_path)
    assert [s.path for s in scan.samples] == ["a/1.jpg", "a/to-b/2.jpg", "b/2.jpg", "b/to-a/1.jpg"]
    assert {i.path for i in scan.ignored} == {"a/to-b/to-a", "b/to-a/to-b"}


def test_empty_classes_and_unread_formats_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tmp_path, *(f"a/{number}.jpg" for number in range(100)), "beside.jpg", "a/.hidden.jpg")
    put(tmp_path, {"a/y.jxl": b"\xff\x0a", "b/x.jxl": b"\xff\x0a"})
    for number in range(10):
        (tmp_path / f"c{number}\x1b").mkdir()
    empty, missed = scan_tree(tmp_path).warnings
    assert empty.startswith(f"{tmp_path}: class folders without a picture: 'b', 'c0\\x1b', 'c1\\x1b' and 8 ")
    assert missed.startswith(f"{tmp_path}: 3 files ")
    assert all(repr(name) in missed for name in ("a/y.jxl", "b/x.jxl", "beside.jpg"))
    for command in ("check .", f"convert . {tmp_path}.out --format shards --size 8 --max-rejects 1"):
        caplog.clear()
        run_here("precache", *command.split(), "--workers", 0, cwd=tmp_path)
        assert [line.replace(".: ", f"{tmp_path}: ", 1) for line in caplog.messages][:2] == [empty, missed]


def test_pictures_that_image_folder_does_not_list_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture = encode_image(Image.new("RGB", (9, 7), "red"))
    names = ["a/1.png", "a/2.GIF", "b/3.gif", "b/4.avif", "b/tmp"]
    put(tmp_path / "photos", dict.fromkeys(names, picture))
    counts = "1 without extension, 1 .avif, 2 .gif"
    for command in ("check photos", "convert photos out --format shards --size 8"):
        caplog.clear()
        assert run_here("precache", *command.split(), "--workers", 0, cwd=tmp_path).returncode == 0
        assert counts in caplog.messages[0]


SIDE_BY_SIDE = [
    ("images/1 masks/1", "images DST --class-depth 0"),
    ("train/images/1 train/masks/1 val/images/2 val/masks/2", "train/images DST --class-depth 0"),
    ("images/train/1 images/val/2 masks/train/1 masks/val/2", "images DST --class-depth 0"),
    ("JPEGImages/1 SegmentationClass/1 SegmentationObject/1", "JPEGImages DST --class-depth 0"),
    ("image_2/1 gt_2/1", "image_2 DST --class-depth 0"),
    ("images/cat/1 images/dog/2 annotations/trimaps/1", "images DST"),
    ("images/1 cat/2", ""),
    ("masks/1 hats/2", ""),
    ("photos/1 labels/2 maps/3", ""),
]
"""Names of pictures, and how the command of the error ends, if there is an error."""


@pytest.mark.parametrize(("names", "command"), SIDE_BY_SIDE)
def test_pictures_beside_their_masks_are_refused(names: str, command: str, tmp_path: Path) -> None:
    lay(tmp_path, *(f"{name}.jpg" for name in names.split()))
    if not command:
        assert len(scan_tree(tmp_path).classes) == len(names.split())
        return
    with pytest.raises(SourceError, check=lambda error: str(error).endswith(f"/{command}")):
        scan_tree(tmp_path)


TABLES_BESIDE = ["train/1 test/2", "1", "train_images/1 test_images/2", "train/1"]


@pytest.mark.parametrize("names", TABLES_BESIDE)
def test_a_table_beside_the_pictures_is_named(names: str, tmp_path: Path) -> None:
    lay(tmp_path, *(f"{name}.jpg" for name in names.split()))
    put(tmp_path, {"labels.csv": b"id,breed\n1,pug\n", "sample_submission.csv": b"id,pug\n1,0.5\n"})
    try:
        message = "\n".join(scan_tree(tmp_path).warnings)
    except SourceError as error:
        message = str(error)
    assert f"precache convert {tmp_path}/labels.csv DST --root FOLDER --image COLUMN" in message
    assert "submission" not in message


def test_commands_count_deeper_pictures_and_name_those_without_class(tmp_path: Path) -> None:
    picture = encode_image(Image.new("RGB", (9, 7), "red"))
    files = ["photos/cat/1.png", "photos/cat/more/2.png", "photos/dog/tail/ears/3.png", "photos/cover.png"]
    put(tmp_path, dict.fromkeys(files, picture))
    commands = {
        "convert photos out --format shards --size 8 --workers 0": ("2 pictures lie deeper", "cover.png"),
        "check photos --workers 0": ("2 pictures lie deeper", "all 3 pictures"),
        "check photos --workers 0 --class-depth 2": ("1 picture lies deeper", "all 2 pictures"),
        "inspect out": ("ignored 1: ", "cover.png"),
    }
    for command, expected in commands.items():
        done = run_here("precache", *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(line in done.stdout + done.stderr for line in expected), command


@pytest.fixture
def unprivileged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder, and run the test without root's permissions."""
    if os.geteuid() != 0:
        yield tmp_path_factory.mktemp("tree")
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(("closed", "path"), [("tree/a", "tree/a"), ("linked", "tree/a/2.jpg")])
def test_folders_without_read_permission_are_errors(unprivileged: Path, closed: str, path: str) -> None:
    put(unprivileged, {"tree/a/1.jpg": JPEG, "linked/x.jpg": JPEG})
    (unprivileged / "tree/a/2.jpg").symlink_to(unprivileged / "linked/x.jpg")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(SourceError, match=f"^{unprivileged / path}: ") as raised:
            scan_tree(unprivileged / "tree")
        assert isinstance(raised.value.__cause__, PermissionError)
    finally:
        (unprivileged / closed).chmod(0o700)


def test_files_and_classes_may_have_any_name(tmp_path: Path) -> None:
    names = ("a-b", "A", "b c", "\u00fc \u540d", "latin\udcef", "n" * 120, "tab\t'\"", "astral\U0001f600")
    files = {f"{name}/{name}.jpg": JPEG + os.fsencode(name) for name in names}
    scan = scan_tree(put(tmp_path / "tree", files))
    assert scan.classes == tuple(sorted(names))
    assert {ref.path: scan.source.read(ref, 100) for ref in scan.samples} == files
    assert [scan.classes[ref.label] for ref in scan.samples] == sorted(names)
