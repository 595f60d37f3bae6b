"""What a command prints: no control sequences from names, and no failure when the terminal is gone.

While a command runs, stdout and stderr are `Guarded`. What is printed there, by any code, cannot move a
cursor or turn the direction of writing: names of files come from others. A stream that fails (a reader
that ended, a terminal that vanished, a full disk, a file that is closed) is switched off for good.
"""

import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from precache.engines.processes import blocked
from precache.errors import printable

_LINE_EVERY_S = 10.0


class Guarded(io.TextIOBase):
    """A stream that writes to `stream`, None if that is closed, what is `printable`, and raises nothing.

    Attributes:
        lost: why it was switched off; None while it works.
        missed: why something that was to be read is not: `lost`, unless it all was `note`d.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost: Exception | None = None
        self.missed: Exception | None = None

    def write(self, text: str) -> int:
        """Write `text`, its lines as they are and all else printable."""
        self.write_styled(text if _is_plain(text) else _plain(text))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write text with our own control characters: a progress bar that is redrawn, a bold heading."""
        if text:
            self._put(text)
            self.missed = self.lost

    def note(self, text: str) -> None:
        """Write a message that may be lost."""
        self.flush()  # what was written before is not a note
        self._put(text)
        self._flush()

    def flush(self) -> None:
        """Write what is buffered."""
        before = self.lost
        self._flush()
        if self.lost is not before:
            self.missed = self.lost

    def _put(self, text: str) -> None:
        if self.lost is None:
            try:
                if self._stream is None:
                    raise OSError(errno.EBADF, "it is closed")
                self._stream.write(_encodable(text, self.encoding))
            except (OSError, ValueError) as error:
                self._lose(error)

    def _flush(self) -> None:
        if self.lost is None and self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def writable(self) -> bool:
        """Always true: output that cannot be written is dropped."""
        return True

    def isatty(self) -> bool:
        """Whether a person is likely to look at it."""
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's descriptor; io.UnsupportedOperation if it has none."""
        if self._stream is None:
            raise io.UnsupportedOperation("it is closed")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of what is written."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What happens to a character that the encoding lacks."""
        return "backslashreplace"

    def _lose(self, error: Exception) -> None:
        self.lost = error
        with suppress(OSError, ValueError):  # it still holds what could not be written, and tries at exit
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)


class _Styled(io.TextIOBase):
    """The same stream, for what escapes names by itself: tables and progress bars."""

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded

    def write(self, text: str) -> int:
        self._guarded.write_styled(text)
        return len(text)

    def flush(self) -> None:
        self._guarded.flush()

    def isatty(self) -> bool:
        return self._guarded.isatty()

    def fileno(self) -> int:
        return self._guarded.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._guarded.encoding


def styled(stream: TextIO) -> TextIO:
    """`stream` for a writer that needs control characters itself, and escapes those of names."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, Guarded) else stream


def new_console(**options: Any) -> Console:
    """A console for tables on stdout: text is `printable`, and [bold] and `:name:` are printed as they are.

    `options` are those of `rich.console.Console`.
    """
    return _Console(file=styled(sys.stdout), highlight=False, emoji=False, markup=False, **options)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Make text of a string as printed, in a cell or alone."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


@contextmanager
def guarded() -> Iterator[tuple[Guarded, Guarded]]:
    """Guard stdout and stderr for the duration of the block."""
    _fill_standard_descriptors()
    before = sys.stdout, sys.stderr
    ours = Guarded(sys.stdout), Guarded(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, ours[0]), cast(TextIO, ours[1])
    try:
        yield ours
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = before


def _fill_standard_descriptors() -> None:
    """Open the null device for each of 0, 1 and 2 that is closed, as by a shell's `>&-`.

    The next file to be opened would take its number, and all that C code says on stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class ProgressBar:
    """A progress bar on stderr that appears with the first report of (done, total).

    Where stderr is not a terminal, but a log file or a pipe: a line every ten seconds. An error of
    its own, or of stderr, switches it off; what it shows the progress of goes on.
    """

    def __init__(self, title: str, unit: str, **options: Any) -> None:
        self._options = {"desc": printable(title), "unit": unit, **options}
        self._bar: Any = None
        self._begin: tuple[float, int] | None = None  # when the first report came, and what was done then
        self._line_s = 0.0
        self._off = False

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done; raise what a signal raised, if that was lost."""
        raise_received()
        with blocked(signal.SIGINT, signal.SIGTERM):  # half a bar would complain when it is deleted
            if not self._off and _takes_output(sys.stderr):
                try:
                    self._show(done, total)
                except Exception:
                    self._switch_off()

    def __exit__(self, *error: object) -> None:
        if self._bar is None:
            return
        if not _takes_output(sys.stderr):
            self._switch_off()
        try:
            self._bar.close()
        except Exception:
            self._switch_off()

    def _show(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(done, total)
        else:
            self._write_line(done, total)
        self._off = isinstance(sys.stderr, Guarded) and sys.stderr.lost is not None

    def _write_line(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._begin is None:
            self._begin, self._line_s = (now_s, done), now_s
        ends = done == total and self._line_s > self._begin[0]  # no log ends at 70% of what was done
        if now_s - self._line_s >= _LINE_EVERY_S or ends:
            self._line_s = now_s
            begin_s, initial = self._begin
            form = {"prefix" if name == "desc" else name: value for name, value in self._options.items()}
            line = tqdm.format_meter(done, total, now_s - begin_s, ncols=0, initial=initial, **form)
            print(line, file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            tqdm.monitor_interval = 0  # its thread would only refresh the bar, and forbid forks
            # a resumed run starts where it stopped: its rate counts its own work only
            self._bar = tqdm(total=total, initial=done, file=styled(sys.stderr), **self._options)
        self._bar.update(done - self._bar.n)

    def _switch_off(self) -> None:
        self._off = True
        if self._bar is not None:
            self._bar.disable = True  # or it would try again when it is deleted


def _takes_output(stream: TextIO) -> bool:
    """Whether a line can be written without waiting: not to a stopped terminal, nor a pipe that is full."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll (Windows), or no descriptor
        return True


# What a signal raised. C code, as that of a module being imported, can swallow an exception: then it is
# raised again at the next step of progress.
received: list[BaseException] = []


def raise_received() -> None:
    """Raise again what a signal has raised."""
    if received:
        raise received[-1]


def _is_plain(text: str) -> bool:
    return text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable()


def _plain(text: str) -> str:
    """`text` with its lines and tabs, and else only what is printable."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _encodable(text: str, encoding: str) -> str:
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)
