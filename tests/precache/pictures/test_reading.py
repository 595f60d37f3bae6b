"""Errors of reading end a run, and cost no picture; only what a decoder says of bytes makes a reject."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

import precache
from precache.checks.rejects import default_list, read_list
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures import reading
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.command import ROOT, check_bad_input, run_here
from tests.conftest import small_recipe

TRANSIENT = [
    errno.ESTALE, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES,
    errno.EPERM, errno.EAGAIN, errno.ENETDOWN, errno.EREMOTEIO,
]  # fmt: skip

Fail = Callable[[str, int, int], list[str]]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fail]:
    """`fail(suffix, number, times)`: opening a file whose path ends so fails; the paths that were tried."""
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0))

    def failing(suffix: str, number: int, times: int) -> list[str]:
        tried: list[str] = []
        real = reading.open_regular

        def open_regular(path: str) -> int:
            if str(path).endswith(suffix):
                tried.append(str(path))
                if len(tried) <= times:
                    raise OSError(number, os.strerror(number), path)
            return real(path)

        monkeypatch.setattr(reading, "open_regular", open_regular)
        return tried

    yield failing
    monkeypatch.undo()


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
def test_an_error_that_passes_costs_no_picture(number: int, tmp_path: Path, fail: Fail) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"content")
    tried = fail("x.jpg", number, 2)
    assert reading.read_picture(str(path)) == b"content"
    assert len(tried) == 3


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
def test_an_error_that_stays_names_path_reason_and_remedy(number: int, tmp_path: Path, fail: Fail) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"content")
    fail("x.jpg", number, 99)
    with pytest.raises(SourceError, match="run the same command again") as caught:
        reading.read_picture(str(path))
    assert str(caught.value).startswith(f"{path}: cannot be read ({os.strerror(number)}); ")
    assert not isinstance(caught.value, ImageError)


def test_an_error_ends_the_conversion_and_the_same_command_goes_on(
    raw_tree: Path, tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe("shards", size=8, shard_bytes=10 * 8 * 8 * 3)
    precache.convert(raw_tree, tmp_path / "undisturbed", recipe, workers=0)
    fail(scan_tree(raw_tree).samples[40].path, errno.ESTALE, 99)
    with pytest.raises(SourceError, match=os.strerror(errno.ESTALE)):
        precache.convert(raw_tree, tmp_path / "out", recipe, workers=0)
    kept = len(list((tmp_path / "out").glob("*.safetensors")))
    monkeypatch.undo()
    again = precache.convert(raw_tree, tmp_path / "out", recipe, workers=0)
    assert again.manifest.rejected == ()
    assert again.converted == 70 - 10 * kept < 70, "finished shards were kept"
    for file in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_an_error_ends_a_check_and_leaves_the_list_as_it_was(
    raw_tree: Path, tmp_path: Path, fail: Fail
) -> None:
    listed = tmp_path / "list.csv"
    fail(scan_tree(raw_tree).samples[3].path, errno.EIO, 99)
    with pytest.raises(SourceError, match=os.strerror(errno.EIO)):
        precache.check(raw_tree, list_file=listed, workers=0)
    assert not listed.exists()
    assert not default_list(raw_tree).exists()


def test_a_process_without_free_descriptors_rejects_nothing(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "tree/a/x.jpg")
    code = (
        "import os, resource, sys; from precache import images; import precache.convert\n"
        "path = sys.argv[1]\n"
        "images.load(path, 8)\n"
        "low = os.open(path, os.O_RDONLY); os.close(low)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (low, low))\n"
        "try: images.load(path, 8)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tree/a/x.jpg")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert answer.startswith("SourceError")
    assert "Too many open files" in answer
    assert "ulimit -n" in answer


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_becomes_a_pipe_ends_the_conversion_by_name(
    workers: int, raw_tree: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(raw_tree, tree)
    victim = tree / scan_tree(tree).samples[5].path
    with pytest.raises(SourceError, match=f"{victim}: is not a regular file any more"):
        precache.convert(
            tree,
            tmp_path / "out",
            small_recipe("shards", size=8),
            workers=workers,
            on_start=lambda predicted, free: pipe_instead(victim),
        )


@pytest.mark.parametrize(("backend", "workers"), [("pytorch", 0), ("pytorch", 1), ("dali", 1)])
@pytest.mark.parametrize(
    ("spoil", "reason"), [(pipe_instead, "is not a regular file any more"), (os.unlink, "disappeared")]
)
def test_loaders_skip_no_picture_that_cannot_be_read(
    backend: str,
    workers: int,
    spoil: Callable[[Path], None],
    reason: str,
    raw_tree: Path,
    tmp_path: Path,
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali")
    tree = tmp_path / "tree"
    shutil.copytree(raw_tree, tree)
    victim = tree / scan_tree(tree).samples[5].path
    with build_loader(
        tree, backend=backend, workers=workers, size=8, batch_size=16, on_error="skip"
    ) as loader:
        spoil(victim)
        with pytest.raises(SourceError, match=f"{victim}: {reason}") as caught:
            list(loader)
        assert "\n" not in str(caught.value)


def test_pipes_in_place_of_lists_are_refused(raw_tree: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "list.csv")
    arguments = ("convert", raw_tree, "out", "--format", "shards", "--splits", "list.csv")
    check_bad_input(run_here("precache", *arguments, cwd=tmp_path), "list.csv", "is not a regular file")
    with pytest.raises(SourceError, match="is not a regular file"):
        read_list(tmp_path / "list.csv")


def test_a_sparse_file_is_refused_by_its_size_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (9, 9)).save(tmp_path / f"tree/a/{number}.jpg")
    try:
        os.truncate(tmp_path / "tree/a/1.jpg", 200 << 30)
    except OSError:
        pytest.skip("this file system has no files of 200 GiB")
    report = precache.check(tmp_path / "tree", list_file=tmp_path / "list.csv", workers=0)
    assert [picture.path for picture in report.rejected] == ["a/1.jpg"]
    assert report.rejected[0].reason.startswith("is too large (214,748,364,800 bytes; ")
    assert "--max-pixels" in report.rejected[0].reason
    recipe = small_recipe("webdataset", size=8)
    manifest = precache.convert(
        tmp_path / "tree", tmp_path / "out", recipe, workers=0, max_rejects=1
    ).manifest
    assert [bad.reason for bad in manifest.rejected] == [report.rejected[0].reason]


def test_want_of_memory_is_no_fault_of_the_picture(tmp_path: Path) -> None:
    """The same picture, under a limit that leaves no room for it."""
    for kind in ("jpg", "png"):
        path = tmp_path / f"x.{kind}"
        Image.new("RGB", (7000, 7000)).save(path)
        code = (
            "import resource, sys; from precache import images\n"
            "data = images.read_bytes(sys.argv[1])\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000,) * 2)\n"
            "try: images.render(data, 'x', images.Rendering(size=8))\n"
            "except Exception as error: print(type(error).__name__, error)\n"
        )
        command = [sys.executable, "-c", code, str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert answer.startswith("SourceError x: not enough memory to decode it"), (kind, answer)


@pytest.mark.parametrize(
    "content", [b"a" * 200_000 + b",train\n", b'"a.jpg,train\n' + b"b" * 200_000, b"a\0.jpg,x\n"]
)
def test_a_list_of_splits_that_is_no_csv_is_said_to_be_none(
    content: bytes, raw_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "list.csv").write_bytes(content)
    with pytest.raises((SettingError, SourceError), match=r"list\.csv"):
        precache.convert(
            raw_tree, tmp_path / "out", small_recipe("shards"), workers=0, split_list=tmp_path / "list.csv"
        )


def test_numbers_that_no_file_has_make_no_list_of_rejects(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for number in (10**30, -(10**30)):
        path.write_text(f"path,reason,bytes,modified_ns\na/b.jpg,why,{number},{number}\n")
        with pytest.raises(SourceError, match=f"{path}: not a list"):
            read_list(path)
