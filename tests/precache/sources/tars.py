"""Tars, zips and folders of files for tests, as common programs make them."""

import io
import json
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
"""Content of each file by its path with slashes."""
JPEG = b"\xff\xd8\xff"
"""Signature of a JPEG, which a scan takes for a picture."""


def scan_of(source: Any, **options: Any) -> Scan:
    """Open a source with these options, and scan it."""
    return open_source(source, SourceOptions(**options)).scan()


def files_of(tree: Path, prefix: str = "") -> Files:
    """Read all files in `tree`, in an order unlike the sorted one."""
    paths = sorted((path for path in tree.rglob("*") if path.is_file()), reverse=True)
    return {f"{prefix}{path.relative_to(tree)}": path.read_bytes() for path in paths}


def read_shards(folder: Path) -> list[bytes]:
    """Content of each safetensors file in the folder, by name."""
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def put(root: Path, files: Files) -> Path:
    """Write files below `root`, and return it."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def make_tar(path: Path, files: Files, more: Iterable[tarfile.TarInfo] = (), mode: Any = "w") -> Path:
    """Write a tar of `files`, and of members `more` without content, and return its path."""
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member)
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """Make the header of a link, or of another member without content."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def make_zip(path: Path, files: Files) -> Path:
    """Write a zip of `files`, and return its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_webdataset(folder: Path, tree: Path) -> Path:
    """Write the tree's samples to tars of 20, with the class's index as `.cls` and its name in `.json`."""
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


def spoil_tar(content: bytes, draw: random.Random) -> bytes:
    """Damage a tar, mostly with new checksums of its headers."""
    data = bytearray(spoil(content, draw))
    if draw.random() < 0.8:
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar":
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)
