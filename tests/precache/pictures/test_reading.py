"""Errors of reading end a run, and cost no picture; only what a decoder says of bytes makes a reject."""

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
from tests.precache.pictures.drawing import rendered_within


@pytest.mark.parametrize(
    "number",
    [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE, errno.ENFILE],
    ids=errno.errorcode.get,
)
def test_read_picture_retries_temporary_errors(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stays is named with its path and a remedy."""
    path, real, fails = tmp_path / "x.jpg", reading.open_descriptor, [True, True, False]

    def open_descriptor(name: str) -> AbstractContextManager[int]:
        if fails.pop(0):
            raise OSError(number, os.strerror(number), name)
        return real(name)

    path.write_bytes(b"content")
    monkeypatch.setattr(reading, "open_descriptor", open_descriptor)
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: None)
    assert reading.read_picture(str(path)) == b"content"
    assert fails == []
    fails.extend([True] * 99)
    kind = OpenFilesError if number in (errno.EMFILE, errno.ENFILE) else SourceError
    with pytest.raises(kind, match=f"{path}: ") as caught:
        reading.read_picture(str(path))
    assert not isinstance(caught.value, ImageError)


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(pipe_instead, "is not a regular file any more"), (os.unlink, "disappeared")]
)
@pytest.mark.parametrize("reader", ["convert", "pytorch", "dali"])
def test_picture_that_becomes_a_pipe_or_is_gone_raises_source_error(
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


def test_a_picture_that_changes_while_it_is_read_ends_the_conversion(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is the same; what it is then is asked once, after it was read."""
    scan = scan_tree(tree)
    ref, read = scan.samples[5], reading.read_at_most

    def read_and_change(descriptor: int, count: int) -> bytes:
        content = read(descriptor, count)
        os.utime(tree / ref.path, ns=(0, 0))
        return content

    monkeypatch.setattr(reading, "read_at_most", read_and_change)
    with pytest.raises(SourceError, match=f"{tree / ref.path}: changed while it was converted"):
        scan.source.read(ref, images.MAX_PIXELS)


@pytest.mark.parametrize(("answer_s", "threads"), [(0.0, 1), (1e-3, 32)])
def test_sizes_are_asked_by_many_threads_where_answers_are_slow(
    answer_s: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes(number))
    real, asking = reading._size_and_time, set()

    def ask(path: str) -> tuple[int, int]:
        asking.add(threading.get_ident())
        if answer_s:
            time.sleep(answer_s)
        return real(path)

    monkeypatch.setattr(reading, "_size_and_time", ask)
    paths = [str(tmp_path / str(number % 100)) for number in range(20_000)]
    sizes, times = reading.sizes_and_times(paths)
    assert sizes.tolist() == [number % 100 for number in range(20_000)]
    assert times[7] == os.stat(paths[7]).st_mtime_ns
    assert len(asking) == 1 if threads == 1 else len(asking) >= threads
    (tmp_path / "99").unlink()
    with pytest.raises(SourceError, match=f"^{tmp_path}/99: disappeared"):
        reading.sizes_and_times(paths)


def test_a_file_too_large_for_a_picture_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").touch()
    os.truncate(tmp_path / "x.jpg", 1 << 30)  # sparse
    with pytest.raises(ImageError, match=r"x.jpg: is too large \(1,073,741,824 bytes; .*--max-pixels"):
        images.read_bytes(str(tmp_path / "x.jpg"), max_pixels=1000)


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_lack_of_memory_raises_source_error(kind: str, tmp_path: Path) -> None:
    """The same picture, under a limit that leaves no room for it."""
    Image.new("RGB", (7000, 7000)).save(tmp_path / f"x.{kind}")
    answer = rendered_within(60_000_000, tmp_path / f"x.{kind}")
    assert answer.startswith("SourceError x: not enough memory to decode it"), answer
