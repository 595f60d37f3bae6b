"""Trials of a command, kept in the file of its result while they are measured: a killed command goes on.

The file is whole JSON at any time: after each trial it is written anew, beside and renamed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report.result import (
    Document,
    Result,
    Trial,
    format_document,
    make_document,
    parse_document,
    to_plain,
)
from precache.cli.commandline import STDOUT
from precache.errors import SettingError
from precache.storage import atomic_write

_MAY_CHANGE = ("date", "margin", "baseline")
"""Parts that may differ: the day, and what trainings of `bench accuracy` are compared with."""
_MAY_GROW = ("repeats", "workers", "batch_sizes", "trainers", "seeds", "data")
"""Settings that may differ: further repeats, folders or numbers of workers add their trials."""


class Trials:
    """Trials so far, by what they are of.

    Attributes:
        settings: of the command; the file has them.
        skipped: what could not be measured, and why.
        known: how many the file held.
    """

    def __init__(
        self, path: Path | None, command: str, machine: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        """Read the trials in the file at `path`, if it is there.

        Args:
            path: None, or `-` for standard output: nothing is kept while measuring.
            settings: what all trials have in common, as plain values.

        Raises:
            SettingError: the file is of another command, another machine or other settings.
        """
        self.path = path if path is not None and is_kept(path) else None
        self.command = command
        self.machine = dict(machine)
        self.settings: dict[str, Any] = to_plain(settings)
        self.skipped: dict[str, str] = {}
        self._found: dict[str, Trial] = {}
        if self.path is not None and self.path.exists():
            document = read_document(self.path)
            self._check_same(document)
            self._found = {_key(trial.key): trial for trial in document.trials}
        self.known = len(self._found)

    def find(self, of: Mapping[str, Any]) -> Trial | None:
        """The trial of that, if it was measured."""
        return self._found.get(_key(of))

    def add(self, trial: Trial) -> None:
        """Keep it; it is in the file when this returns."""
        self._found[_key(trial.key)] = trial
        if self.path is not None:
            document = make_document(self.command, self.machine, self.settings, self.all(), self.skipped)
            _write(self.path, document)

    def measure(self, of: Mapping[str, Any], run: Callable[[], Trial]) -> Trial:
        """The trial of that: the one that was measured before, else what `run` returns, which is kept."""
        trial = self.find(of)
        if trial is None:
            measured = run()
            # read back as from the file: a result that is made again says the same to the last digit
            trial = Trial.from_json(replace(measured, key=to_plain(of)).to_json())
            self.add(trial)
        return trial

    def all(self) -> tuple[Trial, ...]:
        """Trials in the order in which they were measured."""
        return tuple(self._found.values())

    def finish(self, result: Result) -> None:
        """Write the result into the file, with its rows and its answer."""
        if self.path is not None:
            _write(self.path, result.to_json())

    def _check_same(self, document: Document) -> None:
        remedy = "name another --json, or remove the file to measure anew"
        if document.command != self.command:
            raise SettingError(
                f"{self.path}: is a result of 'bench {document.command}', not of 'bench {self.command}'; "
                f"{remedy}"
            )
        both = (
            ("machine", document.machine, self.machine, _MAY_CHANGE),
            ("settings", document.settings, self.settings, (*_MAY_GROW, *_MAY_CHANGE)),
            ("data", _digests(document.settings), _digests(self.settings), ()),
        )
        for part, theirs, ours, may_differ in both:
            for name in {**theirs, **ours}:
                if name in may_differ or (part == "data" and not (name in theirs and name in ours)):
                    continue
                if theirs.get(name) != ours.get(name):
                    raise SettingError(
                        f"{self.path}: was measured with other {part} ({name}: {theirs.get(name, 'none')}, "
                        f"here {ours.get(name, 'none')}); {remedy}"
                    )
        for name in _MAY_GROW:
            if name in document.settings and name in self.settings:
                self.settings[name] = _unite(document.settings[name], self.settings[name])


def is_kept(path: Path) -> bool:
    """Whether a file at `path` can hold trials: not `-`, no pipe and no device, as /dev/null is one."""
    return path != STDOUT and (path.is_file() or not path.exists())


def read_document(path: Path) -> Document:
    """The file of a result.

    Raises:
        SettingError: it cannot be read, or is something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read ({error})") from error
    return parse_document(text, str(path))


def _unite(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {**before, **now}
    if isinstance(now, list):
        return list(dict.fromkeys([*before, *now]))
    return max(before, now)


def _digests(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(data.get("digest", "")) for name, data in settings.get("data", {}).items()}


def _key(of: Mapping[str, Any]) -> str:
    return json.dumps(to_plain(of), sort_keys=True)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(format_document(document).encode())
