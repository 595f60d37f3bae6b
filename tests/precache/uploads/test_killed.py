"""Conversions into a URL that are killed, or whose storage fails at random: the same command ends them."""

import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from precache import convert
from precache.errors import PrecacheError
from precache.example_data.sample_tree import make_sample
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE
from precache.storage.urls import Url
from tests.cloud.proxy import FAULTS, Proxy, Seen
from tests.command import ROOT
from tests.conftest import small_recipe


def kills(bucket: Url, tmp_path: Path, *which: int) -> int:
    """The number of requests at the last of which `tests.killing_uploads` has killed one; see there."""
    make_sample(tmp_path / "tree", images=14, classes=3, seed=1, like="caltech", workers=0)
    (tmp_path / "folder").mkdir()
    script = [sys.executable, "-m", "tests.killing_uploads", tmp_path / "tree", tmp_path / "folder", bucket]
    done = subprocess.run(
        [*map(str, script), *map(str, which)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_killed_at_a_request_a_conversion_is_completed(bucket: Url, tmp_path: Path) -> None:
    assert kills(bucket, tmp_path, 5, 9) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [1, 2])
def test_killed_at_each_request_a_conversion_is_completed(first: int, bucket: Url, tmp_path: Path) -> None:
    assert kills(bucket, tmp_path, first, 2) > 20


def at_random(seed: int) -> Callable[[Seen], str | None]:
    """A plan for a proxy: one request in four fails, in any way that there is."""
    draw = random.Random(seed)
    kinds = [fault for fault in FAULTS if fault not in ("flip", "stall")]  # stalls take their time

    def plan(seen: Seen) -> str | None:
        return draw.choice(kinds) if draw.random() < 0.25 else None

    return plan


def fails_at_random(seed: int, proxy: Proxy, url: Url, tree: Path, expected: Path) -> None:
    proxy.plan = at_random(seed)
    for _ in range(4):
        with suppress(PrecacheError):  # and nothing else
            convert(tree, url, small_recipe("shards"), workers=0)
    proxy.plan = lambda seen: None
    convert(tree, url, small_recipe("shards"), workers=0)
    store = ObjectStore(url)
    found = {info.name: store.get(info.name) for info in store.list()}
    assert found == {path.name: path.read_bytes() for path in expected.iterdir()}, f"seed {seed}"


@pytest.fixture
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "2")
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_impatient")
def test_a_storage_that_fails_at_random_loses_nothing(
    bucket: Url, proxy: Proxy, raw_tree: Path, converted: dict[str, Path]
) -> None:
    fails_at_random(0, proxy, bucket / "0", raw_tree, converted["shards"])


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_impatient")
def test_a_storage_that_fails_at_random_loses_nothing_by_many_seeds(
    bucket: Url, proxy: Proxy, raw_tree: Path, converted: dict[str, Path]
) -> None:
    for seed in range(1, 60):
        fails_at_random(seed, proxy, bucket / str(seed), raw_tree, converted["shards"])
