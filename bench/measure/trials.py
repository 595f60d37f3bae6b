"""Trials of a command, kept in the file of its result while they are measured, so that it can be resumed.

A line is appended for each trial. When the command ends, the whole result is written, as one JSON document.

| the file while the command runs, and after a kill     | the same command              |
| ----------------------------------------------------- | ----------------------------- |
| missing: no trial has ended                           | begins                        |
| a result that is finished: no new trial has ended     | adds to its trials            |
| settings, and a line for each trial; no conclusions   | goes on behind the last trial |
| the same, and a line that breaks off                  | measures that trial again     |
| locked, or replaced, by another command that runs     | ends with an error            |
"""

import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.report.result import (
    Document,
    Result,
    Trial,
    format_document,
    format_trial,
    format_unfinished,
    make_document,
    parse_document,
    to_plain,
)
from precache.cli.commandline import STDOUT
from precache.errors import SettingError, os_errors_as, os_reason
from precache.storage import atomic_write
from precache.storage.locks import has_name, lock

_MAY_GROW = ("repeats", "workers", "batch_sizes", "trainers", "data")
"""Settings that may differ in a file: further repeats, folders or numbers of workers only add trials."""
_ROOM = "free space there, and run the command again: it goes on from the trials in the file"


class Trials:
    """Trials of a command so far, each found by its key.

    Attributes:
        path: file that keeps them; None: nothing is kept while measuring.
        command: name of the command.
        machine: from `bench.machine.hardware.describe_machine`.
        settings: settings that all trials share, united with those of the file.
        skipped: reasons why something could not be measured, by its name.
    """

    def __init__(
        self, path: Path | None, command: str, machine: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        """Read the trials in the file at `path`, if it is there.

        Args:
            path: file of the result; None, or `-` for standard output: nothing is kept while measuring.
            settings: settings that all trials share, as plain JSON values.

        Raises:
            SettingError: the file is of another command, another machine or other settings.
        """
        self.path = path if path is not None and can_keep_trials(path) else None
        self.command = command
        self.machine = dict(machine)
        self.settings: dict[str, Any] = to_plain(settings)
        self.skipped: dict[str, str] = {}
        self._trials: dict[str, Trial] = {}
        self._file: FileIO | None = None  # the locked file; trials are appended to it once it is writable
        if self.path is not None and self.path.exists():
            self._file = FileIO(self.path)
            self._lock(self._file)
            document = read_document(self.path)
            self._check_same(document)
            self._trials = {_key_text(trial.key): trial for trial in document.trials}

    def find(self, key: Mapping[str, Any]) -> Trial | None:
        """Return the trial with that key; None where it was not measured."""
        return self._trials.get(_key_text(key))

    def add(self, trial: Trial) -> Trial:
        """Keep the trial, and return it as it is read from the file, which has it when this returns."""
        trial = trial.rounded()
        self._trials[_key_text(trial.key)] = trial
        if self.path is not None:
            with os_errors_as(SettingError, "cannot be written", _ROOM, path=self.path):
                self._append(trial, self.path)
        return trial

    def _append(self, trial: Trial, path: Path) -> None:
        """Append the line of a trial, the newest one; the first time, write the file with all trials so far.

        Raises:
            SettingError: another command has written the file meanwhile.
            OSError: it cannot be written.
        """
        if self._file is not None and not has_name(self._file.fileno(), path):
            raise self._busy_error()
        if self._file is not None and self._file.writable():
            line = memoryview(format_trial(trial).encode())
            while line:  # a nearly full disk takes a part
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
            return
        if self._file is None and path.exists():
            raise self._busy_error()
        document = make_document(self.command, self.machine, self.settings, self.all(), self.skipped)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(format_unfinished(document).encode())
            locked = FileIO(os.dup(file.fileno()), "wb")
            self._lock(locked)
        self._file = locked

    def _lock(self, file: FileIO) -> None:
        """Lock the file until it is closed, where the system can; SettingError if another command did."""
        if os.name != "nt" and not lock(file.fileno()):
            raise self._busy_error()

    def _busy_error(self) -> SettingError:
        return SettingError(
            "is written, or was removed, by another command",
            path=self.path,
            remedy="wait for its end, or name another --json",
        )

    def measure(self, key: Mapping[str, Any], run: Callable[[], Trial]) -> Trial:
        """Return the trial with that key; where it was not measured, call `run` and keep what it returns."""
        trial = self.find(key)
        if trial is None:
            trial = self.add(structs.replace(run(), key=to_plain(key)))
        return trial

    def all(self) -> tuple[Trial, ...]:
        """Return all trials in the order in which they were measured."""
        return tuple(self._trials.values())

    def finish(self, result: Result) -> None:
        """Write the result into the file, with its rows and its answer."""
        if self.path is not None:
            with os_errors_as(SettingError, "cannot be written", _ROOM, path=self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self.path) as file:
                    file.write(format_document(result.to_json()).encode())
        if self._file is not None:
            self._file.close()

    def _check_same(self, document: Document) -> None:
        """Check that the file's trials can be gone on with, and add its settings of _MAY_GROW to these.

        Raises:
            SettingError: the file is of another command, another machine or other settings.
        """
        remedy = "name another --json, or remove the file to measure anew"
        if document.command != self.command:
            raise SettingError(
                f"is a result of 'bench {document.command}', not of 'bench {self.command}'",
                path=self.path,
                remedy=remedy,
            )
        in_file, here = _digests(document.settings), _digests(self.settings)
        parts = (
            ("machine", document.machine, self.machine, ("date",)),
            ("settings", document.settings, self.settings, _MAY_GROW),
            ("data", in_file, here, in_file.keys() ^ here.keys()),  # folders may be added
        )
        for part, before, now, may_differ in parts:
            for name in {**before, **now}:
                if name not in may_differ and before.get(name) != now.get(name):
                    raise SettingError(
                        f"was measured with other {part} ({name}: {before.get(name, 'none')}, here "
                        f"{now.get(name, 'none')})",
                        path=self.path,
                        remedy=remedy,
                    )
        for name in _MAY_GROW:
            if name in document.settings and name in self.settings:
                self.settings[name] = _unite(document.settings[name], self.settings[name])


def can_keep_trials(path: Path) -> bool:
    """Whether a file at `path` can keep trials; `-`, a pipe or a device such as /dev/null cannot."""
    return path != STDOUT and (path.is_file() or not path.exists())


def read_document(path: Path) -> Document:
    """Read the file of a result.

    Raises:
        SettingError: the file cannot be read, or is no result.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingError(f"cannot be read ({os_reason(error)})", path=path) from error
    return parse_document(raw, str(path))


def _unite(before: Any, now: Any) -> Any:
    """Return the union of two dicts or lists, or the larger of two numbers."""
    if isinstance(now, dict):
        return {**before, **now}
    if isinstance(now, list):
        return list(dict.fromkeys([*before, *now]))
    return max(before, now)


def _digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each folder in the settings of a result."""
    return {name: str(data.get("digest", "")) for name, data in settings.get("data", {}).items()}


def _key_text(key: Mapping[str, Any]) -> str:
    """Return a trial's key as text, which a dict can be looked up with."""
    return json.dumps(to_plain(key), sort_keys=True)
