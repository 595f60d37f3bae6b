"""Who listens does not matter: a conversion goes on, and its exit code is that of the dataset."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precache import verify
from precache.conversion.journal import JOURNAL_NAME
from precache.storage.locks import hold_lock
from tests.command import ROOT
from tests.precache.destinations import contents

# Takes its terminal; each picture takes its time, so that there are moments in which to lose it.
SLOWLY = """
import time
from precache.pictures import images
render = images.render_or_copy
def slow_render(*arguments):
    time.sleep(0.01)
    return render(*arguments)
images.render_or_copy = slow_render
from precache.cli.main import entry_point
if __name__ == "__main__":
    entry_point()
"""
CONVERT = (
    *("--format", "shards", "--size", "48", "--fit", "crop", "--resample", "bilinear"),
    *("--shard-bytes", str(12 * 48 * 48 * 3)),
)


@pytest.mark.timeout(90)
def test_a_lost_terminal_does_not_end_a_conversion(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Its window is closed: writing fails with EIO, and SIGHUP comes."""
    out = tmp_path / "out"
    takes_it = "    import fcntl, termios\n    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n    entry_point()"
    (tmp_path / "slowly.py").write_text(SLOWLY.replace("    entry_point()", takes_it))
    command = [sys.executable, "slowly.py", "convert", raw_tree, out, *CONVERT, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    theirs, ours = os.openpty()
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=ours, stdout=ours, stderr=ours, start_new_session=True
    ) as process:
        os.close(ours)
        while not (out / JOURNAL_NAME).exists():
            time.sleep(0.005)
        os.close(theirs)
        assert process.wait(timeout=80) == 0
    assert contents(out) == contents(converted["shards"])
    assert verify(out) == []
    with hold_lock(out):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk, as Linux simulates it")
@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("precache convert nowhere out --format shards > /dev/full 2>&1", 2, ""),
        ("precache convert $2 out $3 <&- >&- 2>&-", 0, ""),
        ("precache convert $2 out $3 > /dev/full 2>&1", 0, ""),
        ("precache convert $2 out $3 --workers 0 2>&1 | head -c 20; exit ${PIPESTATUS[0]}", 0, ""),
        ("precache inspect $1 | head -c 0; exit ${PIPESTATUS[0]}", 0, ""),
        ("precache inspect $1 --json > /dev/full", 2, "stdout: cannot be written"),
        ("precache inspect $1 >&-", 2, "stdout: cannot be written"),
    ],
)
def test_lost_messages_are_no_error_but_a_lost_result_is(
    script: str, code: int, message: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Unless its reader had enough."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"precache() {{ '{sys.executable}' -m precache \"$@\"; }}; {script}"
    arguments = ["bash", "-c", command, "bash", converted["shards"], raw_tree, " ".join(CONVERT)]
    result = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert message in lines[-1] if message else lines == []
    if "$2" in script:
        assert contents(tmp_path / "out") == contents(converted["shards"])
