"""The errors that this project raises on purpose.

    PrecacheError                 one line: the path or value, what was expected, the remedy
    ├── SettingError              a value that a caller or a flag gave (also a ValueError)
    ├── SourceError               a raw image tree: missing, empty, without class folders
    ├── ImageError                one picture that cannot be decoded (where an ImageDataset reads it from a
    │                             tree, also Pillow's UnidentifiedImageError, which ImageFolder raises)
    ├── DatasetError              a converted folder: no manifest, wrong format, damaged file
    │   ├── SampleError           one sample of it that is not as it was written (also an ImageError)
    │   └── NothingFoundError     no data at a path, or none in it (also a SourceError, a FileNotFoundError
    │                             and a RuntimeError, which torchvision's ImageFolder raises or has raised)
    ├── StorageError              an object storage that does not answer, refuses, or lacks an object
    ├── WorkerError               a worker process or thread that died
    ├── TransformError            an exception in a transform of the caller's
    ├── OpenFilesError            as many files are open as may be ('ulimit -n')
    └── MissingDependencyError    a package that a backend needs (also an ImportError)

Catch `PrecacheError` for all of them. The commands print it on one line and exit with 2.
"""

import errno
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fractions import Fraction
from itertools import islice
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

if sys.platform != "win32":
    import resource  # early: once too many files are open, it could not be imported

_MAX_FILES = 65_536
_MAX_COMPARED = 1_000  # names in a folder; comparing 20,000 takes a second


class PrecacheError(Exception):
    """Base of the errors of this project; `str(error)` is one line, 'PATH: MESSAGE; REMEDY'.

    PATH or REMEDY is left out where it is not given. Unprintable characters, as in file names, are escaped.

    Attributes:
        path: the path or URL that is at fault, as it was given; None where the message names none.
        remedy: what to do, as a phrase like "run 'precache convert' again"; empty where nothing helps.
    """

    path: Any

    def __init__(self, message: str, *, path: object = None, remedy: str = "") -> None:
        super().__init__(message)
        self._message = message
        self.path = path
        self.remedy = remedy

    def __str__(self) -> str:
        return printable(f"{self.without_remedy}; {self.remedy}") if self.remedy else self.without_remedy

    @property
    def without_remedy(self) -> str:
        """The line without the remedy: 'PATH: MESSAGE'."""
        start = "" if self.path is None else f"{self.path}: "
        return printable(f"{start}{_without_traceback(self._message)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class SettingError(PrecacheError, ValueError):
    """A setting is out of range or unknown; the message names it, its value and the choices."""


class SourceError(PrecacheError):
    """A raw image tree cannot be read as class folders with pictures."""


class ImageError(PrecacheError):
    """A picture cannot be read or decoded.

    Attributes:
        path: path of the picture, as it was given.
        reason: what is wrong with it, without the path.
    """

    def __init__(self, path: str, reason: str = "", *, remedy: str = "") -> None:
        if not reason:  # a DataLoader creates the error again from its text alone
            path, _, reason = _without_traceback(path).partition(": ")
        super().__init__(reason, path=path, remedy=remedy)
        self.args = (path, reason)  # pickle creates the error from these
        self.reason = reason

    @property
    def reason_and_remedy(self) -> str:
        """Reason, followed by the remedy if there is one: 'REASON; REMEDY'."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class DatasetError(PrecacheError):
    """A converted folder cannot be used: missing, damaged, of another format, or without what is needed."""


class SampleError(DatasetError, ImageError):
    """A sample of a converted dataset differs from what was written.

    Attributes:
        path: the shard's file, the sample's id and the path of its source.
        reason: what is wrong with it.
    """


class NothingFoundError(DatasetError, SourceError, FileNotFoundError, RuntimeError):
    """A path has no data: it does not exist, or has no class folders with pictures, or a class has none."""


class StorageError(PrecacheError):
    """An object storage refuses, does not answer, or lacks an object; the message names the URL."""


class WorkerError(PrecacheError):
    """A worker died without an exception of its own."""


class TransformError(PrecacheError):
    """A transform of the caller raised an exception, which is the cause of this error.

    Where another process ran the transform, the cause has the text of the traceback there.

    Attributes:
        path: the picture's file, or shard and id.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        if cause is not None and not isinstance(cause, TracebackOfProcess):
            lines = traceback.format_exception(type(cause), cause, cause.__traceback__)
            cause = TracebackOfProcess("\n" + "".join(lines))
        return type(self), self.args, {**self.__dict__, "__cause__": cause}


class TracebackOfProcess(Exception):
    """The text of an exception and its traceback in another process."""


class OpenFilesError(PrecacheError):
    """A file cannot be opened because too many others are open; `path`, if given, is not at fault."""


class MissingDependencyError(PrecacheError, ImportError):
    """An optional package is not installed; the message holds the install command."""


def _without_traceback(text: str) -> str:
    """Return the message in `text`, which torch's DataLoader fills with the traceback of its worker.

    Such a text is 'Caught NAME in DataLoader worker process 0.', the traceback, and 'MODULE.NAME: MESSAGE'.
    """
    if text.startswith("Caught ") and "in DataLoader worker process" in text.partition("\n")[0]:
        return text.strip().rpartition("\n")[2].partition(": ")[2]
    return text


def open_files_error(error: BaseException | None, path: object = None) -> OpenFilesError | None:
    """Return the error to raise instead of `error` if too many files are open; else None.

    Args:
        path: the file that could not be opened; None for a pipe.
    """
    if not isinstance(error, OSError):
        return None
    problem = "cannot be opened" if path else "a pipe cannot be opened"
    if error.errno == errno.EMFILE and sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        remedy = f"run 'ulimit -n {limit}' before it"
        if limit <= soft:
            remedy = "raise the hard limit ('ulimit -Hn'), and then 'ulimit -n'"
        return OpenFilesError(
            f"{problem}, for all the {soft:,} files are open that this process may have",
            path=path or None,
            remedy=remedy,
        )
    if error.errno == errno.ENFILE:
        return OpenFilesError(
            f"{problem}, for too many files are open on this machine",
            path=path or None,
            remedy="end other programs, or raise its limit ('sysctl fs.file-max')",
        )
    return None


def check_open_files(error: OSError, path: object = None) -> None:
    """Raise OpenFilesError instead of `error` if too many files are open."""
    too_many = open_files_error(error, path)
    if too_many is not None:
        raise too_many from error


@contextmanager
def thread_errors() -> Iterator[None]:
    """Raise WorkerError where the system starts no further thread within the block."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise WorkerError(
            "no further thread can be started",
            remedy="use fewer threads and workers, or raise the limit ('ulimit -u', and the pids limit of a "
            "container)",
        ) from error


def os_reason(error: BaseException) -> str:
    """Return the system's words for an error, as 'No such file or directory'; else its own message."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def os_errors_as(
    kind: type[PrecacheError], message: str, remedy: str, *, path: object = None
) -> Iterator[None]:
    """Raise a `kind`, 'PATH: MESSAGE (REASON); REMEDY', for an OSError of the block.

    A PrecacheError is raised as it is. Where too many files are open, OpenFilesError is raised.
    """
    try:
        yield
    except PrecacheError:  # first, because NothingFoundError is an OSError, too
        raise
    except OSError as error:
        check_open_files(error, error.filename)
        raise kind(f"{message} ({os_reason(error)})", path=path, remedy=remedy) from error


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise SettingError unless `value` is one of `choices`."""
    choices = sorted(choices)
    if value not in choices:
        hint = similar_name(value, choices)
        raise SettingError(f"unknown {name} {value!r}; choose from: {', '.join(choices)}{hint}")


def similar_name(name: object, choices: Iterable[str]) -> str:
    """Return `; did you mean 'shards'?` if `name` is nearly one of `choices`; else an empty string."""
    matches = get_close_matches(str(name).lower(), choices, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_range(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """Return `value`, an int of Python, NumPy or torch, as an int; SettingError unless low <= it <= high."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        expected = (
            f"an integer of at least {low:,}" if high is None else f"an integer from {low:,} to {high:,}"
        )
        raise SettingError(f"{name} must be {expected}, got {value!r}")
    return number


def is_number(value: object) -> bool:
    """Whether `value` is a number of Python or NumPy, and not a Boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_share(name: str, value: float) -> None:
    """Raise SettingError unless 0 <= value <= 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise SettingError(f"{name} must be a share from 0 to 1, got {value!r}")


def as_typed(number: float) -> Fraction:
    """Return the decimal that was typed for a number: 7/100 for 0.07, which is slightly more as a float."""
    return Fraction(str(number))


def printable(text: str) -> str:
    """Return `text` on one line, with an escape for each character that could control a terminal.

    These are control characters (C0, C1, DEL), format characters such as those that turn the direction of
    writing, and bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """Return `; did you mean photos?` if `path` is missing and an existing path has nearly its name.

    Else, and in a folder of more than 1,000 names, which would take too long, it is an empty string.
    """
    missing = Path(path)
    try:
        while not missing.parent.is_dir():
            missing = missing.parent
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_COMPARED + 1)]
        if missing.exists() or len(names) > _MAX_COMPARED:
            return ""
        matches = get_close_matches(missing.name, names, n=1)
        if not matches:
            return ""
        similar = missing.parent / matches[0] / Path(path).relative_to(missing)
        return f"; did you mean {similar}?" if similar.exists() else ""
    except OSError:
        return ""


def shell_command(*words: object) -> str:
    """Return the command line of `words`, to paste into a shell.

    A string is inserted as it is, so `precache convert` stays two words. A path or a URL is quoted, so that
    it is one word, and no option if it begins with a dash.
    """
    return " ".join(word if isinstance(word, str) else _quote(word) for word in words)


def _quote(path: object) -> str:
    text = str(os.fspath(path)) if isinstance(path, os.PathLike) else str(path)
    if text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": r"\\", "'": r"\'"}
    escaped = (
        escapes.get(c, c) if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c))
        for c in text
    )
    return f"$'{''.join(escaped)}'"  # bash and zsh read the escapes
