"""A file of finished work: whatever it ends with, what is whole in it is found, and other files stay."""

import json
from pathlib import Path

import pytest

from bench.measure.lines import Lines
from precache.errors import SettingError

WORK = [{"sweep": 1, "machine": {"cpu": "é"}}, {"point": 1, "rates": [1.5, 2.0]}, {"point": 2}]


def written(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_at_any_byte_it_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "work.jsonl"
    first, second = Lines(path, "bench sweep"), Lines(path, "bench sweep")
    for number, line in enumerate(WORK):  # of two processes at a time
        (first, second)[number % 2].add(line)
    content = path.read_bytes()
    for killed_at in range(len(content) + 1):
        path.write_bytes(content[:killed_at])
        lines = Lines(path, "bench sweep")
        # a line without its newline is whole, too
        ends = [n for n, byte in enumerate(content) if byte == ord("\n") and n <= killed_at]
        assert lines.found == WORK[: len(ends)]
        lines.add({"after": killed_at})
        assert written(path) == [*WORK[: len(ends)], {"after": killed_at}]


def test_the_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    json_of_others = ('{\n "name": "x"\n}', '{"a": 1,\n"b": 2}', '{"a": 1}\nnot json\n{"b"', "{}", "[1, 2]")
    for content in ("do not\nlose this", *json_of_others):
        path.write_text(content)
        with pytest.raises(SettingError, match=r"mine.txt: not a file of 'bench sweep'.*; name another"):
            Lines(path, "bench sweep")
        assert path.read_text() == content
