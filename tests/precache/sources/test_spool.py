import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from precache.errors import SourceError
from tests.command import ROOT
from tests.precache.sources.archives import files_of, make_tar, scan_of


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_a_compressed_tar_that_is_damaged_is_refused(how: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.tar.{how}"
    whole = make_tar(path, {f"a/{n}.jpg": os.urandom(9000) for n in range(9)}, mode=f"w:{how}").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-9], whole[:3000] + bytes(9) + whole[3009:], whole[:12]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"cannot be unpacked|breaks off|is damaged"):
            scan_of(path)


def test_a_compressed_tar_leaves_nothing_behind_when_it_is_killed(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    (tmp_path / "spool").mkdir()
    code = (
        "import sys, time; from precache import open_source\n"
        "scan = open_source(sys.argv[1]).scan()\n"
        "print(scan.source.archive.spool.path, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "spool")}
    process = subprocess.Popen([sys.executable, "-c", code, path], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    spool = process.stdout.readline().decode().strip()
    assert os.path.getsize(spool) > 0
    assert os.readlink(spool).startswith(f"{tmp_path}/spool/")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path / "spool") == []


def test_a_spool_ends_with_its_source(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    before = len(os.listdir("/proc/self/fd"))
    scan = scan_of(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del scan
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_there_is_no_room_for_a_spool_it_says_so(raw_tree: Path, tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar.gz", files_of(raw_tree), mode="w:gz")
    code = (
        "import resource, sys; from precache import open_source\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "open_source(sys.argv[1]).scan()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, path], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "does not fit into" in answer.stderr
    assert "set TMPDIR" in answer.stderr
