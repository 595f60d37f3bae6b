"""Commands whose terminal or reader is gone: a conversion goes on, and its exit code is that of the job."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precache import verify
from precache.dataset.unfinished import CONVERSION_NAME
from precache.storage.locks import hold_lock
from tests.command import ROOT
from tests.precache.destinations import contents

# A program that converts slowly, so that a test can stop it or take its terminal away meanwhile.
SLOW_PROGRAM = """
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
    """Closing the terminal's window sends SIGHUP, and makes writing fail with EIO."""
    out = tmp_path / "out"
    # the terminal becomes the controlling one of the program, which gets its SIGHUP
    take_terminal = "    import fcntl, termios\n    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n    entry_point()"
    (tmp_path / "slowly.py").write_text(SLOW_PROGRAM.replace("    entry_point()", take_terminal))
    command = [sys.executable, "slowly.py", "convert", raw_tree, out, *CONVERT, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    window, terminal = os.openpty()
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, **streams, start_new_session=True
    ) as process:
        os.close(terminal)
        while not (out / CONVERSION_NAME).exists():
            time.sleep(0.005)
        os.close(window)
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
        ("precache inspect $1 | head -c 0; exit ${PIPESTATUS[0]}", 141, ""),
        ("precache inspect $1 --json > /dev/full", 2, "No space left on device"),
    ],
)
def test_lost_messages_are_no_error_but_a_lost_result_is(
    script: str, code: int, message: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A reader that ends early has lost nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"precache() {{ '{sys.executable}' -m precache \"$@\"; }}; {script}"
    arguments = ["bash", "-c", command, "bash", converted["shards"], raw_tree, " ".join(CONVERT)]
    result = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    if message:
        assert message in lines[-1]
    else:
        assert lines == []
    if "$2" in script:
        assert contents(tmp_path / "out") == contents(converted["shards"])
