"""Shards hold the rendered pixels, and damaged ones are refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset, verify, verify_deep
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.formats.shards import DATA_START
from tests import format_contract
from tests.building import build_loader
from tests.command import run_here
from tests.precache.pictures.drawing import encode_image, noise


@pytest.fixture(scope="module")
def mixed_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tree of pictures with transparency, and of grey pictures of 16 bits."""
    path = tmp_path_factory.mktemp("mixed") / "tree"
    for number in range(9):
        picture = noise(30 + number, 40, dtype=np.uint16) if number % 3 == 0 else noise(30 + number, 40, 4)
        (path / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (path / "ab"[number % 2] / f"{number}.png").write_bytes(encode_image(picture))
    return path


@pytest.mark.parametrize("fit", ["crop", "keep", "keep-longer"])
@pytest.mark.parametrize("channels", ["grey", "rgb"])
def test_shards_hold_the_rendered_pixels(channels: str, fit: str, mixed_tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = Recipe(format="shards", size=24, fit=fit, shard_bytes=4000, channels=channels)
    manifest = convert(mixed_tree, out, recipe, workers=0).manifest
    if fit == "crop":
        assert len(manifest.shards) == (5 if channels == "rgb" else 2)  # of 4,000 bytes each
    format_contract.check_holds_its_tree(open_dataset(out), mixed_tree, np.inf)
    all_values = []
    for shard in manifest.shards:
        tensors = load_file(out / shard.file_name)
        assert tensors["images"].dtype == np.uint8
        for row, sample in enumerate(FORMATS["shards"].read_shard(out / shard.file_name)):
            pixels = sample.pixels("")
            if fit == "crop":
                tensor = tensors["images"][row]
            else:
                start = int(tensors["offsets"][row])
                tensor = tensors["images"][start : start + pixels.size]
                assert tensors["shapes"][row].tolist() == [*pixels.shape][: 3 if channels == "grey" else 2]
                tensor = tensor.reshape(pixels.shape)
            assert np.array_equal(pixels, tensor)
            all_values.append(pixels.reshape(-1, pixels.shape[-1]))
    values = np.concatenate(all_values) / 255
    statistics = manifest.statistics["train"]
    assert statistics.mean == pytest.approx(tuple(values.mean(0)), abs=1e-12)
    assert statistics.std == pytest.approx(tuple(values.std(0)), abs=1e-12)
    assert verify(out) == []
    assert verify_deep(out, mixed_tree, workers=0) == []
    assert run_here("precache", "inspect", out, "--html", "page.html", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("place", [2, 11])
def test_damaged_offsets_or_shapes_raise_dataset_error(
    place: int, shaped: dict[str, Path], tmp_path: Path
) -> None:
    """Flip a bit in the last offset, 2 bytes from its start, or in the first shape behind it."""
    path = Path(shutil.copytree(shaped["keep-shards"], tmp_path / "copy"))
    entry = open_dataset(path).manifest.shards[1]
    shard = open_dataset(path).shard_path(entry)
    content = bytearray(shard.read_bytes())
    header = json.loads(content[8:DATA_START])
    start = DATA_START + int(header["offsets"]["data_offsets"][0]) + 8 * (entry.samples - 1)
    content[start + place] ^= 0x80 if place == 11 else 1
    shard.write_bytes(content)
    assert [str(shard) in problem for problem in verify(path)] == [True]
    with pytest.raises(DatasetError, check=lambda error: error.path == shard):
        list(FORMATS["shards"].read_shard(shard))
    for check in ("first-read", "never"):
        with (
            build_loader(path, check=check, workers=1, shuffle=False) as loader,
            pytest.raises(DatasetError, match=f"{shard}: .*'?precache verify"),
        ):
            list(loader)
