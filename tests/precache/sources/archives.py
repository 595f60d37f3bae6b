"""Archives of files, as common programs make them."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from precache import SourceOptions, open_source
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from tests.faults.mutations import spoil

Files = dict[str, bytes]
"""The content of each, by its path with slashes."""
JPEG = b"\xff\xd8\xff"
_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7z": lzma}


def scan_of(source: Any, **options: Any) -> Scan:
    return open_source(source, SourceOptions(**options)).scan()


def files_of(tree: Path, prefix: str = "") -> Files:
    """What lies in `tree`, as a file system lists it: in no order."""
    paths = sorted((path for path in tree.rglob("*") if path.is_file()), reverse=True)
    return {f"{prefix}{path.relative_to(tree)}": path.read_bytes() for path in paths}


def read_shards(folder: Path) -> list[bytes]:
    """Content of each safetensors file in the folder, by name."""
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def put(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def make_tar(path: Path, files: Files, more: Iterable[tarfile.TarInfo] = (), mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def make_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_webdataset(folder: Path, tree: Path) -> Path:
    """The tree's samples in its order, 20 in a tar, with the class as `.cls` and its name in `.json`."""
    folder.mkdir()
    scan = scan_tree(tree)
    for start in range(0, len(scan.samples), 20):
        files: Files = {}
        for row in range(start, min(start + 20, len(scan.samples))):
            ref = scan.samples[row]
            key, _, extension = ref.path.rpartition(".")
            key = key.replace(".", "_")
            files[f"{key}.{extension}"] = (tree / ref.path).read_bytes()
            files[f"{key}.cls"] = b"%d\n" % ref.label
            files[f"{key}.json"] = json.dumps({"caption": scan.classes[ref.label], "rank": row}).encode()
        make_tar(folder / f"photos-{start:05d}.tar", files)
    return folder


def spoil_archive(content: bytes, draw: random.Random) -> bytes:
    """Damage that is not found at once: within what is compressed, and under sums of headers that fit."""
    packed = next((packed for mark, packed in _PACKED.items() if content.startswith(mark)), None)
    if packed is not None and draw.random() < 0.8:
        return bytes(packed.compress(spoil_archive(packed.decompress(content), draw)))
    data = bytearray(spoil(content, draw))
    for at in range(0, len(data) - 511 if draw.random() < 0.8 else 0, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)
