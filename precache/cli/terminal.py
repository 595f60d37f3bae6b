"""The output of a command: free of control sequences from file names, and safe when the terminal is gone.

While a command runs, stdout and stderr are each a `GuardedStream`. Text printed there, by any code, cannot
move a cursor or turn the direction of writing, as names of files from others could. A stream that fails (its
reader ended, its terminal vanished, its disk is full, its file is closed) is switched off for good.
"""

import errno
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from precache.errors import printable

_LINE_EVERY_S = 10.0


class GuardedStream(io.TextIOBase):
    """A text stream in front of `stream` (None: it is closed) that escapes text and raises no error.

    Attributes:
        failure: the error for which nothing is written any more; None while the stream works.
        result_failure: the same, if text other than a `note` was lost.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or io.StringIO()
        self.failure: Exception | None = None if stream else OSError(errno.EBADF, "it is closed")
        self.result_failure: Exception | None = None

    def write(self, text: str) -> int:
        """Write `text` with its line breaks and tabs, and other unprintable characters as escapes."""
        self.write_unescaped(text if _is_plain(text) else _escape(text))
        return len(text)

    def write_unescaped(self, text: str) -> None:
        """Write text with control characters of our own: a progress bar that is redrawn, a bold heading."""
        if text:
            self.note(text)
            self.result_failure = self.failure

    def note(self, text: str) -> None:
        """Write a message whose loss is no error."""
        if self.failure is None:
            try:
                self._stream.write(_encodable(text, self.encoding))
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._switch_off(error)

    def writable(self) -> bool:
        """Return True, because output that cannot be written is dropped."""
        return True

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor; io.UnsupportedOperation if it has none."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Name of the handling of characters that the encoding lacks."""
        return "backslashreplace"

    def _switch_off(self, error: Exception) -> None:
        self.failure = error
        # the stream still buffers text, which Python tries to write at exit: let that succeed
        with suppress(OSError, ValueError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self.fileno())


class _UnescapedStream(io.TextIOBase):
    """A guarded stream for writers that escape names themselves: tables and progress bars."""

    def __init__(self, guarded: GuardedStream) -> None:
        self._guarded = guarded

    def write(self, text: str) -> int:
        self._guarded.write_unescaped(text)
        return len(text)

    def isatty(self) -> bool:
        return self._guarded.isatty()

    def fileno(self) -> int:
        return self._guarded.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._guarded.encoding


def unescaped_stream(stream: TextIO) -> TextIO:
    """Return `stream` for a writer that uses control characters itself, and escapes those in names."""
    return cast(TextIO, _UnescapedStream(stream)) if isinstance(stream, GuardedStream) else stream


def new_console(**options: Any) -> Console:
    """Return a console for tables on stdout, which escapes text, and prints [bold] and `:name:` literally.

    Args:
        options: further options of `rich.console.Console`.
    """
    return _Console(file=unescaped_stream(sys.stdout), highlight=False, emoji=False, markup=False, **options)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string, of a cell or alone, as text without unprintable characters."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


@contextmanager
def guard_output() -> Iterator[GuardedStream]:
    """Replace stdout, which the block gets, and stderr by guarded streams for the block."""
    _fill_standard_descriptors()
    before = sys.stdout, sys.stderr
    stdout = GuardedStream(sys.stdout)
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, GuardedStream(sys.stderr))
    try:
        yield stdout
    finally:
        sys.stdout, sys.stderr = before


def _fill_standard_descriptors() -> None:
    """Open the null device for each of the descriptors 0, 1 and 2 that is closed, as by a shell's `>&-`.

    Otherwise the next file to be opened would get that number, and with it the messages of C code on stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


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
        """Show that `done` of `total` units are done; raise the exception of a signal if it was swallowed."""
        raise_pending_interrupt()
        if sys.stderr.isatty():
            self._draw(done, total)
        else:
            self._write_line(done, total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
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
            self._bar = _Bar(total=total, initial=done, file=unescaped_stream(sys.stderr), **self._options)
        self._bar.update(done - self._bar.n)


# Exceptions that signals have raised. C code, such as a module's import, can swallow them: so they are raised
# again at the next step of progress.
pending_interrupts: list[BaseException] = []


def raise_pending_interrupt() -> None:
    """Raise again the exception of the last signal, if there was one."""
    if pending_interrupts:
        raise pending_interrupts[-1]


def _is_plain(text: str) -> bool:
    """Whether all characters of `text` are printable, line breaks or tabs."""
    return text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable()


def _escape(text: str) -> str:
    """Return `text` with its line breaks and tabs, and other unprintable characters as escapes."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _encodable(text: str, encoding: str) -> str:
    """Return `text` with escapes for characters that `encoding` lacks."""
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)
