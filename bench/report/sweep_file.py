"""The file of a sweep: JSON lines, one per finished trial, so that a killed sweep goes on where it was.

    {"sweep": 1, "machine": {...}, "data": {folder: digest}, "settings": {...}}     the first line
    {"data": {folder: digest}}                          folders that a later sweep added
    {"point": {...}, "repeat": 0, "trial": {...}}       a trial, see `bench.measure.sweep_trial.run`
    {"point": {...}, "pruned": "why"}                   a point that needs no measuring
    {"point": {...}, "failed": "why"}                   a point that does not fit into memory

A line without its end is one that a killed process was writing: it is cut off.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.report import stats
from bench.report.grid import Measured, Point
from precache.errors import SettingError

_VERSION = 1
_CHANGES_DAILY = "date"


class SweepFile:
    """What is finished, in memory and on disk.

    Attributes:
        trials: of each point, by repeat.
        pruned, failed: point -> why.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open `path`, or begin it with `header`: machine, data and settings.

        Raises:
            SettingError: it is the file of another machine or other settings, a folder holds other data than
                it did, or it is the file of something else.
        """
        self.path = path
        self.trials: dict[Point, dict[int, dict[str, Any]]] = {}
        self.pruned: dict[Point, str] = {}
        self.failed: dict[Point, str] = {}
        if path.is_dir():
            raise SettingError(f"{path}: is a folder; name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _complete_lines(path)
        if not lines:
            self._append({"sweep": _VERSION, **header})
            return
        try:
            found, *others = [json.loads(line) for line in lines]
            if found["sweep"] != _VERSION:
                raise KeyError("sweep")
            for line in others:
                if "data" in line:
                    found["data"] |= line["data"]
                else:
                    self._take(line)
            known, asked = found["data"], header["data"]
            _check_same(path, {**found, "data": asked | known}, {**header, "data": known | asked})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(
                f"{path}: not a file of 'bench sweep' ({error!r}); name another --out"
            ) from error
        if new := {name: digest for name, digest in asked.items() if name not in known}:
            self._append({"data": new})

    def add(self, point: Point, **found: Any) -> None:
        """Write one of the lines described above."""
        line = {"point": asdict(point), **found}
        self._append(line)
        self._take(line)

    def measured(self) -> list[Measured]:
        """What the trials of each point gave so far."""
        return [_measured(point, list(trials.values())) for point, trials in self.trials.items()]

    def other_cpu(self, points: Collection[Point]) -> float | None:
        """What other processes took of the CPUs, 0 to 1, on average over the trials of `points`.

        None if no trial says it, as those of older files.
        """
        trials = [trial for point in points for trial in self.trials.get(point, {}).values()]
        shares = [share for trial in trials if (share := trial.get("other_cpu")) is not None]
        return sum(shares) / len(shares) if shares else None

    def _take(self, line: dict[str, Any]) -> None:
        point = Point(**line["point"])
        if "trial" in line:
            self.trials.setdefault(point, {})[line["repeat"]] = line["trial"]
        elif "pruned" in line:
            self.pruned[point] = line["pruned"]
        else:
            self.failed[point] = line["failed"]

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _complete_lines(path: Path) -> list[str]:
    """The lines of `path`, of which a last one without its end is cut off; none if there is no file."""
    if not path.exists():
        return []
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if content[:1] not in (b"", b"{"):
            raise SettingError(f"{path}: not a file of 'bench sweep'; name another --out")
        file.truncate(end)
    return content[:end].decode("utf-8", "replace").splitlines()


def _check_same(path: Path, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    for part, word in (
        ("machine", "on another machine"),
        ("data", "on other data"),
        ("settings", "with other settings"),
    ):
        theirs, ours = found[part], header[part]
        for name in {**theirs, **ours}:
            if name != _CHANGES_DAILY and theirs.get(name) != ours.get(name):
                raise SettingError(
                    f"{path}: was measured {word} ({name}: {theirs.get(name, 'none')}, "
                    f"here {ours.get(name, 'none')}); name another --out"
                )


def _measured(point: Point, trials: list[dict[str, Any]]) -> Measured:
    together = [trial["together"] for trial in trials]
    alone = [trial["trainer"] for trial in trials if trial["trainer"] is not None]
    return Measured(
        point,
        stats.estimate(together),
        stats.estimate(alone) if alone else None,
        stats.ratio(together, alone) if alone else None,
    )
