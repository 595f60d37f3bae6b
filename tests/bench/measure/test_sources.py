from pathlib import Path

import pytest

from bench.measure import sources
from precache import SourceError, SourceOptions
from precache.sources.base import Scan
from tests.command import run
from tests.conftest import small_recipe


def test_every_source_of_the_same_pictures_gives_the_same_shards(raw_tree: Path, tmp_path: Path) -> None:
    trials, skipped = sources.compare_sources(
        raw_tree, small_recipe("shards"), names=sources.SOURCES, workers=0, repeats=1, scratch=tmp_path
    )
    assert {trial.name for trial in trials} | skipped.keys() == set(sources.SOURCES)
    assert [trial.name for trial in trials if not trial.same] == []
    assert not list(tmp_path.iterdir())


def test_other_pictures_are_seen(raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(scan: Scan, folder: Path) -> tuple[Path, SourceOptions]:
        path, options = sources.from_csv(scan, folder)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:1] + lines[:0:-1]))
        return path, options

    monkeypatch.setitem(sources.SOURCES, "csv", backwards)
    tree, other = sources.compare_sources(
        raw_tree, small_recipe("shards"), names=["csv"], workers=0, repeats=1, scratch=tmp_path
    )[0]
    assert (tree.same, other.same) == (True, False)


def test_it_prints_a_table_with_its_conditions(raw_tree: Path, tmp_path: Path) -> None:
    shown = run(
        "bench.measure.sources", raw_tree, "--size", 16, "--repeats", 1, "--source", "csv,jsonl", cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    for word in ("tree", "csv", "jsonl", "yes", "images/s"):
        assert word in words
    assert "files in memory" in " ".join(words)


def test_a_tree_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        sources.compare_sources(
            tmp_path / "no", small_recipe("shards"), names=[], workers=0, repeats=1, scratch=tmp_path
        )
