"""Messages, progress and tables of a command, which end no job when the terminal is gone.

Text with names of files is escaped by `precache.errors.printable`: names of others could move the cursor.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click
from rich.console import Console
from tqdm import tqdm

from precache.errors import printable

_LINE_EVERY_S = 10.0


def note(message: str, *, err: bool = False) -> None:
    """Print a message on a line of stdout, or stderr; one that cannot be printed is no error."""
    with _losing_output(sys.stderr if err else sys.stdout):
        click.echo(printable(message), err=err)


def switch_off(stream: TextIO) -> None:
    """Let a stream that has failed write to the null device, as Python writes its buffer again at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


@contextmanager
def _losing_output(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):  # its reader ended, its terminal vanished, its disk is full, it is closed
        switch_off(stream)


def open_standard_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed, as by a shell's `>&-`.

    Otherwise the next file to be opened, such as a shard, would get that number, and with it what C code
    writes to stderr. Characters that an encoding lacks are written as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def new_console(**options: Any) -> Console:
    """Return a console for tables on stdout, which prints `[bold]` and `:name:` literally.

    Args:
        options: further options of `rich.console.Console`.
    """
    return _Console(file=sys.stdout, highlight=False, emoji=False, markup=False, **options)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, for which `commandline.run` has an exit code, instead of SystemExit(1)."""
        raise BrokenPipeError


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no monitor thread: it only refreshes the bar


class ProgressBar:
    """A progress bar on stderr that appears with the first report of (done, total).

    If stderr is a log file or a pipe instead of a terminal, it is a line every ten seconds.
    """

    def __init__(self, title: str, unit: str, **options: Any) -> None:
        self._options = {"desc": printable(title), "unit": unit, **options}
        self._bar: Any = None
        self._begin_s: float | None = None  # time of the first report
        self._initial = 0  # units that were done at the first report
        self._line_s = 0.0  # time of the last line

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done."""
        with _losing_output(sys.stderr):
            if sys.stderr.isatty():
                self._draw(done, total)
            else:
                self._write_line(done, total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            with _losing_output(sys.stderr):
                self._bar.close()

    def _write_line(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._begin_s is None:
            self._begin_s, self._initial, self._line_s = now_s, done, now_s
        is_last = done == total and self._line_s > self._begin_s  # a log with lines has one for the end, too
        if now_s - self._line_s >= _LINE_EVERY_S or is_last:
            self._line_s = now_s
            options = {"prefix" if name == "desc" else name: value for name, value in self._options.items()}
            elapsed_s = now_s - self._begin_s
            line = tqdm.format_meter(done, total, elapsed_s, ncols=0, initial=self._initial, **options)
            print(line, file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            # `initial` is what an earlier run has done, which the rate must not count
            self._bar = _Bar(total=total, initial=done, file=sys.stderr, **self._options)
        self._bar.update(done - self._bar.n)
