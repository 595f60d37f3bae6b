"""Archives damaged by a seed end in an error of one line, in rejects or in a right result.

python -m tests.precache.sources.attack FOLDER FIRST_SEED SEEDS
"""

import collections
import contextlib
import gzip
import io
import logging
import lzma
import os
import resource
import signal
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache import Recipe, convert, open_dataset, open_source
from precache.errors import ImageError, PrecacheError
from precache.sources.archive import ArchiveSource
from precache.sources.base import Scan
from tests.precache.sources.archives import Files, link, make_tar, make_zip

EVERY = 20
"""One of so many seeds is converted whole; of the others, every picture is read."""
MORE_BYTES = 400 << 20
"""Of address space that an attack may take: most of it is what NumPy and Pillow have at hand."""
SECONDS = 20
PACKED: dict[str, Any] = {".gz": gzip, ".xz": lzma}
MAX_PIXELS = 1_000_000
MARKS = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"ustar", b"GNU.sparse.major=1", b"path=", b"../../../../x", b"{}")


def bases() -> dict[str, bytes]:
    """Name of a file -> what is damaged."""
    files: Files = {}
    for number in range(6):
        buffer = io.BytesIO()
        Image.new("RGB", (9, 7), (number * 40, 99, 0)).save(buffer, "PNG" if number % 2 else "JPEG")
        files[f"top/{'abc'[number % 3]}/{number}.{'png' if number % 2 else 'jpg'}"] = buffer.getvalue()
    files["top/a/no-extension"], files["top/b/notes.txt"] = files["top/a/0.jpg"], b"notes"
    files[f"top/c/{'long' * 40}.jpg"] = files["top/a/0.jpg"]
    links = [link("top/a/hard.jpg", "top/b/1.png", tarfile.LNKTYPE), link("top/c/soft.png", "../b/1.png")]
    keyed: Files = {}
    for number, content in enumerate(list(files.values())[:6]):
        keyed |= {f"{number}.jpg": content, f"{number}.cls": b"%d" % (number % 3)}
        keyed |= {
            f"{number}.json": b'{"n": %d, "box": [[1, 2, 3, %d]]}' % (number, number),
            f"{number}.txt": b"x",
        }
    made = {}
    path = Path("base")
    for name, form in (("gnu.tar", tarfile.GNU_FORMAT), ("pax.tar", tarfile.PAX_FORMAT)):
        tarfile.DEFAULT_FORMAT, before = form, tarfile.DEFAULT_FORMAT  # type: ignore[misc]
        made[name] = make_tar(path, files, links).read_bytes()
        tarfile.DEFAULT_FORMAT = before  # type: ignore[misc]
    made["keyed.tar"] = make_tar(path, keyed).read_bytes()
    made["small.tar.gz"] = make_tar(path, files, mode="w:gz").read_bytes()
    made["small.tar.xz"] = make_tar(path, files, mode="w:xz").read_bytes()
    made["packed.zip"] = make_zip(path, files).read_bytes()
    made["stored.zip"] = make_zip(path, files, zipfile.ZIP_STORED).read_bytes()
    path.unlink()
    return made


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """With a few bytes changed, most of them where an archive's own numbers are, or parts cut out or in."""
    data = bytearray(content)
    marks = [at for mark in (b"PK", b"ustar") for at in _places(content, mark)] or [0]
    for _ in range(rng.integers(1, 4)):
        at = int(rng.choice(marks)) + int(rng.integers(-257, 60)) if rng.random() < 0.7 else 0
        at = at if 0 <= at < len(data) and at else int(rng.integers(max(len(data), 1)))
        count = int(rng.choice([1, 1, 2, 4, 8, 12, 512]))
        what = max(0, int(rng.integers(-4, 9)))
        if what < 3:
            data[at : at + 1] = bytes([int(rng.integers(256))])
        elif what == 3:
            data[at : at + count] = bytes([int(rng.choice([0, 0x30, 0x37, 0x80, 0xFF]))]) * count
        elif what == 4:
            data = data[:at] if rng.random() < 0.5 else data[:at] + data[at + count :]
        elif what == 5:
            data[at:at] = data[at : at + count]
        elif what == 6:
            other = int(rng.integers(len(data) or 1))
            data[at : at + 512] = data[other : other + 512]
        elif what == 7:
            mark = MARKS[int(rng.integers(len(MARKS)))]
            data[at : at + len(mark)] = mark
        else:
            data = data + data[:at]
    return _with_sums(data) if rng.random() < 0.8 else bytes(data)


def _places(content: bytes, mark: bytes) -> list[int]:
    found, at = [], content.find(mark)
    while at >= 0:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


def _with_sums(data: bytearray) -> bytes:
    """A tar's headers with sums that fit again, so that what they say is believed."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def attack(path: Path, whole: bool) -> str:
    """What became of the archive at `path`."""
    try:
        if whole:
            recipe = Recipe(format="webdataset", size=16)
            convert(path, "out", recipe, workers=0, max_rejects=1.0, overwrite=True)
            open_dataset("out")
            return "converted"
        return _read_all(path, open_source(path).scan())
    except PrecacheError as error:
        _check_line(error, path.name if not str(error).startswith("out: ") else "out")
        return "refused"


def _read_all(path: Path, scan: Scan) -> str:
    assert scan.scanned == len(scan.samples) + len(scan.ignored)
    outcome = "read"
    others = _as_others_read_it(path)
    for row, ref in enumerate(scan.samples):
        assert ref.id == row
        if isinstance(scan.source, ArchiveSource):
            assert scan.classes[ref.label] == ref.path.split("/")[-2], ref
        try:
            data = scan.source.read(ref, MAX_PIXELS)
        except ImageError as error:
            _check_line(error, path.name)
            outcome = "rejected"
        else:
            assert isinstance(data, bytes)
            assert len(data) == ref.bytes
            name = getattr(scan.source, "prefix", "") + ref.path
            assert others.get(name, data) == data, name
    return outcome


def _check_line(error: PrecacheError, mention: str) -> None:
    assert "\n" not in str(error)
    assert mention in str(error), str(error)


def _as_others_read_it(path: Path) -> dict[str, bytes]:
    """Name -> content of each file of the archive, where Python's own modules can read it."""
    found = {}
    with contextlib.suppress(Exception):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as packed:
                for member in packed.infolist():
                    found[_plain(member.filename)] = packed.read(member)
        else:
            with tarfile.open(path) as tar:
                for entry in tar:
                    if entry.isreg() and (file := tar.extractfile(entry)) is not None:
                        found[_plain(entry.name)] = file.read()
    return found


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def main(folder: Path, first: int, count: int) -> None:
    """Attack `count` times, and say what became of the archives."""
    os.chdir(folder)
    logging.disable()
    made = bases()
    names = list(made)
    attack_all = collections.Counter[str]()
    for name, content in made.items():  # what is loaded on first use is loaded now
        Path(name).write_bytes(content)
        assert attack(Path(name), True) == "converted", name
        assert attack(Path(name), False) == "read", name
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
    there = {*os.listdir(), "out"}
    for seed in range(first, first + count):
        rng = np.random.default_rng((seed, 31))
        name = names[seed % len(names)]
        packed = PACKED.get(Path(name).suffix)
        if packed is not None and rng.random() < 0.8:  # what is in it is damaged, not the compression
            Path(name).write_bytes(packed.compress(mutated(packed.decompress(made[name]), rng)))
        else:
            Path(name).write_bytes(mutated(made[name], rng))
        signal.alarm(SECONDS)
        try:
            attack_all[attack(Path(name), seed % EVERY == 0)] += 1
        except BaseException as error:
            print(f"seed {seed}, {name}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
        left = {entry for entry in os.listdir() if not entry.startswith((".out.", "out."))} - there
        assert not left, (seed, left)
    print(dict(attack_all))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
