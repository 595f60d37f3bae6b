"""Reading from a storage is measured: the server is as late and as narrow as asked, and rows add up."""

import os
import shutil
import time
from pathlib import Path

import pytest

from bench.measure.object_server import ENVIRONMENT, serving
from tests.command import run

pytest.importorskip("obstore")


def test_the_server_is_late_and_narrow_and_serves_the_bytes(tmp_path: Path) -> None:
    from precache.storage.objects import ObjectStore
    from precache.storage.urls import Url

    content = os.urandom(2_000_000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(content)
    with serving(tmp_path, 0.1, 4e6) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        store = ObjectStore(Url("s3://bucket", "sub"))
        assert [(one.name, one.bytes) for one in store.list()] == [("a", len(content))]
        start_s = time.perf_counter()
        assert store.get("a") == content
        assert time.perf_counter() - start_s > 0.1 + 0.9 * len(content) / 4e6  # less is impossible
        assert store.get_range("a", 10, 20) == content[10:30]
        assert store.find("b") is None


def test_loaders_on_a_url_are_measured(converted: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("shards", "webdataset"):
        shutil.copytree(converted[name], data / name)
    arguments = ["--repeats", 1, "--size", 32, "--batch-size", 16, "--latency-ms", 1]
    done = run("bench.measure.object_storage", data, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plain download: ")
    assert [line.split()[0] for line in lines[2:4]] == ["shards", "webdataset"]
    assert all("/s" in line for line in lines[2:4])


def test_libraries_are_measured(tmp_path: Path) -> None:
    arguments = ["--objects", 2, "--object-bytes", 300_000, "--repeats", 1]
    done = run("bench.measure.storage_libraries", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [
        ["import", "obstore"],
        ["objects", "obstore"],
        ["ranges", "obstore"],
    ]
