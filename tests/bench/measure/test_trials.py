"""Trials in the file of a result: a killed command goes on, and a file of other work is not overwritten."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.measure.trials import Trials, read_document
from bench.report.result import Result, Trial
from precache.errors import SettingError
from tests.command import ROOT

MACHINE = {"date": "2026-11-26", "cpu": "EPYC", "torch": "2.14"}
SETTINGS: dict[str, Any] = {"size": 224, "repeats": 2, "workers": [1], "data": {"a": {"digest": "1"}}}


def run(trials: Trials, number: int) -> tuple[Trial, bool]:
    """Return the trial of that number, and whether it was measured now."""
    measured: list[int] = []

    def measure() -> Trial:
        measured.append(number)
        return Trial(numbers={"images_per_s": float(number)})

    return trials.measure({"number": number}, measure), bool(measured)


def make_result(trials: Trials) -> Result:
    return Result(
        command=trials.command,
        question="?",
        machine=trials.machine,
        settings=trials.settings,
        trials=trials.all(),
        rows=(),
        thing="loader",
        columns=(),
        answer=((f"{len(trials.all())} trials.",),),
    )


def make_trials(path: Path) -> Trials:
    return Trials(path, "loaders", MACHINE, SETTINGS)


def numbers_in(path: Path) -> list[int]:
    return [trial.key["number"] for trial in read_document(path).trials]


def measure_three(path: Path) -> list[bool]:
    """Return for each of three trials whether it was measured now."""
    trials = make_trials(path)
    return [run(trials, number)[1] for number in range(3)]


def test_a_line_is_appended_for_each_trial(tmp_path: Path) -> None:
    path = tmp_path / "new/r.json"
    trials = make_trials(path)
    lines: list[str] = []
    for number in range(4):
        run(trials, number)
        before, lines = lines, path.read_text().splitlines()
        assert lines[: len(before)] == before
        assert numbers_in(path) == list(range(number + 1))
    assert len(lines) == len(before) + 1
    assert os.listdir(path.parent) == ["r.json"]


def test_a_finished_file_is_one_json_document_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for count in range(1, 4):
        trials = make_trials(path)
        for number in range(count):
            trial, is_new = run(trials, number)
            assert (trial.images_per_s, is_new) == (number, number == count - 1)
        trials.finish(make_result(trials))
        content = json.loads(path.read_text())
        assert [entry["key"]["number"] for entry in content["trials"]] == list(range(count))
        assert content["answer"] == [f"{count} trials."]


def test_a_file_that_breaks_off_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run(make_trials(path), 0)
    first = len(path.read_bytes())
    run(make_trials(path), 1)
    content = path.read_bytes()
    for length in range(first, len(content) + 1):
        path.write_bytes(content[:length])
        whole = [0, 1] if length == len(content) else [0]
        assert numbers_in(path) == whole
        assert measure_three(path) == [False, whole == [0], True]
        assert numbers_in(path) == [0, 1, 2]


def test_a_killed_command_loses_at_most_the_trial_that_ran(tmp_path: Path) -> None:
    path, program = tmp_path / "r.json", tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed: list[int] = []
    for _ in range(5):
        command = subprocess.Popen(
            [sys.executable, program, path], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert command.stdout is not None
        printed += [int(command.stdout.readline()) for _ in range(20)]
        command.kill()
        printed += map(int, command.stdout.read().split())
        command.wait()
        assert printed == list(range(len(printed)))
        assert len(printed) <= len(numbers_in(path)) <= len(printed) + 1
        printed = numbers_in(path)


_PROGRAM = """
import itertools, sys
from pathlib import Path
from bench.measure.trials import Trials
from bench.report.result import Trial
trials = Trials(Path(sys.argv[1]), "loaders", {}, {})
for number in itertools.count(len(trials.all())):
    trials.add(Trial(key={"number": number}, series={"wait_s": (0.5,) * 5000}))
    print(number, flush=True)
"""


def test_one_command_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first, second = make_trials(path), make_trials(path)
    run(first, 0)
    for later in (lambda: run(second, 1), lambda: make_trials(path)):
        with pytest.raises(SettingError, match="another command") as raised:
            later()
        assert "--json" in raised.value.remedy
    run(first, 1)
    assert numbers_in(path) == [0, 1]
    first.finish(make_result(first))
    assert not run(make_trials(path), 1)[1]


def test_a_full_disk_is_named_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    trials = make_trials(path)
    run(trials, 0)
    size, limit = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limit[1]))
    try:
        with pytest.raises(SettingError, match="cannot be written") as raised:
            run(trials, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert raised.value.path == path
    assert path.stat().st_size == size + 9
    assert numbers_in(path) == [0]


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
