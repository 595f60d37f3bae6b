"""Errors of reading are retried and then end the run; only undecodable bytes make a picture a reject."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image

from precache import convert
from precache.errors import ImageError, OpenFilesError, SourceError
from precache.pictures import images, reading
from precache.sources.tree import scan_tree
from precache.storage import retries
from tests.building import build_loader
from tests.conftest import small_recipe
from tests.precache.pictures.drawing import error_within_memory


class FailingDisk:
    """Replacement of `open_descriptor` that fails with this error number for so many calls."""

    def __init__(self, number: int) -> None:
        self.number, self.failures = number, 0
        self._open = reading.open_descriptor

    def __call__(self, name: str) -> AbstractContextManager[int]:
        if self.failures:
            self.failures -= 1
            raise OSError(self.number, os.strerror(self.number), name)
        return self._open(name)


@pytest.fixture(
    params=[errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE, errno.ENFILE], ids=errno.errorcode.get
)
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    disk = FailingDisk(request.param)
    monkeypatch.setattr(reading, "open_descriptor", disk)
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: None)
    return disk


def test_read_picture_retries_temporary_errors(disk: FailingDisk, tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"content")
    disk.failures = 2
    assert reading.read_picture(str(tmp_path / "x.jpg")) == b"content"
    assert disk.failures == 0


def test_read_picture_raises_for_an_error_that_lasts(disk: FailingDisk, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"content")
    disk.failures = 99
    kind = OpenFilesError if disk.number in (errno.EMFILE, errno.ENFILE) else SourceError
    with pytest.raises(kind) as raised:
        reading.read_picture(str(path))
    assert not isinstance(raised.value, ImageError)
    assert raised.value.path == str(path)
    assert raised.value.remedy


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [replace_by_pipe, os.unlink])
@pytest.mark.parametrize("reader", ["convert", "pytorch", "dali"])
def test_picture_that_becomes_a_pipe_or_is_gone_raises_source_error(
    reader: str, spoil: Callable[[Path], None], tree: Path, tmp_path: Path
) -> None:
    """Raise it in a conversion, which rejects no picture for it, and in a loader, which skips none."""
    if reader == "dali":
        pytest.importorskip("nvidia.dali")
    victim, recipe = tree / scan_tree(tree).samples[5].path, small_recipe("shards", size=8)

    def read_all() -> None:
        if reader == "convert":
            convert(tree, tmp_path / "out", recipe, workers=1, on_start=lambda *sizes: spoil(victim))
        with build_loader(tree, backend=reader, workers=1, size=8, batch_size=16, on_error="skip") as loader:
            spoil(victim)
            list(loader)

    with pytest.raises(SourceError, match=f"{victim}: ") as raised:
        read_all()
    assert "\n" not in str(raised.value)


def test_picture_written_while_it_is_read_raises_source_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write it without changing its size, so that only its time tells."""
    scan = scan_tree(tree)
    ref, read = scan.samples[5], reading.read_at_most

    def read_and_change(descriptor: int, count: int) -> bytes:
        content = read(descriptor, count)
        os.utime(tree / ref.path, ns=(0, 0))
        return content

    monkeypatch.setattr(reading, "read_at_most", read_and_change)
    with pytest.raises(SourceError, check=lambda error: error.path == str(tree / ref.path)):
        scan.source.read(ref, images.MAX_PIXELS)


@pytest.fixture
def paths_of_100_files(tmp_path: Path) -> list[str]:
    """Paths of 100 files, 200 times each; file N has N bytes."""
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes(number))
    return [str(tmp_path / str(number % 100)) for number in range(20_000)]


@pytest.mark.parametrize(("stat_s", "threads"), [(0.0, 1), (1e-3, 32)])
def test_sizes_and_times_uses_many_threads_only_if_stat_is_slow(
    stat_s: float, threads: int, paths_of_100_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size_and_time, used_threads = reading._size_and_time, set()

    def slow_size_and_time(path: str) -> tuple[int, int]:
        used_threads.add(threading.get_ident())
        if stat_s:
            time.sleep(stat_s)
        return size_and_time(path)

    monkeypatch.setattr(reading, "_size_and_time", slow_size_and_time)
    sizes, times = reading.sizes_and_times(paths_of_100_files)
    assert sizes.tolist() == [number % 100 for number in range(20_000)]
    assert times[7] == os.stat(paths_of_100_files[7]).st_mtime_ns
    assert len(used_threads) == 1 if threads == 1 else len(used_threads) >= threads


def test_sizes_and_times_raises_for_a_missing_file(paths_of_100_files: list[str]) -> None:
    missing = paths_of_100_files[99]
    os.unlink(missing)
    with pytest.raises(SourceError, check=lambda error: error.path == missing):
        reading.sizes_and_times(paths_of_100_files)


def test_read_bytes_refuses_a_file_too_large_for_a_picture(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").touch()
    os.truncate(tmp_path / "x.jpg", 1 << 30)  # sparse
    with pytest.raises(ImageError, match=r"x.jpg: is too large \(1,073,741,824 bytes; .*--max-pixels"):
        images.read_bytes(str(tmp_path / "x.jpg"), max_pixels=1000)


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_lack_of_memory_raises_source_error(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (7000, 7000)).save(tmp_path / f"x.{kind}")
    error = error_within_memory(60_000_000, tmp_path / f"x.{kind}")
    assert error.startswith("SourceError x: not enough memory to decode it"), error
