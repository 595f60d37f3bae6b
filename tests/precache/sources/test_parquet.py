"""Parquet and Arrow files with pictures as sources: folders, splits, classes, missing pictures, copies."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from precache import SettingError, SourceError, convert, open_dataset
from precache.errors import ImageError
from precache.sources import find_split
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.objects import picture
from tests.precache.sources.tables import save_dataset, write_parquet, write_pictures
from tests.precache.sources.tars import put, scan_of

CLASSES = ["zebra", "ant"]  # not sorted: the order of the file must be kept
PNGS = [encode_image(picture(shade * 20)) for shade in range(6)]


def publish(folder: Path, labels: dict[str, list[Any]]) -> Path:
    """Write Parquet files with a picture for each label, by their names."""
    for name, file_labels in labels.items():
        pictures = [{"bytes": PNGS[row], "path": None} for row in range(len(file_labels))]
        write_pictures(folder / name, {"image": pictures, "label": file_labels}, CLASSES)
    return folder


def test_published_files_have_splits_and_names_of_classes(tmp_path: Path) -> None:
    names = ["data/train-00000-of-00002", "data/train-00001-of-00002", "data/validation-00000-of-00001"]
    publish(tmp_path / "set", {f"{name}.parquet": [1, 0, 1] for name in names})
    put(tmp_path / "set", {"README.md": b"", ".gitattributes": b""})
    scan = scan_of(tmp_path / "set")
    assert scan.classes == tuple(CLASSES)
    assert [ref.split for ref in scan.samples] == ["train"] * 6 + ["val"] * 3
    assert scan.samples.labels.tolist() == [1, 0, 1] * 3
    assert [scan.source.read(ref, 999) for ref in scan.samples] == PNGS[:3] * 3
    assert f"{names[1]}.parquet: row 2" in scan.source.where(scan.samples[5])
    scan = scan_of(tmp_path / "set" / f"{names[2]}.parquet")
    assert scan.samples.split_names == (find_split(names[2]),) == ("val",)


def test_a_table_beside_pictures_is_no_shard(tmp_path: Path) -> None:
    publish(tmp_path / "set", {"data/train-0.parquet": [1, 0]})
    put(tmp_path / "set", {"thumbnail.png": PNGS[5]})
    assert len(scan_of(tmp_path / "set").samples) == 2
    publish(put(tmp_path / "loose", {"1.png": PNGS[1]}), {"features.parquet": [1, 0]})
    (ref,) = scan_of(tmp_path / "loose", class_depth=0).samples
    assert ref.path == "1.png"


def test_samples_labelled_minus_one_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """Test splits on Hugging Face have the label -1."""
    labels = {"train-0.parquet": [1, 0, -1], "test-0.parquet": [-1, -1], "validation-0.parquet": [0, None]}
    folder, out = publish(tmp_path / "set", labels), tmp_path / "out"
    scan = scan_of(folder)
    assert {(ref.id, ref.split, ref.label) for ref in scan.samples} == {
        (2, "train", 1), (3, "train", 0), (5, "val", 0)
    }  # fmt: skip
    (warning,) = scan.warnings
    assert "4 samples of 7" in warning
    assert "split test" in warning
    assert scan.scanned == len(scan.samples) + len(scan.ignored) == 7
    done = convert(folder, out, small_recipe("shards", size=8), workers=0)
    assert done.manifest.classes == tuple(CLASSES)
    assert open_dataset(out).read_index().labels.min() >= 0
    for path, options in ((folder, {"target": "none"}), (folder / "test-0.parquet", {})):
        scan = scan_of(path, **options)
        assert scan.target == "none"
        assert len(scan.samples) == scan.scanned


def test_parquet_pictures_may_be_files_or_missing(tmp_path: Path) -> None:
    put(tmp_path, {"a/pics/1.png": PNGS[1], "b/pics/1.png": PNGS[2]})
    pictures: list[Any] = [{"bytes": PNGS[0], "path": "pics/1.png"}, {"bytes": None, "path": "pics/1.png"}]
    pictures += [None, {"bytes": None, "path": None}, {"bytes": None, "path": "gone.png"}]
    path = write_pictures(tmp_path / "a/t.parquet", {"image": pictures, "label": [*"abaab"]})
    for options, second in (({}, PNGS[1]), ({"root": str(tmp_path / "b")}, PNGS[2])):
        scan = scan_of(path, **options)
        assert [scan.source.read(ref, 999) for ref in list(scan.samples)[:2]] == [PNGS[0], second]
        for row in (2, 3, 4):
            with pytest.raises(ImageError) as raised:
                scan.source.read(scan.samples[row], 999)
            assert raised.value.path == f"{path}: row {row}"


def test_a_column_of_paths_is_used_before_one_of_bytes(tmp_path: Path) -> None:
    put(tmp_path, {"1.png": PNGS[1]})
    columns: dict[str, list[Any]] = {"path": ["1.png"], "thumbnail": [PNGS[0]], "label": [1]}
    path = write_pictures(tmp_path / "t.parquet", columns, CLASSES)
    scan = scan_of(path)
    assert (scan.source.read(scan.samples[0], 999), scan.classes) == (PNGS[1], tuple(CLASSES))
    scan = scan_of(path, image="thumbnail")
    assert (scan.source.read(scan.samples[0], 999), scan.classes) == (PNGS[0], tuple(CLASSES))


def test_a_parquet_folder_needs_bytes_and_one_file_may_have_paths(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    write_pictures(tmp_path / "bytes/0.parquet", {"jpg": PNGS[:2], "filename": ["a", "b"], "label": [0, 1]})
    scan = scan_of(tmp_path / "bytes")
    assert scan.source.read(scan.samples[1], 999) == PNGS[1]
    with pytest.raises(SourceError, check=lambda error: "--image jpg" in error.remedy):
        scan_of(tmp_path / "bytes/0.parquet")
    with pytest.raises(SettingError, match="--root gone"):
        scan_of(tmp_path / "bytes", root="gone")
    (tmp_path / "paths").mkdir()
    write_parquet(tmp_path / "paths/t.parquet", {"path": ["1.png"]})
    with pytest.raises(SourceError) as raised:
        scan_of(tmp_path / "paths")
    assert raised.value.path == str(tmp_path / "paths/t.parquet")
    assert "--image" in raised.value.remedy


def test_parquet_files_with_other_columns_or_classes_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, {"0.parquet": [0, 1]})
    second = tmp_path / "1.parquet"
    for columns, classes, details in (
        ({"image": PNGS[:1], "label": [0]}, [*reversed(CLASSES)], rf"'{CLASSES[-1]}'.*0\.parquet"),
        ({"image": PNGS[:1], "class": [0]}, [], r"'class'.*'label'.*0\.parquet"),
    ):
        write_pictures(second, columns, classes)
        with pytest.raises(SourceError, match=details) as raised:
            scan_of(tmp_path)
        assert raised.value.path == str(second)


def write_arrow(path: Path, batches: list[list[Any]], compression: str | None) -> Path:
    """Write an Arrow file with a batch for each list of pictures."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
    schema = pyarrow.schema(
        {"image": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}), "label": "int64"}
    )
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_file(path, schema, options=options) as writer:
        for pictures in batches:
            columns = {"image": pictures, "label": [*range(len(pictures))]}
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    return path


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_pictures_in_uncompressed_arrow_files_are_read_in_place(
    compression: str | None, tmp_path: Path
) -> None:
    put(tmp_path, {"pics/1.png": PNGS[1]})
    zeros = [bytes(10_000), bytes(7)]  # no pictures, but they can be compressed
    in_file, nowhere = {"bytes": None, "path": "pics/1.png"}, {"bytes": None, "path": "gone.png"}
    batches = [[], [{"bytes": PNGS[0], "path": None}, None], [in_file, nowhere], [], [None]]
    batches.append([{"bytes": content, "path": "x"} for content in (*zeros, PNGS[2])])
    path = write_arrow(tmp_path / "t.arrow", batches, compression)
    scan = scan_of(path, target="none")
    expected = [PNGS[0], None, PNGS[1], None, None, *zeros, PNGS[2]]
    for ref, content in zip(scan.samples, expected, strict=True):
        assert ref.bytes == (-1 if content is None else len(content))
        if content is not None:
            assert scan.source.read(ref, 999_999) == content
            continue
        with pytest.raises(ImageError, match="no picture"):
            scan.source.read(ref, 999_999)
    os.utime(path, (1, 1))
    with nullcontext() if compression else pytest.raises(SourceError, match="changed"):
        scan.source.read(scan.samples[0], 999_999)


def test_a_saved_dataset_has_the_splits_that_its_folder_names(tmp_path: Path) -> None:
    for split, labels in (("train", [1, 0, 1]), ("test", [0])):
        pictures = [{"bytes": PNGS[row], "path": None} for row in range(len(labels))]
        save_dataset(tmp_path / split, {"image": pictures, "label": labels}, CLASSES)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    scan = scan_of(tmp_path)
    assert [(ref.split, ref.label) for ref in scan.samples] == [
        ("train", 1), ("train", 0), ("train", 1), ("test", 0)
    ]  # fmt: skip
    assert scan.classes == tuple(CLASSES)
    with pytest.raises(SettingError, match="has splits already"):
        scan_of(tmp_path, split="label")
    for damaged in ("{", "[]", '{"splits": 5}', '{"splits": ["gone"]}', '{"splits": [{}]}', "\xff"):
        (tmp_path / "dataset_dict.json").write_text(damaged, encoding="latin-1")
        with pytest.raises(SourceError) as raised:
            scan_of(tmp_path)
        assert str(raised.value.path).startswith(str(tmp_path))


def test_a_full_disk_is_named_as_such_not_as_damage(tmp_path: Path) -> None:
    path = write_pictures(tmp_path / "t.parquet", {"image": [bytes(9_000)] * 9, "label": [*range(9)]})
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from precache import SourceError
from precache.sources import open_source
try:
    open_source(sys.argv[1]).scan()
except SourceError as error:
    sys.exit("TMPDIR" not in error.remedy)
sys.exit(3)
"""
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, cwd=ROOT, timeout=100, check=False).returncode == 0
