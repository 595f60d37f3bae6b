"""What a command prints: no control sequences from names, and no failure when the terminal is gone.

While a command runs, stdout and stderr are `Guarded`. What is printed there, by any code, cannot move a
cursor or turn the direction of writing: names of files come from others. A stream that fails (a reader
that ended, a terminal that vanished, a full disk, a file that is closed) is switched off for good.
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


class Guarded(io.TextIOBase):
    """A stream that writes to `stream`, None if that is closed, what is `printable`, and raises nothing.

    Attributes:
        lost: why nothing is written any more; None while it works.
        lost_result: the same, once anything but a `note` was not written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or io.StringIO()
        self.lost: Exception | None = None if stream else OSError(errno.EBADF, "it is closed")
        self.lost_result: Exception | None = None

    def write(self, text: str) -> int:
        """Write `text`, its lines as they are and all else printable."""
        self.write_styled(text if _is_plain(text) else _plain(text))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write text with our own control characters: a progress bar that is redrawn, a bold heading."""
        if text:
            self.note(text)
            self.lost_result = self.lost

    def note(self, text: str) -> None:
        """Write a message that may be lost."""
        if self.lost is None:
            try:
                self._stream.write(_encodable(text, self.encoding))
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def writable(self) -> bool:
        """Always true: output that cannot be written is dropped."""
        return True

    def isatty(self) -> bool:
        """Whether a person is likely to look at it."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor; io.UnsupportedOperation if it has none."""
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
        # it still holds what could not be written, and tries again when the program ends
        with suppress(OSError, ValueError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self.fileno())


class _Styled(io.TextIOBase):
    """The same stream, for what escapes names by itself: tables and progress bars."""

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded

    def write(self, text: str) -> int:
        self._guarded.write_styled(text)
        return len(text)

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
def guarded() -> Iterator[Guarded]:
    """Guard stdout, which is given to the block, and stderr for its duration."""
    _fill_standard_descriptors()
    before = sys.stdout, sys.stderr
    stdout = Guarded(sys.stdout)
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, Guarded(sys.stderr))
    try:
        yield stdout
    finally:
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

    Where stderr is not a terminal, but a log file or a pipe: a line every ten seconds.
    """

    def __init__(self, title: str, unit: str, **options: Any) -> None:
        self._options = {"desc": printable(title), "unit": unit, **options}
        self._bar: Any = None
        self._begin: tuple[float, int] | None = None  # when the first report came, and what was done then
        self._line_s = 0.0

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done; raise what a signal raised, if that was lost."""
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
        if self._begin is None:
            self._begin, self._line_s = (now_s, done), now_s
        begin_s, initial = self._begin
        ends = done == total and self._line_s > begin_s  # no log ends at 70% of what was done
        if now_s - self._line_s >= _LINE_EVERY_S or ends:
            self._line_s = now_s
            form = {"prefix" if name == "desc" else name: value for name, value in self._options.items()}
            line = tqdm.format_meter(done, total, now_s - begin_s, ncols=0, initial=initial, **form)
            print(line, file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            tqdm.monitor_interval = 0  # its thread would only refresh the bar, and forbid forks
            # a resumed run starts where it stopped: its rate counts its own work only
            self._bar = tqdm(total=total, initial=done, file=styled(sys.stderr), **self._options)
        self._bar.update(done - self._bar.n)


# What a signal raised. C code, as that of a module being imported, can swallow an exception: then it is
# raised again at the next step of progress.
pending_interrupts: list[BaseException] = []


def raise_pending_interrupt() -> None:
    """Raise again what a signal has raised."""
    if pending_interrupts:
        raise pending_interrupts[-1]


def _is_plain(text: str) -> bool:
    return text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable()


def _plain(text: str) -> str:
    """`text` with its lines and tabs, and else only what is printable."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def _encodable(text: str, encoding: str) -> str:
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)
