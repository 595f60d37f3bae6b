"""Downloads that break, lie, fill the disk or are refused: `fetch` against a local HTTP server."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precache.errors import DownloadError
from precache.example_data import datasets
from precache.example_data.datasets import PublicDataset, fetch
from tests.command import ROOT
from tests.precache.example_data.publishing import Server

PART = 12_345


@pytest.mark.parametrize(
    ("how", "partial", "requests"),
    [
        ({}, b"", [None]),
        ({"breaks": 3}, b"", [None, "bytes=10000-", "bytes=20000-", "bytes=30000-"]),
        ({}, "part", [f"bytes={PART}-"]),
        ({}, "whole", ["bytes=WHOLE-"]),
        ({"ranges": False}, b"x" * PART, [f"bytes={PART}-"]),
        # it sends another part than was asked for
        ({"breaks": 1, "shift": 7}, b"", [None, "bytes=10000-", None]),
        # lengths that it gets wrong
        ({"lie": 1_000}, b"", [None, "bytes=WHOLE-"]),
        ({"lie": -(10**9)}, b"", [None]),
        ({"lie": 10**15}, b"", [None, "bytes=WHOLE-"]),
    ],
    ids=str,
)
def test_what_a_server_does_not_send_is_asked_for_again(
    how: dict[str, Any], partial: str | bytes, requests: list[str | None],
    dataset: PublicDataset, server: Server, tmp_path: Path,
) -> None:  # fmt: skip
    for name, value in how.items():
        setattr(server, name, value)
    content = {"part": server.content[:PART], "whole": server.content}.get(str(partial), partial)
    if content:
        (tmp_path / "archive.tar.partial").write_bytes(content)  # type: ignore[arg-type]
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [r and r.replace("WHOLE", str(len(server.content))) for r in requests]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar", "raw"]


def test_a_connection_that_breaks_again_and_again_is_given_up_and_waited_for(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.breaks, server.break_bytes = 10**6, 1
    waits: list[float] = []
    monkeypatch.setattr(datasets.time, "sleep", waits.append)
    with pytest.raises(
        DownloadError, match=r"the connection broke at 8 of [\d,]+ bytes.*continues at byte 8"
    ):
        fetch(dataset, tmp_path / "raw")
    assert (len(server.requests), len(waits)) == (8, 7)
    assert waits[-1] > 8 * waits[0], "they double"
    assert (tmp_path / "archive.tar.partial").stat().st_size == 8


def test_headway_is_not_given_up(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "_HEADWAY_BYTES", 10_000)
    server.breaks, server.break_bytes = 20, 10_000
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) == 21


@pytest.mark.parametrize(
    ("how", "tries", "said"),
    [
        ({"missing": True, "status": 503}, 8, "Service Unavailable"),
        ({"missing": True, "status": 404}, 1, "Not Found"),
        ({"lie": -1_000}, 1, "expected MD5"),  # it says that the whole is smaller than it is
    ],
)
def test_a_server_that_does_not_have_it_is_asked_again_only_if_it_may_have_it_later(
    how: dict[str, Any], tries: int, said: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    for name, value in how.items():
        setattr(server, name, value)
    with pytest.raises(DownloadError, match=said):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == tries


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/files/archive.tar", "http://127.0.0.1:x/archive.tar"])
def test_without_a_network_the_error_says_what_to_put_where(
    url: str, dataset: PublicDataset, tmp_path: Path
) -> None:
    with pytest.raises(DownloadError) as caught:
        fetch(replace(dataset, url=url), tmp_path / "raw")
    assert str(caught.value).startswith(f"{url}: cannot be downloaded (")
    assert f"put it at {tmp_path / 'archive.tar'}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "second name", "folder"])
def test_a_download_is_never_written_through_a_link(
    kind: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    victim, partial = tmp_path / "thesis.txt", tmp_path / "archive.tar.partial"
    if kind != "link to nowhere":
        victim.write_bytes(b"mine")
    if kind == "second name":
        os.link(victim, partial)
    elif kind == "folder":
        partial.mkdir()
    else:
        partial.symlink_to(victim)
    with pytest.raises(DownloadError, match=r"archive.tar.partial: is not a partial download.*move it"):
        fetch(dataset, tmp_path / "raw")
    assert server.requests == []
    assert victim.read_bytes() == b"mine" if victim.exists() else kind == "link to nowhere"


def test_an_error_of_on_progress_reaches_the_caller(dataset: PublicDataset, tmp_path: Path) -> None:
    mine = BrokenPipeError("mine")

    def fail(done: int, total: int) -> None:
        raise mine

    with pytest.raises(BrokenPipeError) as caught:
        fetch(dataset, tmp_path / "raw", on_progress=fail)
    assert caught.value is mine


FULL_DISK = """
set -e
mount -t tmpfs -o size={kib}k none "$1"
cp "$2" "$1/archive.tar.given"
[ {unpack} = no ] || mv "$1/archive.tar.given" "$1/archive.tar"
exec "$3" -c '
import sys
from precache.example_data.datasets import PublicDataset, fetch
folder, md5, url = sys.argv[1:]
print("mounted", flush=True)
fetch(PublicDataset(url=url, md5=md5, inner=None, folder="256_Objects", images=70), folder + "/raw")
' "$1" "$4" "$5"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a small disk is made by Linux namespaces")
@pytest.mark.parametrize("when", ["download", "unpack"])
def test_a_full_disk_is_called_that(
    when: str, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    disk, given = tmp_path / "disk", tmp_path / "given"
    disk.mkdir()
    given.write_bytes(server.content if when == "unpack" else b"")
    kib = len(server.content) // 1024
    script = FULL_DISK.format(
        kib=kib * 3 // 2 if when == "unpack" else kib // 2, unpack="yes" if when == "unpack" else "no"
    )
    arguments = [disk, given, sys.executable, dataset.md5, dataset.url]
    result = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, "sh", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if "mounted" not in result.stdout:
        pytest.skip("no small disk can be mounted here")
    message = result.stderr.splitlines()[-1]
    for words in ("DownloadError", "the disk is full", "make room", str(disk)):
        assert words in message
    assert "check the network" not in message
