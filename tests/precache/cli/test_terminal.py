"""Who listens does not matter: a conversion goes on, and its exit code is that of the dataset."""

import fcntl
import io
import os
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from precache import verify
from precache.cli import terminal
from precache.cli.terminal import ProgressBar
from precache.conversion.journal import JOURNAL_NAME
from precache.storage.locks import hold_lock
from tests.command import ROOT

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


RUNNING: "list[subprocess.Popen[bytes]]" = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test that fails leaves no process behind; workers end with theirs."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        process.kill()
        process.wait()


class Started:
    """`precache convert` of the tree, slowly, in `folder`."""

    def __init__(self, tree: Path, folder: Path, workers: int, **options: object) -> None:
        script = folder / "slowly.py"
        script.write_text(SLOWLY)
        self.out = folder / "out"
        command = [sys.executable, script, "convert", tree, self.out, *CONVERT, "--workers", str(workers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **options)
        RUNNING.append(self.process)

    def wait_until_it_converts(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.out / JOURNAL_NAME).exists() and time.monotonic() < deadline:
            assert self.process.poll() is None
            time.sleep(0.005)

    def check_done(self, expected: Path) -> None:
        """It ends with 0, its dataset is what it should be, nothing is left of it."""
        assert self.process.wait(timeout=90) == 0
        files = {path.name: path.read_bytes() for path in self.out.iterdir()}
        assert files == {path.name: path.read_bytes() for path in expected.iterdir()}
        assert verify(self.out) == []
        with hold_lock(self.out):
            pass


def shell(script: str, *arguments: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """`script` with `$precache` for the command, and its arguments."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"precache() {{ '{sys.executable}' -m precache \"$@\"; }}; {script}"
    return subprocess.run(
        ["bash", "-c", command, "bash", *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_reader_that_ends_does_not_end_a_conversion(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """As `2>&1 | head -c 20`."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = Started(raw_tree, tmp_path, 2, **pipe)
    assert started.process.stdout is not None
    started.process.stdout.read(20)
    started.process.stdout.close()
    started.check_done(converted["shards"])


def test_a_lost_terminal_does_not_end_a_conversion(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Its window is closed: writing fails with EIO, and SIGHUP comes."""
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    started = Started(raw_tree, tmp_path, 2, start_new_session=True, preexec_fn=take_terminal, **pipes)
    os.close(theirs)
    started.wait_until_it_converts()
    os.close(ours)
    started.check_done(converted["shards"])


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end of a pipe that takes nothing more, and whose other end nobody reads."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    with suppress(BlockingIOError):
        while True:
            os.write(ours, bytes(4096))
    os.set_blocking(ours, True)
    yield ours
    os.close(ours)
    os.close(theirs)


def test_a_reader_that_stands_still_does_not_hold_a_conversion_up(
    full_pipe: int, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """As a terminal that was stopped with Ctrl-S."""
    started = Started(raw_tree, tmp_path, 0, stdout=subprocess.DEVNULL, stderr=full_pipe)
    started.check_done(converted["shards"])


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
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in converted["shards"].iterdir()}


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
