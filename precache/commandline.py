"""How every command of this project runs: one-line errors, exit codes, `--debug`, `--json`.

0    done
1    done, and what was checked is not as it should be
2    bad input: one line on stderr that names it and the remedy
130  interrupted
"""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from precache.errors import PrecacheError, SettingError
from precache.executors import blocked

STDOUT = Path("-")
"""What `--json` is told to print to, instead of writing a file."""
_DEBUG = "precache.debug"


class Command(click.Command):
    """A click command that also takes `--debug`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        debug = click.Option(
            ["--debug"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="Show the traceback of an error.",
            callback=lambda context, _, value: context.meta.update({_DEBUG: value}),
        )
        self.params.append(debug)


class Group(click.Group):
    """A group of `Command`s."""

    command_class = Command


class ProgressBar:
    """A progress bar on stderr that appears with the first report of (done, total)."""

    def __init__(self, title: str, unit: str, **options: Any) -> None:
        self._options = {"desc": title, "unit": unit, **options}
        self._bar: Any = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done."""
        if _received:
            raise _received[-1]
        with blocked(signal.SIGINT, signal.SIGTERM):  # half a bar would complain when it is deleted
            if self._bar is None:
                tqdm.monitor_interval = 0  # its thread would only refresh the bar, and forbid forks
                # a resumed run starts where it stopped: its rate counts its own work only
                self._bar = tqdm(total=total, initial=done, **self._options)
            self._bar.update(done - self._bar.n)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def run(group: click.Group, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _received.clear()
    previous = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(group, program, arguments)
    except (KeyboardInterrupt, click.Abort, _Terminated) as stop:
        word, code = ("terminated", 143) if isinstance(stop, _Terminated) else ("interrupted", 130)
        _complain(program, f"{word}; run the same command again to go on, or to start anew")
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Terminated(BaseException):
    """SIGTERM came: like KeyboardInterrupt, nobody's business to catch on the way."""


# What a signal raised. C code, as that of a module being imported, can swallow an exception: then it is
# raised again at the next step of progress.
_received: list[BaseException] = []


def _on_signal(number: int, _: object) -> None:
    _received.append(KeyboardInterrupt() if number == signal.SIGINT else _Terminated())
    raise _received[-1]


def _run(group: click.Group, program: str, arguments: list[str]) -> int:
    context: click.Context | None = None
    try:
        with group.make_context(program, arguments) as context:
            group.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else program
        _complain(where, f"{error.format_message()} (see '{where} --help')")
    except (PrecacheError, click.ClickException) as error:
        if context is not None and context.meta.get(_DEBUG):
            raise
        _complain(program, str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader, say `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if context is not None and context.meta.get(_DEBUG):
            raise
        _complain(program, f"{error.filename or 'input or output'}: {error.strerror}; check the path")
    else:
        return 0
    return 2


def _complain(program: str, message: str) -> None:
    print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` on one line: control characters, and bytes that are no text, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_output(path: Path | None) -> None:
    """Raise SettingError if `path` cannot become a file: now, not after minutes of measuring."""
    if path is not None and path != STDOUT and path.is_dir():
        raise SettingError(f"{path}: is a folder; name a file in it")


def write_json(path: Path, content: object, *, quiet: bool = False) -> None:
    """Write `content` to `path` and, unless `quiet`, say so; print it alone for `-`."""
    text = json.dumps(content, indent=1)
    if path == STDOUT:
        click.echo(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    if not quiet:
        click.echo(f"wrote {path}")


def human_bytes(count: float) -> str:
    """Bytes in binary units, three digits: 1,798,237,072 -> '1.67 GiB'."""
    power = 0
    while abs(count) >= 1024 and power < 4:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.3g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def parse_bytes(text: str) -> int:
    """`128MiB`, `2GB` or `1000` to bytes; SettingError if it is something else."""
    match = re.fullmatch(r"([0-9.]+)\s*([kKMGT]?)(iB|B)?", text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not number:
        raise SettingError(f"{text!r} is not a number of bytes; write it as in 128MiB, 2GB or 1000")
    power = " kMGT".index(match[2].replace("K", "k") or " ")
    return int(number * (1024 if match[3] == "iB" else 1000) ** power)
