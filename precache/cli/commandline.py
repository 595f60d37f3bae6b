"""Run the commands of this project: one-line errors, exit codes, `--debug`.

0    done
1    done, and what was checked is not as it should be
2    bad input or a fault: one line on stderr that names it and the remedy
130  interrupted (SIGINT)
141  the reader of the result has ended, as in `| head`
143  terminated (SIGTERM)

A conversion does not end because nobody reads its messages: those that cannot be written are lost, see
`precache.cli.terminal`. SIGHUP, which a lost terminal sends, is ignored, as under `nohup`; to end a command,
send SIGTERM. Processes that it starts ignore SIGHUP, too. SIGPIPE is ignored by Python itself.
"""

import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from precache.cli.terminal import note, open_standard_streams, switch_off
from precache.errors import (
    MissingDependencyError,
    OpenFilesError,
    PrecacheError,
    SettingError,
    open_files_error,
    os_reason,
)
from precache.packages import check_package, pillow_fault
from precache.storage.urls import local_path, locate

STDOUT = Path("-")
"""Value of `--json` that prints to stdout instead of writing a file."""
_DEBUG = "precache.debug"
_Function = TypeVar("_Function", bound=Callable[..., Any])

debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    help="Show the traceback of an error.",
    callback=lambda context, _, value: context.meta.update({_DEBUG: value}),
)
"""Decorator that gives a command the option `--debug`."""


def run(group: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    handlers: dict[int, Any] = {signal.SIGTERM: _terminate}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = signal.SIG_IGN  # which child processes inherit, unlike a handler
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    open_standard_streams()
    try:
        return _run(group, program, list(sys.argv[1:] if arguments is None else arguments))
    except (KeyboardInterrupt, click.Abort, _Terminated) as stop:
        word, code = ("terminated", 143) if isinstance(stop, _Terminated) else ("interrupted", 130)
        detail = str(stop).strip()  # `reporting.explain_interruption` may have added what is kept
        _print_error(program, f"{word} {detail}".rstrip())
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Terminated(BaseException):
    """Raised on SIGTERM; like KeyboardInterrupt, no `except Exception` catches it."""


def _terminate(number: int, _: object) -> None:
    raise _Terminated


def _run(group: click.Command, program: str, arguments: list[str]) -> int:
    context: click.Context | None = None
    try:
        with group.make_context(program, arguments) as context:
            group.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else program
        _print_error(where, f"{error.format_message()} (see '{where} --help')")
    except click.Abort:
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_ended():
            switch_off(sys.stdout)
            return 141
        report_error(error, program, debug=context is not None and context.meta.get(_DEBUG, False))
    else:
        return 0
    return 2


def report_error(error: Exception, program: str, *, debug: bool = False) -> None:
    """Print the line for an error, with its traceback if it is a bug or `debug`."""
    if isinstance(error, ImportError):
        error = _explain_import(error, program)
    if debug or not isinstance(error, (PrecacheError, click.ClickException, OSError)):
        for line in "".join(traceback.format_exception(error)).splitlines():
            note(line, err=True)
    _print_error(program, _error_line(error))


def _explain_import(error: ImportError, program: str) -> Exception:
    """Return `error`, or for a missing or hidden package, the error that names the remedy."""
    if isinstance(error, PrecacheError):
        return error
    try:
        check_package(error, program, "bench" if "bench" in sys.modules else "")
    except MissingDependencyError as missing:
        return pillow_fault() or missing
    return pillow_fault() or error


def _error_line(error: Exception) -> str:
    """Return the line that a command prints for `error`."""
    too_many_files = _find_open_files_error(error)
    if too_many_files is not None:
        return str(too_many_files)
    if isinstance(error, (PrecacheError, click.ClickException)):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {os_reason(error)}; check the path"
    return f"{type(error).__name__}: {error}; this is a bug; please report it with the lines above"


def _find_open_files_error(error: BaseException | None) -> OpenFilesError | None:
    """Return the error for too many open files if `error`, or a cause of it, is one; else None."""
    while error is not None:
        too_many_files = open_files_error(error, getattr(error, "filename", None))
        if too_many_files is not None:
            return too_many_files
        error = error.__cause__
    return None


def _reader_has_ended() -> bool:
    """Whether stdout is a pipe from which nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(program: str, message: str) -> None:
    note(f"{program}: error: {' '.join(message.split())}", err=True)


class LocationType(click.ParamType):  # type: ignore[type-arg]
    """A path or a URL.

    Args:
        parse: parses its text; raises SettingError, with what to do instead.
    """

    name = "path"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the text of a parameter stands for."""
        return self._parse(value)


PATH = LocationType(local_path)
"""Type of a parameter that is a path of this machine."""
LOCATION = LocationType(locate)
"""Type of a parameter that is a path of this machine or a URL."""


def check_output(path: Path | None) -> None:
    """Raise SettingError if `path` is a folder, before minutes of measuring are lost."""
    if path is not None and path != STDOUT and path.is_dir():
        raise SettingError("is a folder", path=path, remedy="name a file in it")


def combine_options(
    parameter: str, make: Callable[..., object], options: Mapping[str, Callable[[Any], Any]]
) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command one `parameter`, which `make` makes of its `options`."""

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def command(*args: Any, **values: Any) -> Any:
            combined = make(**{name: values.pop(name) for name in options})
            return function(*args, **{parameter: combined}, **values)

        for decorator in reversed(list(options.values())):
            command = decorator(command)
        return command  # type: ignore[return-value]

    return decorate


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like `128MiB`, `2GB` or `1000` says; SettingError for anything else."""
    match = re.fullmatch(r"([0-9.]+)\s*([kKMGT]?)(iB|B)?", text.strip())
    try:
        number = Fraction(match[1] if match else 0)
    except ValueError:
        number = Fraction(0)
    if match is None or not number:
        raise SettingError(f"{text!r} is not a number of bytes", remedy="write it as in 128MiB, 2GB or 1000")
    power = " kMGT".index(match[2].replace("K", "k") or " ")
    return int(number * (1024 if match[3] == "iB" else 1000) ** power)


def parse_share(name: str, text: str) -> float:
    """Return 0.01 for `1%` or `0.01`; SettingError, which names the setting, for anything else."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+|[0-9]+\.)(%?)", text.strip())
    share = float(Fraction(match[1]) / (100 if match[2] else 1)) if match else -1.0
    if not 0 <= share <= 1:
        raise SettingError(f"{name} must be from 0% to 100%, or a share from 0 to 1, got {text!r}")
    return share
