"""Downloads that break, lie, fill the disk or are refused: `fetch` against a local HTTP server."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from precache.errors import DownloadError
from precache.example_data import download
from precache.example_data.datasets import PublicDataset, fetch
from tests.command import ROOT
from tests.precache.example_data.publishing import Server


def test_a_broken_download_goes_on_where_it_broke(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.breaks = 3
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [None, "bytes=10000-", "bytes=20000-", "bytes=30000-"]


def test_the_part_of_an_earlier_run_is_continued(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar.partial").write_bytes(server.content[:12_345])
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == ["bytes=12345-"]


def test_a_complete_part_is_not_downloaded_again(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "archive.tar.partial").write_bytes(server.content)
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) == 1


def test_a_server_without_ranges_starts_again(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "archive.tar.partial").write_bytes(b"x" * 12_345)
    assert fetch(dataset, tmp_path / "raw") == 70


def test_a_connection_that_breaks_again_and_again_is_given_up_and_waited_for(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.breaks, server.break_bytes = 10**6, 1
    waits: list[float] = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    with pytest.raises(
        DownloadError, match=r"the connection broke at 8 of [\d,]+ bytes.*continues at byte 8"
    ):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == 8
    assert len(waits) == 7
    assert waits[-1] > 8 * waits[0], "they double"
    assert (tmp_path / "archive.tar.partial").stat().st_size == 8


def test_headway_is_not_given_up(
    dataset: PublicDataset, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_HEADWAY_BYTES", 10_000)
    server.breaks, server.break_bytes = 20, 10_000
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) == 21


def test_a_server_that_is_busy_is_asked_again(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.missing, server.status = True, 503
    with pytest.raises(DownloadError, match="Service Unavailable"):
        fetch(dataset, tmp_path / "raw")
    assert len(server.requests) == 8


@pytest.mark.parametrize("lie", [1_000, -(10**9), 10**15])
def test_a_length_that_is_not_true_does_no_harm(
    lie: int, dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.lie = lie
    assert fetch(dataset, tmp_path / "raw") == 70
    assert len(server.requests) <= 2


def test_a_length_that_is_too_small_is_found_by_the_checksum(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.lie = -1_000
    with pytest.raises(DownloadError, match="expected MD5"):
        fetch(dataset, tmp_path / "raw")


def test_a_part_that_begins_elsewhere_is_not_appended(
    dataset: PublicDataset, server: Server, tmp_path: Path
) -> None:
    server.breaks, server.shift = 1, 7
    assert fetch(dataset, tmp_path / "raw") == 70
    assert server.requests == [None, "bytes=10000-", None]


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
    with pytest.raises(
        DownloadError, match=r"archive.tar.partial: is not a partial download.*move it elsewhere"
    ):
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
    assert "DownloadError" in message
    assert "the disk is full" in message
    assert "make room" in message
    assert str(disk) in message
    assert "check the network" not in message


def test_without_a_network_the_error_says_what_to_put_where(dataset: PublicDataset, tmp_path: Path) -> None:
    unreachable = "http://127.0.0.1:1/files/archive.tar"
    with pytest.raises(DownloadError) as caught:
        fetch(replace(dataset, url=unreachable), tmp_path / "raw")
    message = str(caught.value)
    assert unreachable in message
    assert f"put it at {tmp_path / 'archive.tar'}" in message
    assert "\n" not in message


def test_a_missing_page_is_an_error(dataset: PublicDataset, server: Server, tmp_path: Path) -> None:
    server.missing = True
    with pytest.raises(DownloadError, match="Not Found"):
        fetch(dataset, tmp_path / "raw")
