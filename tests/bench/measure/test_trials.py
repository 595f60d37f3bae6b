"""Trials in the file of a result: a killed command goes on, and a file of other work is not overwritten."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.measure.trials import Trials
from bench.report.result import Trial
from precache.errors import SettingError

MACHINE = {"date": "2026-11-26", "cpu": "EPYC", "torch": "2.14"}
SETTINGS: dict[str, Any] = {"size": 224, "repeats": 2, "workers": [1], "data": {"a": {"digest": "1"}}}


def run(trials: Trials, number: int) -> tuple[Trial, bool]:
    """Return the trial of that number, and whether it was measured now."""
    measured: list[int] = []

    def measure() -> Trial:
        measured.append(number)
        return Trial(numbers={"images_per_s": float(number)})

    return trials.measure({"number": number}, measure), bool(measured)


def test_the_file_is_complete_after_each_trial_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "new/r.json"
    for count in range(1, 5):
        trials = Trials(path, "loaders", MACHINE, SETTINGS)
        for number in range(count):
            trial, is_new = run(trials, number)
            assert (trial.images_per_s, is_new) == (number, number == count - 1)
        content = json.loads(path.read_text())
        assert [entry["key"]["number"] for entry in content["trials"]] == list(range(count))
    assert os.listdir(path.parent) == ["r.json"]


def test_more_repeats_workers_and_data_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run(Trials(path, "loaders", MACHINE, SETTINGS), 1)
    more = {**SETTINGS, "repeats": 3, "workers": [2], "data": {"b": {"digest": "2"}}}
    trials = Trials(path, "loaders", {**MACHINE, "date": "2026-11-27"}, more)
    assert trials.settings["workers"] == [1, 2]
    assert trials.settings["repeats"] == 3
    assert trials.settings["data"].keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("command", "machine", "settings", "mention"),
    [
        ("accuracy", {}, {}, "bench loaders"),
        ("loaders", {"torch": "2.15"}, {}, "torch: 2.14, here 2.15"),
        ("loaders", {}, {"size": 96}, "size: 224, here 96"),
        ("loaders", {}, {"data": {"a": {"digest": "9"}}}, "a: 1, here 9"),
    ],
)
def test_a_file_of_other_work_is_refused_and_kept(
    command: str, machine: dict[str, str], settings: dict[str, Any], mention: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    run(Trials(path, "loaders", MACHINE, SETTINGS), 1)
    before = path.read_bytes()
    with pytest.raises(SettingError, match=mention) as raised:
        Trials(path, command, {**MACHINE, **machine}, {**SETTINGS, **settings})
    assert raised.value.path == path
    assert "--json" in raised.value.remedy
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["my notes", "{}", '{"version": 1}', "[1]"])
def test_a_file_that_is_no_result_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(SettingError) as raised:
        Trials(path, "loaders", MACHINE, SETTINGS)
    assert raised.value.path == str(path)
    assert "--json" in raised.value.remedy
    assert path.read_text() == text


@pytest.mark.parametrize("path", [None, Path("-"), Path("/dev/null")])
def test_trials_without_a_file_are_measured_once_per_command(path: Path | None) -> None:
    trials = Trials(path, "loaders", MACHINE, SETTINGS)
    assert run(trials, 1)[1]
    assert not run(trials, 1)[1]
    assert not Path("/dev/null").is_file()
