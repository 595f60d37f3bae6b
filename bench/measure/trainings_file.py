"""The file of finished trainings: JSON lines, one each, so that a run that was killed goes on.

    {"arm": "crop", "seed": 0, "conditions": {...}, "source": {...}, "machine": {...}, "epochs": 40,
     "curve": [[2, 31.4, 8.1], ...], "train_s": 162.0, "classes": 102, "steps": 1880, "images": 120320,
     "energy_j": null, "other_cpu": 0.01, "resumed": 0}

`curve`: epochs done, top-1 in percent, seconds of training until then, evaluations left out. A line without
its end is one that a killed process was writing: it is cut off.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precache.errors import SettingError

_MAY_CHANGE = ("date", "described")
Line = dict[str, Any]


class Trainings:
    """What is finished, in memory and on disk.

    Attributes:
        done: (arm, seed) -> line.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, or begin it; SettingError if it is something else."""
        self.path = path
        self.done: dict[tuple[str, int], Line] = {}
        for number, text in enumerate(_complete_lines(path), 1):
            try:
                line = json.loads(text)
                self.done[line["arm"], line["seed"]] = line
            except (ValueError, KeyError, TypeError) as error:
                raise SettingError(
                    f"{path}, line {number}: not of 'bench accuracy' ({error!r}); name another --out"
                ) from error

    def check(self, arm: str, same: Mapping[str, Mapping[str, Any]]) -> None:
        """SettingError if a training of that arm is there that was done otherwise than `same` says."""
        for (name, seed), line in self.done.items():
            if name == arm:
                check_same(f"{self.path}: the training of {arm}, seed {seed},", line, same)

    def add(self, line: Line) -> None:
        """Write it."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.done[line["arm"], line["seed"]] = line


def check_same(what: str, line: Mapping[str, Any], same: Mapping[str, Mapping[str, Any]]) -> None:
    """SettingError if one of the parts of `line` that `same` has is another there."""
    for part, ours in same.items():
        theirs = line.get(part, {})
        for name in {**theirs, **ours}:
            if name not in _MAY_CHANGE and theirs.get(name) != ours.get(name):
                raise SettingError(
                    f"{what} was done with {name} {theirs.get(name, 'none')}, this is "
                    f"{ours.get(name, 'none')}; name another --out"
                )


def _complete_lines(path: Path) -> list[str]:
    """The lines of `path`, of which a last one without its end is cut off; none if there is no file."""
    if not path.exists():
        return []
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if content[:1] not in (b"", b"{"):
            raise SettingError(f"{path}: not of 'bench accuracy'; name another --out")
        if end < len(content):  # not else: a process that trains other seeds may be writing
            file.truncate(end)
    return content[:end].decode("utf-8", "replace").splitlines()
