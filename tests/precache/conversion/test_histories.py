"""Whatever is converted, stopped anywhere, run again, updated, overwritten and cleaned, nothing is lost.

After any history a command ends with the bytes of an undisturbed conversion, or refuses and changes nothing.
At each moment DST is the dataset that it was or the one that it becomes, and files of the user's, in it and
beside it, are as they were. What ends well leaves nothing behind.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from precache import PrecacheError, Recipe, convert, open_dataset, verify
from precache.conversion.clean import leftovers
from precache.conversion.url import working_folder
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.storage.locks import lock_path
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url
from tests.faults.worlds import make_tree
from tests.precache.destinations import THESIS, contents
from tests.stopping import WAYS, KilledError, Stop, stopping

Contents = dict[str, bytes]

RECIPES = {
    name: Recipe(format=name, size=size, fit="crop", shard_bytes=3 * size**2 * 3, splits="train=0.7,val=0.3")
    for name, size in (("shards", 16), ("webdataset", 24))
}
VERSIONS = 4
_INSIDE = (
    "thesis.txt", "mine-12345.jpg", "mine-00000.safetensors", "train-99999.safetensors", ".x.partial",
    "folder/thesis.txt", "journal.jsonl.bak",
)  # fmt: skip
_BESIDE = (
    "out.old/thesis.txt",
    "out.new/dataset.json",
    ".out.0123456789abcdef.precache/thesis.txt",
    "out.lock",
)
_trees: list[Path] = []
_undisturbed: dict[Any, Contents | None] = {}
_of: dict[str, tuple[str, int]] = {}
"""Which recipe and version of the tree a dataset is of, by the digest of its bytes."""
_names: dict[str, frozenset[str]] = {}
"""Of the files that readers of a dataset need, by the same digest."""
_changes: dict[Any, int] = {}
"""How many changes an undisturbed run makes."""


@pytest.fixture(scope="module", autouse=True)
def _versions_of_a_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each adds, removes, changes and spoils pictures of the one before."""
    root = tmp_path_factory.mktemp("versions")
    make_tree(root / "0")
    for number in range(1, VERSIONS):
        tree = Path(shutil.copytree(root / f"{number - 1}", root / f"{number}"))
        pictures = sorted(tree.glob("*/*.jpg"))
        pictures[1].unlink()
        shutil.copyfile(pictures[-1], pictures[2])
        (tree / "000.class" / f"broken-{number}.jpg").write_bytes(b"\xff\xd8\xff no JPEG")
        shutil.copytree(tree / "002.class", tree / f"00{number + 2}.new")
    fsync, os.fsync = os.fsync, lambda descriptor: None  # what is killed loses no page of the system's cache
    folder, tempfile.tempdir = tempfile.tempdir, str(root)  # staging folders of other processes lie elsewhere
    _trees[:] = [root / f"{number}" for number in range(VERSIONS)]
    yield
    os.fsync, tempfile.tempdir = fsync, folder
    _undisturbed.clear()
    _of.clear()
    _names.clear()
    _changes.clear()


def digest_of(files: Contents | None) -> str:
    return hashlib.sha256(repr(sorted((files or {}).items())).encode()).hexdigest() if files else ""


def execute(kind: str, recipe: str, version: int, place: Location) -> None:
    how = {} if kind == "convert" else {kind: True}
    convert(_trees[version], place, RECIPES[recipe], workers=0, max_rejects=0.5, **how)


def undisturbed(kind: str, recipe: str, version: int, base: Contents | None) -> Contents | None:
    """What DST holds after the command, if it held the dataset `base`; None: it refuses."""
    key = kind, recipe, version, digest_of(base)
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out")
            for name, content in (base or {}).items():
                out.mkdir(exist_ok=True)
                (out / name).write_bytes(content)
            try:
                with stopping(out, Stop()) as count:
                    execute(kind, recipe, version, out)
                found: Contents | None = contents(out)
                named = frozenset(file.name for file in open_dataset(out).manifest.files)
            except PrecacheError:
                assert contents(out) == base
                found = None
        _changes[key] = count.count
        was = _of.get(digest_of(base))
        if found is not None:
            _of[digest_of(found)] = recipe, version
            _names[digest_of(found)] = named | {MANIFEST_NAME}
        _undisturbed[key] = found
        if base is None or kind == "overwrite":
            assert found is not None
            assert found == undisturbed("convert", recipe, version, None)
        elif kind == "convert":
            assert found == (base if was == (recipe, version) else None)
        else:
            assert (found is None) == (was is None or was[0] != recipe)
    return _undisturbed[key]


class Histories(RuleBasedStateMachine):
    """Of a folder.

    Attributes:
        mine: the user's files.
        bases: the finished datasets that may be in DST; None: there is none. One, but in the midst of a swap.
        begun: recipe and version of conversions that may be unfinished in DST.
        stopped: kinds of commands whose leftovers may lie in DST or beside it.
    """

    counts: ClassVar[str] = "changes"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        self.place: Location = self.folder / "data" / "out"
        self.version = 0
        self.mine: dict[Any, bytes] = {}
        self.bases: list[Contents | None] = [None]
        self.begun: set[tuple[str, int]] = set()
        self.stopped: set[str] = set()

    @initialize()
    def belongings_beside(self) -> None:
        for name in _BESIDE:
            self.put_file(self.place.parent / name)

    # What can be done.

    @rule()
    def source_changes(self) -> None:
        self.version = min(self.version + 1, VERSIONS - 1)

    @rule(name=st.sampled_from(_INSIDE))
    def user_puts_a_file_into_it(self, name: str) -> None:
        self.put_file(self.place / name)

    @rule()
    def user_takes_files_out_of_it(self) -> None:
        for name in self.inside():
            self.remove_file(self.place / name)

    @rule(
        kind=st.sampled_from(("convert", "convert", "overwrite", "overwrite", "update", "update")),
        recipe=st.sampled_from(("shards", "shards", "webdataset")),
        stops=st.lists(st.tuples(st.integers(0, 999), st.sampled_from(("kill", *WAYS))), max_size=3),
        is_run_again=st.sampled_from((True, True, False)),
    )
    def command(self, kind: str, recipe: str, stops: list[tuple[int, str]], is_run_again: bool) -> None:
        """Run it, stopped a few times; then, perhaps, to its end."""
        for drawn, way in stops:
            moment = drawn * 7919 % 1000 * self.moments(kind, recipe) // 1000 + 1  # as often late as early
            self.attempt(kind, recipe, Stop(moment, way, self.counts))
        if is_run_again or not stops:
            self.attempt(kind, recipe, Stop())

    @rule(moment=st.one_of(st.just(0), st.integers(1, 20)))
    def clean(self, moment: int) -> None:
        try:
            with (
                stopping(self.folder, stop := Stop(moment, counts=self.counts)),
                leftovers(self.place) as found,
            ):
                found.remove()
        except KilledError:
            return
        self.look(self.bases)
        if not stop.where and len(self.bases) == 1 and not self.waits_to_be_swapped_in():
            self.begun.clear()
            self.stopped.clear()
            self.check_nothing_else(as_before=True)

    # What holds.

    @invariant()
    def nothing_of_the_users_is_lost(self) -> None:
        assert {path: self.read_file(path) for path in self.mine} == self.mine

    def attempt(self, kind: str, recipe: str, stop: Stop) -> None:
        before, written = self.bases, self.written()
        is_somebody_elses = before == [None] and not self.begun and bool(self.inside())
        expected = [self.undisturbed(kind, recipe, base) for base in before]
        error: BaseException | None = None
        try:
            with stopping(self.folder, stop):
                execute(kind, recipe, self.version, self.place)
        except (KilledError, KeyboardInterrupt, PrecacheError) as caught:
            error = caught
        self.nothing_of_the_users_is_lost()
        self.look([*before, *(one for one in expected if one is not None)])
        if stop.where:
            assert error is not None or stop.way == "error"
        if stop.where:  # what an error of the disk left, the next run removes
            self.stopped.add(kind)
        assert error is not None or not is_somebody_elses
        if error is None:
            self.ended_well(kind, before, expected, is_whole=not stop.where)
            if self.bases == before and kind != "overwrite":
                assert self.written() == written, "was written again"
        elif stop.where:
            self.begun |= {(recipe, self.version)} if None in before else set()
        else:
            others = (
                self.begun - {(recipe, self.version)} if None in before and kind != "overwrite" else set()
            )
            assert None in expected or others or self.inside(), error
            assert "\n" not in str(error)

    def ended_well(
        self, kind: str, before: list[Contents | None], expected: list[Contents | None], is_whole: bool
    ) -> None:
        assert any(self.bases == [one] for one in expected)
        self.begun.clear()
        if not is_whole:
            return
        if before == [None] or kind == "overwrite":
            self.stopped.clear()
        if "overwrite" in self.stopped or ("update" in self.stopped and kind == "convert"):
            return  # what was stopped goes on when it is run again, or with `clean`
        self.stopped.clear()
        self.check_nothing_else(as_before=self.bases == before)

    def look(self, bases: list[Contents | None]) -> None:
        """Find out which of these datasets, all that may be there, is there."""
        found = self.contents()
        self.bases = [base for number, base in enumerate(bases) if base not in bases[:number]]
        if MANIFEST_NAME in found:
            self.bases = [base for base in self.bases if base is not None and is_in(base, found)]
            assert len(self.bases) == 1, sorted(found)
        elif None in self.bases:
            self.bases = [None]
        else:
            assert self.waits_to_be_swapped_in(), sorted(found)

    def check_nothing_else(self, as_before: bool) -> None:
        """In DST are the dataset and the user's files, and nothing is beside it.

        A dataset that is as before may lack what an update that was stopped has removed, and no reader needs.
        """
        found, expected = self.contents(), {**(self.bases[0] or {}), **self.inside()}
        if as_before:
            assert found.keys() <= expected.keys()
            expected = {name: expected[name] for name in found} | {REJECTED_NAME: found.get(REJECTED_NAME)}
            found |= {REJECTED_NAME: found.get(REJECTED_NAME)}
        assert found == expected
        self.check_nothing_beside()

    def teardown(self) -> None:
        try:
            if _trees:
                self.user_takes_files_out_of_it()
                self.attempt_at_last()
                with leftovers(self.place) as found:
                    assert not found
        finally:
            shutil.rmtree(self.folder)

    # Of a folder; of a URL, see below.

    def attempt_at_last(self) -> None:
        self.attempt("overwrite", "shards", Stop())
        assert self.bases == [undisturbed("convert", "shards", self.version, None)]
        assert verify(self.place) == []

    def undisturbed(self, kind: str, recipe: str, base: Contents | None) -> Contents | None:
        return undisturbed(kind, recipe, self.version, base)

    def moments(self, kind: str, recipe: str) -> int:
        """At which it may be stopped, about."""
        undisturbed(kind, recipe, self.version, self.bases[0])
        return _changes[kind, recipe, self.version, digest_of(self.bases[0])]

    def contents(self) -> Contents:
        return contents(self.place)

    def written(self) -> dict[str, Any]:
        """When each file of the dataset was."""
        names = _names.get(digest_of(self.bases[0]), ())
        return {
            name: (self.place / name).stat().st_mtime_ns for name in names if (self.place / name).exists()
        }

    def inside(self) -> Contents:
        """The user's files in DST."""
        return {
            str(p.relative_to(self.place)): c for p, c in self.mine.items() if p.is_relative_to(self.place)
        }

    def put_file(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(THESIS)
        self.mine[path] = THESIS

    def read_file(self, path: Path) -> bytes:
        return path.read_bytes()

    def remove_file(self, path: Path) -> None:
        del self.mine[path]
        path.unlink()
        for folder in path.parents:
            if folder == self.place.parent or any(folder.iterdir()):
                break
            folder.rmdir()

    def waits_to_be_swapped_in(self) -> bool:
        """Whether one of the datasets that may be there lies beside DST, whole."""
        beside = [contents(path) for path in self.place.parent.glob(".out.*.precache")]
        return any(is_in(base, found) for base in self.bases if base for found in beside) or any(
            MANIFEST_NAME in found for found in beside
        )

    def check_nothing_beside(self) -> None:
        mine = {path.relative_to(self.place.parent).parts[0] for path in self.mine}
        assert {path.name for path in self.place.parent.iterdir()} - {"out"} == mine - {"out"}


def is_in(base: Contents, found: Contents) -> bool:
    """Whether all that readers of the dataset `base` need is there."""
    return all(found.get(name) == base[name] for name in _names[digest_of(base)])


class HistoriesAtUrl(Histories):
    """Of a URL: a finished dataset stays as it is, and this machine keeps the journal."""

    counts = "requests"
    bucket: ClassVar[Url]
    number: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        HistoriesAtUrl.number += 1
        self.place = self.bucket / f"{self.number}/out"
        self.store = ObjectStore(self.bucket / f"{self.number}")
        self.environment = mock.patch.dict(os.environ, PRECACHE_CACHE_DIR=str(self.folder / "cache"))
        self.environment.start()

    def attempt_at_last(self) -> None:
        try:
            self.clean(0)
            assert self.contents() == (self.bases[0] or {})
            if self.bases == [None]:
                self.attempt("convert", "shards", Stop(25, counts=self.counts))
                self.clean(0)
                self.user_puts_a_file_into_it("thesis.txt")
                self.attempt("overwrite", "shards", Stop())
                self.clean(0)
        finally:
            self.environment.stop()

    def undisturbed(self, kind: str, recipe: str, base: Contents | None) -> Contents | None:
        if base is None:
            return undisturbed("convert", recipe, self.version, None)
        return base if kind == "convert" and _of[digest_of(base)] == (recipe, self.version) else None

    def moments(self, kind: str, recipe: str) -> int:
        return 44 if self.bases == [None] else 8

    def contents(self) -> Contents:
        names = [info.name for info in self.store.list() if info.name.startswith("out/")]
        return {name.removeprefix("out/"): self.store.get(name) for name in names}

    def written(self) -> dict[str, Any]:
        return {info.name: info.modified_ns for info in self.store.list() if info.name.startswith("out/")}

    def inside(self) -> Contents:
        start = f"{self.place}/"
        return {str(p).removeprefix(start): c for p, c in self.mine.items() if str(p).startswith(start)}

    def put_file(self, path: Any) -> None:
        ObjectStore(path.parent).put(path.name, THESIS)
        self.mine[path] = THESIS

    def read_file(self, path: Any) -> bytes:
        return ObjectStore(path.parent).get(path.name)

    def remove_file(self, path: Any) -> None:
        ObjectStore(path.parent).delete([path.name])
        del self.mine[path]

    def waits_to_be_swapped_in(self) -> bool:
        return False

    def check_nothing_beside(self) -> None:
        here = working_folder(self.place)
        assert not here.exists()
        assert not lock_path(here).exists()


QUICK = settings(
    max_examples=25, stateful_step_count=8, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
)  # fmt: skip


def test_no_history_of_a_folder_loses_anything() -> None:
    run_state_machine_as_test(Histories, settings=QUICK)


def test_no_history_of_a_url_loses_anything(bucket: Url) -> None:
    HistoriesAtUrl.bucket = bucket
    run_state_machine_as_test(HistoriesAtUrl, settings=settings(QUICK, max_examples=5))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_long_history_of_a_folder_loses_anything() -> None:
    run_state_machine_as_test(Histories, settings=settings(QUICK, max_examples=500, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_long_history_of_a_url_loses_anything(bucket: Url) -> None:
    HistoriesAtUrl.bucket = bucket
    run_state_machine_as_test(
        HistoriesAtUrl, settings=settings(QUICK, max_examples=150, stateful_step_count=12)
    )


SITUATIONS = {
    "fresh": ([], ("convert", "shards"), False),
    "overwrite": ([("convert", "shards", 0), ("update", "shards", 0)], ("overwrite", "webdataset"), False),
    "discard": ([("convert", "shards", 40)], ("overwrite", "webdataset"), True),
    "update": ([("convert", "shards", 0), ("update", "shards", 0)], ("update", "shards"), True),
}
"""What was run before, and at which change it was stopped (0: not); the command that is stopped; and whether
files of the user's lie in DST, which stand in the way of the others."""


def stop_at_changes(situation: str, first: int, step: int) -> int:
    """Stop the command at each of these changes that it makes, then run it again; the last of them."""
    before, command, has_files = SITUATIONS[situation]
    for moment in range(first, 1000, step):
        machine = Histories()
        machine.belongings_beside()
        for kind, recipe, stopped_at in before:
            machine.attempt(kind, recipe, Stop(stopped_at))
            machine.source_changes()
        for name in _INSIDE if has_files else ():
            machine.user_puts_a_file_into_it(name)
        machine.attempt(*command, stop := Stop(moment, WAYS[moment % len(WAYS)]))
        machine.attempt(*command, Stop())
        machine.teardown()
        if not stop.where:
            return moment - step
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("situation", "first"), [*zip(SITUATIONS, (1, 3, 5, 7), strict=True)])
def test_stopped_at_a_change_a_conversion_is_completed(situation: str, first: int) -> None:
    assert stop_at_changes(situation, first, 11) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_stopped_at_each_change_a_conversion_is_completed(situation: str) -> None:
    assert stop_at_changes(situation, 1, 1) > 40
