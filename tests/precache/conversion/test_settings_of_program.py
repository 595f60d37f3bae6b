"""What is converted does not depend on the globals of the program, and `convert` changes none of them."""

import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import precache
from tests.command import ROOT
from tests.precache.pictures.drawing import chunk, encode_image, noise
from tests.program_settings import SETTINGS, program_state

KINDS = ("PNG", "JPEG", "BMP", "TIFF", "TGA", "PPM")


def make_pictures(folder: Path) -> None:
    """Write pictures whose decoding a global of Pillow changes, or that make Pillow warn."""
    whole = {
        kind: encode_image(noise(40, 50, 3), kind) for kind in ("PNG", "JPEG", "BMP", "TIFF", "TGA", "PPM")
    }
    files = {f"whole.{kind}": data for kind, data in whole.items()}
    files |= {f"cut.{kind}": data[: len(data) * 2 // 3] for kind, data in whole.items()}
    text = chunk(b"tEXt", b"Comment\0" + bytes(1000)) + chunk(
        b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1000))
    )
    files["text.PNG"] = whole["PNG"][:33] + text + whole["PNG"][33:]
    broken_text = text[:-1] + bytes([text[-1] ^ 1])  # another checksum
    files["crc.PNG"] = whole["PNG"][:33] + broken_text + whole["PNG"][33:]
    files["exif.JPEG"] = encode_image(noise(40, 50, 3), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01")
    frames = [Image.fromarray(noise(40, 50, seed=seed)).convert("P") for seed in (1, 2)]
    files["moving.GIF"] = encode_image(frames[0], "GIF", save_all=True, append_images=frames[1:])
    palette = Image.fromarray(noise(40, 50)).convert("P")
    files["palette.PNG"] = encode_image(palette, transparency=bytes(range(200)))
    files["deep.PNG"] = encode_image(noise(40, 50, dtype=np.uint16))
    for number, (name, data) in enumerate(files.items()):
        path = (
            folder / "abü"[number % 3] / f"{name.partition('.')[0]}{number}.{name.partition('.')[2].lower()}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def digest_of_conversion(tree: Path, folder: Path, workers: int) -> str:
    """Convert, and return a digest of what was stored and of what was rejected."""
    recipe = precache.Recipe(format="webdataset", size=24, splits="train=0.8,val=0.2")
    manifest = precache.convert(tree, folder, recipe, workers=workers, max_rejects=1).manifest
    shards = [path.read_bytes() for path in sorted(folder.glob("*-0*"))]
    rejects = [f"{rejected.path} {rejected.reason}" for rejected in manifest.rejected]
    assert len(rejects) >= 6, rejects
    return hashlib.sha256(b"".join((*shards, *map(os.fsencode, rejects)))).hexdigest()


def convert_with_settings(folder: Path, settings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Convert with each setting of the program, which stays for the later ones; return what is wrong."""
    tree, wrong, digests = folder / "tree", {}, {}
    for number, (name, change) in enumerate({"none": lambda: None, **settings}.items()):
        change()
        for workers in (0, 2) if number in (0, len(settings)) else (0,):  # workers inherit no setting
            before = program_state()
            digests[name, workers] = digest_of_conversion(tree, folder / f"out-{number}-{workers}", workers)
            after = program_state()
            changed = [part for part in before if before[part] != after[part]]
            if changed or digests[name, workers] != digests["none", 0]:
                wrong[f"{name}, {workers} workers"] = changed or "other bytes"
    return {"wrong": wrong, "digest": digests["none", 0]}


def test_no_global_decides_what_convert_stores_or_is_changed(tmp_path: Path) -> None:
    make_pictures(tmp_path / "tree")
    ascii_names = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    results = []
    for number, (encoding, names) in enumerate(((ascii_names, []), ({}, SETTINGS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tree").symlink_to(tmp_path / "tree")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **encoding}
        command = [sys.executable, "-m", __name__, str(folder), *names]
        child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
        assert child.returncode == 0, child.stderr
        results.append(json.loads(child.stdout))
    assert [result["wrong"] for result in results] == [{}, {}]
    assert results[0]["digest"] == results[1]["digest"]


if __name__ == "__main__":
    chosen = {name: SETTINGS[name] for name in sys.argv[2:]}
    print(json.dumps(convert_with_settings(Path(sys.argv[1]), chosen)))
