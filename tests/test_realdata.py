"""Real pictures, a part of Caltech-101, in all formats and backends; skipped without its tar.

Its path is ../shared/data/caltech101.tar, or that in CALTECH101_TAR.
"""

import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from bench.measure.candidates import choose_candidates
from loaders.read import BACKENDS
from precache import convert, verify
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import small_recipe

TAR = Path(os.environ.get("CALTECH101_TAR", ROOT.parent / "shared/data/caltech101.tar"))
PER_CLASS = 25
CLASSES = ("BACKGROUND_Google", "accordion", "airplanes", "car_side", "yin_yang")

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not TAR.is_file(), reason=f"real pictures are not there: {TAR} (or set CALTECH101_TAR)"
    ),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tree of the first 25 pictures of five classes, and of the JPEG without an extension."""
    root = tmp_path_factory.mktemp("caltech101")
    counts: Counter[str] = Counter()
    with tarfile.open(TAR) as tar:
        for member in tar:
            _, *parts = Path(member.name).parts
            if not member.isfile() or len(parts) != 2 or parts[0] not in CLASSES:
                continue
            counts[parts[0]] += 1
            if counts[parts[0]] <= PER_CLASS or parts[1] == "tmp":
                member.name = "/".join(parts)
                tar.extract(member, root, filter="data")
    return root


def test_real_pictures_are_converted_verified_and_served(tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(tree)
    assert "BACKGROUND_Google/tmp" in {sample.path for sample in scan.samples}
    everything = sorted((sample.id, sample.label) for sample in scan.samples)
    for name in FORMATS:
        recipe = small_recipe(name, size=128, shard_bytes=2**20)
        manifest = convert(tree, tmp_path / name, recipe, workers=2).manifest
        assert (manifest.samples, manifest.rejected) == (len(scan.samples), ())
        assert verify(tmp_path / name) == []
    folders = [tree, *(tmp_path / name for name in FORMATS)]
    for candidate in choose_candidates(folders, sorted(BACKENDS), tmp_path):
        if candidate.backend == "dali":
            pytest.importorskip("nvidia.dali")
        with build_loader(candidate.path, backend=candidate.backend, size=112, workers=2) as loader:
            served = [pair for b in loader for pair in zip(b.ids.tolist(), b.labels.tolist(), strict=True)]
        assert sorted(served) == everything, candidate
