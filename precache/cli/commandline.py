"""Run the commands of this project: one-line errors, exit codes, `--debug`, `--json`.

0    done
1    done, and what was checked is not as it should be
2    bad input or a fault: one line on stderr that names it and the remedy
130  interrupted (SIGINT)
143  terminated (SIGTERM)

The exit code is that of the job, even if nobody reads its output:

- If a reader has seen enough (`| head`), a terminal vanished, or a stream is closed (`>&-`) or goes to a full
  disk, progress bar and messages are switched off, and the job goes on. A failed stdout is an error only for
  what a command prints as its result, as `inspect` does, and not if its reader has ended.
- SIGHUP, which a lost terminal sends, is ignored, as under `nohup`, so that a broken connection does not end
  a conversion of a day. To end it, send SIGTERM. Processes that the command starts ignore SIGHUP, too.
  SIGPIPE is ignored by Python itself.
"""

import importlib
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from precache.cli import terminal
from precache.cli.terminal import GuardedStream, guard_output
from precache.errors import (
    MissingDependencyError,
    OpenFilesError,
    PrecacheError,
    SettingError,
    open_files_error,
    os_reason,
    printable,
    similar_name,
)
from precache.packages import check_package, pillow_fault
from precache.storage.urls import Location, local_path, locate

STDOUT = Path("-")
"""Value of `--json` that prints to stdout instead of writing a file."""
_DEBUG, _HELP_ALL = "precache.debug", "precache.help-all"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Command(click.Command):
    """A click command that also takes `--debug`.

    Args:
        first: parameters that `--help` shows, for a command with many; `--help-all` shows them all.
    """

    def __init__(self, *args: Any, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first = first
        if first:
            help_all = click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                help="Show every option and exit.",
                callback=self._help_all,
            )
            self.params.append(help_all)
        debug = click.Option(
            ["--debug"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="Show the traceback of an error.",
            callback=lambda context, _, value: context.meta.update({_DEBUG: value}),
        )
        self.params.append(debug)

    @staticmethod
    def _help_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            context.meta[_HELP_ALL] = True
            click.echo(context.get_help())
            context.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that a newcomer needs; all of them with `--help-all`."""
        if not self._first or ctx.meta.get(_HELP_ALL):
            super().format_options(ctx, formatter)
            return
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        known = {str(option.name): option for option in options}
        help_options = [name for name in known if name.startswith("help")]
        shown = [known[name] for name in (*self._first, *help_options)]
        with formatter.section("Options"):
            records = (option.get_help_record(ctx) for option in shown)
            formatter.write_dl([record for record in records if record])
        formatter.write_paragraph()
        formatter.write_text(f"{len(known) - len(shown)} more: {ctx.command_path} --help-all")


class Group(click.Group):
    """A group of `Command`s.

    Args:
        modules: name of a command -> module that holds it as `command`, imported when it is used. If a
            package is not installed, the error names the extra.
        first: names of the commands that head the help.
    """

    command_class = Command

    def __init__(
        self,
        *args: Any,
        modules: Mapping[str, str] | None = None,
        first: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._modules, self._first = modules or {}, first

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in alphabetical order."""
        return sorted({*super().list_commands(ctx), *self._modules})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the whole first sentence of its help."""
        others = [name for name in self.list_commands(ctx) if name not in self._first]
        for title, names in (("Start here", self._first), ("More" if self._first else "Commands", others)):
            lines = [(name, self._line_of(ctx, name)) for name in names]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def _line_of(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(1000)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; UsageError, with a similar name, if there is none."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no command {args[0]!r}{similar_name(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name; None if there is none."""
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        return _import_command(self._modules[cmd_name], f"{self.name} {cmd_name}")


def _import_command(module: str, program: str) -> click.Command:
    """Return the command of `module`; MissingDependencyError if a package of its extra is missing."""
    try:
        command: click.Command = importlib.import_module(module).command
    except ImportError as error:
        fault = pillow_fault()
        if fault is not None:
            raise fault from None
        if not isinstance(error, MissingDependencyError):
            check_package(error, program, module.partition(".")[0])
        raise
    return command


def run(group: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    terminal.pending_interrupts.clear()
    handlers: dict[int, Any] = {signal.SIGINT: _on_signal, signal.SIGTERM: _on_signal}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = signal.SIG_IGN  # which child processes inherit, unlike a handler
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with guard_output() as stdout:
            try:
                return _check_stdout(program, _run(group, program, arguments), stdout)
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


def _on_signal(number: int, _: object) -> None:
    terminal.pending_interrupts.append(KeyboardInterrupt() if number == signal.SIGINT else _Terminated())
    terminal.raise_pending_interrupt()


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
        explained = _explain(error, program)
        debug = context is not None and context.meta.get(_DEBUG, False)
        if debug or not isinstance(explained, (PrecacheError, click.ClickException, OSError)):
            traceback.print_exc()  # on stderr, which is guarded
        _print_error(program, _error_line(explained))
    else:
        return 0
    return 2


def _explain(error: Exception, program: str) -> Exception:
    """Return `error`, or for a missing or hidden package, the error that names the remedy."""
    if isinstance(error, (PrecacheError, click.ClickException, OSError)):
        return error
    if isinstance(error, ImportError):
        try:
            check_package(error, program, "bench" if "bench" in sys.modules else "")
        except MissingDependencyError as missing:
            return missing
    return error


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


def _check_stdout(program: str, code: int, stdout: GuardedStream) -> int:
    """Return `code`, or that of an error if a finished job could not write its result to stdout."""
    failure = stdout.result_failure
    if code != 0 or failure is None or isinstance(failure, BrokenPipeError):
        return code
    _print_error(program, f"stdout: cannot be written ({os_reason(failure)}); its output is lost")
    return 2


def note(message: str) -> None:
    """Print a message that is not the job's result, so that a closed stdout does not fail the job."""
    if isinstance(sys.stdout, GuardedStream):
        sys.stdout.note(f"{printable(message)}\n")
    else:
        click.echo(printable(message))


def _print_error(program: str, message: str) -> None:
    print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)


class PathOrUrl(click.ParamType):  # type: ignore[type-arg]
    """A path or a URL, see `precache.storage.urls.locate`; SettingError for a URL of an unknown kind."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        """Return the path or URL that a parameter's text stands for."""
        return locate(value)


class LocalPath(click.ParamType):  # type: ignore[type-arg]
    """A path of this machine.

    Args:
        parse: parses the text of the path; raises SettingError for a URL, with what to do instead.
    """

    name = "path"

    def __init__(self, parse: Callable[[str], Path] = local_path) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path that a parameter's text stands for."""
        return self._parse(value)


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
