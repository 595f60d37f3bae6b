"""Errors of reading end a run, and cost no picture; only what a decoder says of bytes makes a reject."""

import errno
import os
import resource
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
from PIL import Image

from precache import check, convert
from precache.errors import ImageError, SourceError
from precache.pictures import reading
from precache.sources.rejected_list import read_list
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import rendered_within

TRANSIENT = [
    errno.ESTALE, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES,
    errno.EPERM, errno.EAGAIN, errno.ENETDOWN, errno.EREMOTEIO,
]  # fmt: skip


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
def test_an_error_that_passes_costs_no_picture(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stays is named with its path and a remedy."""
    path, real, fails = tmp_path / "x.jpg", reading.open_regular, [True, True, False]

    def open_regular(name: str) -> FileIO:
        if fails.pop(0):
            raise OSError(number, os.strerror(number), name)
        return real(name)

    path.write_bytes(b"content")
    monkeypatch.setattr(reading, "open_regular", open_regular)
    monkeypatch.setattr(reading.time, "sleep", lambda seconds: None)
    assert reading.read_picture(str(path)) == b"content"
    assert fails == []
    fails.extend([True] * 99)
    with pytest.raises(
        SourceError, match=f"{path}: .*{os.strerror(number)}.*the same command again"
    ) as caught:
        reading.read_picture(str(path))
    assert not isinstance(caught.value, ImageError)


def test_a_process_without_free_descriptors_rejects_nothing(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "x.jpg")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(SourceError, match=r"Too many open files.*ulimit -n"):
            reading.read_picture(str(tmp_path / "x.jpg"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(pipe_instead, "is not a regular file any more"), (os.unlink, "disappeared")]
)
@pytest.mark.parametrize("reader", ["convert", "pytorch", "dali"])
def test_a_picture_that_becomes_a_pipe_ends_the_conversion_by_name(
    reader: str, spoil: Callable[[Path], None], reason: str, tree: Path, tmp_path: Path
) -> None:
    """And an epoch of a loader, which skips it no more than a conversion rejects it."""
    if reader == "dali":
        pytest.importorskip("nvidia.dali")
    victim, recipe = tree / scan_tree(tree).samples[5].path, small_recipe("shards", size=8)

    def read_all() -> None:
        if reader == "convert":
            convert(tree, tmp_path / "out", recipe, workers=1, on_start=lambda *sizes: spoil(victim))
        with build_loader(tree, backend=reader, workers=1, size=8, batch_size=16, on_error="skip") as loader:
            spoil(victim)
            list(loader)

    with pytest.raises(SourceError, match=f"{victim}: {reason}") as caught:
        read_all()
    assert "\n" not in str(caught.value)


def test_a_sparse_file_is_refused_by_its_size_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (9, 9)).save(tmp_path / f"tree/a/{number}.jpg")
    try:
        os.truncate(tmp_path / "tree/a/1.jpg", 200 << 30)
    except OSError:
        pytest.skip("this file system has no files of 200 GiB")
    report = check(tmp_path / "tree", list_file=tmp_path / "list.csv", workers=0)
    (rejected,) = report.rejected
    assert rejected.path == "a/1.jpg"
    assert rejected.reason.startswith("is too large (214,748,364,800 bytes; ")
    assert "--max-pixels" in rejected.reason


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_want_of_memory_is_no_fault_of_the_picture(kind: str, tmp_path: Path) -> None:
    """The same picture, under a limit that leaves no room for it."""
    Image.new("RGB", (7000, 7000)).save(tmp_path / f"x.{kind}")
    answer = rendered_within(60_000_000, tmp_path / f"x.{kind}")
    assert answer.startswith("SourceError x: not enough memory to decode it"), answer


HEAD = b"path,reason,bytes,modified_ns\na/b.jpg,why,"
NO_LISTS = [
    b"",
    b"id,path,reason\n",  # the list of a dataset
    b"path,reason,bytes,modified_ns\na,b\n",
    *(HEAD + cells for cells in (b"c,d\n", b"1" * 30 + b",5\n", b"5,-" + b"1" * 30 + b"\n", b"\0")),
    HEAD + b"a" * 200_000,
]


def test_what_is_no_list_of_rejects_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    for content in NO_LISTS:
        path.write_bytes(content)
        with pytest.raises(SourceError, match=f"{path}: .*not a list.*'precache check'"):
            read_list(path)
    for said, make in (("cannot be read", lambda: None), ("not a regular file", lambda: os.mkfifo(path))):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(SourceError, match=f"{path}: .*{said}.*'precache check'"):
            read_list(path)
