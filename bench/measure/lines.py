"""Finished work as lines of JSON, so that what was killed goes on where it was.

A line is on disk before it counts. One without its end is what a killed process was writing: it is cut off.
Several processes may append to one file: each line is written at once.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precache.errors import SettingError

_MAY_CHANGE = ("date", "described")
_BEGINS = b'{"'


class Lines:
    """A file of such lines; `found` holds those that were there, and those that were added."""

    def __init__(self, path: Path, of: str) -> None:
        """Open `path`, or begin it with the first line.

        Args:
            of: the command whose file it is, for errors.

        Raises:
            SettingError: it is a folder, or the file of something else.
        """
        self.path = path
        self._of = of
        self.found: list[dict[str, Any]] = []
        self._unended = False
        if path.is_dir():
            raise SettingError(f"{path}: is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        content = path.read_bytes()
        if not _BEGINS.startswith(content[: len(_BEGINS)]):
            raise self.error()
        *whole, last = content.split(b"\n")
        try:
            self.found = [json.loads(line) for line in whole]
        except ValueError as error:
            raise self.error(error) from error
        if last:
            try:
                self.found.append(json.loads(last))
                self._unended = True  # whole, but for its end: whose file it is nobody knows yet
            except ValueError:
                os.truncate(path, len(content) - len(last))

    def add(self, line: Mapping[str, Any]) -> None:
        """Write it, and wait until it is on disk."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("\n" * self._unended + json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._unended = False
        self.found.append(dict(line))

    def error(self, why: object = None) -> SettingError:
        """That this is no such file."""
        told = f" ({why!r})" if why is not None else ""
        return SettingError(f"{self.path}: not a file of '{self._of}'{told}; name another --out")


def check_same(what: str, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise SettingError, which names what differs, unless both, {part: {name: value}}, are the same.

    Dates and descriptions may differ.
    """
    for part, ours in asked.items():
        theirs = found.get(part, {})
        for name in {**theirs, **ours}:
            if name not in _MAY_CHANGE and theirs.get(name) != ours.get(name):
                raise SettingError(
                    f"{what}: was measured with other {part} ({name}: {theirs.get(name, 'none')}, here "
                    f"{ours.get(name, 'none')}); name another --out"
                )
