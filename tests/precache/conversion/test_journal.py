"""Whatever became of a journal, the same command ends as if nothing had happened, or says why not."""

from pathlib import Path

import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from precache.errors import DatasetError
from precache.pictures.kinds import made_by
from tests.conftest import small_recipe
from tests.precache.destinations import contents, interrupt


@pytest.mark.parametrize("damage", ["zeros", "cut off", "first line", "third line"])
def test_what_is_damaged_is_converted_again_and_that_is_said(
    damage: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(raw_tree, tmp_path / "out")
    journal = tmp_path / "out" / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)[:-1]  # the last shard is not in it
    content = b"".join(lines)
    damaged = {
        "zeros": bytes(100),
        "cut off": content[:30],
        "first line": content.replace(b'"seed": 0', b'"seed": 1', 1),
        "third line": b"".join([*lines[:2], lines[2].replace(b'"rejected": []', b'"rejected": [ ]')]),
    }
    journal.write_bytes(damaged[damage])
    done = convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert done.converted == (70 - 12 if damage == "third line" else 70)
    assert "damaged" in caplog.text
    assert contents(tmp_path / "out") == contents(converted["shards"])
    journal.write_text("Dear diary\n")  # in a finished dataset it is nobody's
    assert convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0).converted == 0
    assert journal.read_text() == "Dear diary\n"


def test_what_other_software_began_is_not_gone_on_with(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(raw_tree, tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr("precache.conversion.convert.made_by", lambda: {**made_by(), "pillow": "99"})
    with pytest.raises(DatasetError, match=r"out: .*pillow .*, here 99\).*--overwrite"):
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert contents(tmp_path / "out") == before
