"""Who listens does not matter: a conversion goes on, and its exit code is that of the dataset."""

import fcntl
import io
import os
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from precache import verify
from precache.cli import terminal
from precache.cli.terminal import ProgressBar
from precache.conversion.journal import JOURNAL_NAME
from precache.storage.locks import hold_lock
from tests.command import ROOT
from tests.precache.destinations import contents

# Each picture takes its time, so that there are moments in which to lose a terminal.
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


LISTENERS = ("a reader that ends", "a lost terminal", "a reader that stands still")


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], Callable[[Path], None]]]:
    """Settings of a process, and what happens to whom it writes to while it converts into a folder."""

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    theirs, ours = os.openpty() if request.param == "a lost terminal" else os.pipe()
    if request.param == "a reader that stands still":  # as a terminal that was stopped with Ctrl-S
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            while True:
                os.write(ours, bytes(4096))
        os.set_blocking(ours, True)
        yield {"stdout": subprocess.DEVNULL, "stderr": ours}, lambda out: os.close(ours)
        os.close(theirs)
    elif request.param == "a reader that ends":  # as `2>&1 | head -c 20`

        def end(out: Path) -> None:
            os.close(ours)
            os.read(theirs, 20)
            os.close(theirs)

        yield {"stdout": ours, "stderr": ours}, end
    else:  # its window is closed: writing fails with EIO, and SIGHUP comes

        def close(out: Path) -> None:
            os.close(ours)
            while not (out / JOURNAL_NAME).exists():
                time.sleep(0.005)
            os.close(theirs)

        pipes = {"stdin": ours, "stdout": ours, "stderr": ours}
        yield {"start_new_session": True, "preexec_fn": take_terminal, **pipes}, close


@pytest.mark.timeout(90)
@pytest.mark.parametrize("listener", LISTENERS, indirect=True)
def test_a_lost_terminal_does_not_end_a_conversion(
    listener: Any, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    (settings, happens), out = listener, tmp_path / "out"
    (tmp_path / "slowly.py").write_text(SLOWLY)
    workers = str(0 if settings["stdout"] == subprocess.DEVNULL else 2)
    command = [sys.executable, "slowly.py", "convert", raw_tree, out, *CONVERT, "--workers", workers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **settings)
    try:
        happens(out)
        assert process.wait(timeout=80) == 0
    finally:
        process.kill()
        process.wait()
    assert contents(out) == contents(converted["shards"])
    assert verify(out) == []
    with hold_lock(out):
        pass


def shell(script: str, *arguments: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """`script` with `$precache` for the command, and its arguments."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"precache() {{ '{sys.executable}' -m precache \"$@\"; }}; {script}"
    return subprocess.run(
        ["bash", "-c", command, "bash", *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


needs_a_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="as Linux simulates it")


@needs_a_full_disk
@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", "> /dev/full 2>&1"])
def test_where_messages_go_does_not_matter(
    redirection: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    script = f"""
        precache convert nowhere out --format shards {redirection}; [ $? = 2 ] || exit 9
        precache convert "$1" out {" ".join(CONVERT)} --workers 2 {redirection}
    """
    result = shell(script, raw_tree, folder=tmp_path)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert contents(tmp_path / "out") == contents(converted["shards"])


@needs_a_full_disk
@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("precache inspect $1 | head -c 0; exit ${PIPESTATUS[0]}", 0, ""),
        ("precache inspect $1 --json > /dev/full", 2, "stdout: cannot be written"),
        ("precache inspect $1 >&-", 2, "stdout: cannot be written"),
        ("cp -r $1 copy; rm copy/train-00000.*; precache verify copy 2>&-", 1, ""),
    ],
)
def test_a_result_that_is_lost_is_an_error_unless_its_reader_had_enough(
    script: str, code: int, message: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    result = shell(script, converted["shards"], folder=tmp_path)
    assert result.returncode == code
    lines = result.stderr.splitlines()
    assert message in lines[-1] if message else lines == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_log_a_line_every_ten_seconds_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = iter(range(100))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(now_s)))
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar("title", "image") as bar:
            for done in range(25):
                bar(done, 24)
        if stream.isatty():
            assert "\rtitle: 100%|" in stream.getvalue()
        else:
            assert "\r" not in stream.getvalue()
            assert [line.split(" [")[0] for line in stream.getvalue().splitlines()] == [
                "title:  42% 10/24",
                "title:  83% 20/24",
                "title: 100% 24/24",
            ]
