"""Random histories of a folder: conversions, also `--without` others, stops and overwrites lose nothing.

After any history a command ends with the bytes of an undisturbed conversion, or refuses and changes nothing.
At each moment DST is the dataset before the command or the one after it, and the user's files, in it and
beside it, have not changed. A command that succeeds leaves nothing behind.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from precache import PrecacheError, Recipe, convert, open_dataset, verify
from precache.dataset.manifest import MANIFEST_NAME
from precache.storage.urls import Location
from tests.faults.trees import make_tree
from tests.precache.destinations import THESIS, contents
from tests.precache.sources.tars import put
from tests.stopping import WAYS, KilledError, Stop, stopping

Contents = dict[str, bytes]

RECIPES = {
    name: Recipe(format=name, size=size, fit="crop", shard_bytes=3 * size**2 * 3, splits="train=0.7,val=0.3")
    for name, size in (("shards", 16), ("webdataset", 24))
}
VERSIONS = 4
MOMENTS = 90
"""Number of file operations after which a command may be stopped; about as many as it makes."""
INSIDE = (
    "thesis.txt", "mine-12345.jpg", "mine-00000.safetensors", "train-99999.safetensors",
    ".x.0123456789abcdef.partial", "folder/thesis.txt", "conversion.json.bak",
    "train-99999.json",
)  # fmt: skip
BESIDE = (
    "out.old/thesis.txt", "out.new/dataset.json", ".out.precache-overwrite.old/thesis.txt",
    "out.precache-overwrite/new/thesis.txt", "out.lock",
)  # fmt: skip
_trees: list[Path] = []
_first_datasets: list[str] = []
"""Datasets whose pictures a command `without` leaves out: one of the first version of the tree."""


@pytest.fixture(scope="module", autouse=True)
def _versions_of_a_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make versions of a tree, each of which adds, removes, changes and damages pictures of the last."""
    root = tmp_path_factory.mktemp("versions")
    make_tree(root / "0")
    for number in range(1, VERSIONS):
        tree = Path(shutil.copytree(root / f"{number - 1}", root / f"{number}"))
        pictures = sorted(tree.glob("*/*.jpg"))
        pictures[1].unlink()
        shutil.copyfile(pictures[-1], pictures[2])
        (tree / "000.class" / f"broken-{number}.jpg").write_bytes(b"\xff\xd8\xff no JPEG")
        shutil.copytree(tree / "002.class", tree / f"00{number + 2}.new")
    _trees[:] = [root / f"{number}" for number in range(VERSIONS)]
    _first_datasets[:] = [str(root / "held")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(root))  # apart from the staging folders of other processes
        patch.setattr(os, "fsync", lambda descriptor: None)
        convert(_trees[0], root / "held", RECIPES["shards"], workers=0)
        yield
    afresh.cache_clear()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A finished dataset of a version of the tree.

    Attributes:
        kind: `convert`, or `without` if it lacks what other datasets hold.
        files: contents of all its files.
        needed: names of the files that readers need.
    """

    kind: str
    recipe: str
    version: int
    files: Contents
    needed: frozenset[str]

    def is_in(self, folder: Contents) -> bool:
        return all(folder.get(name) == self.files[name] for name in self.needed)


def execute(kind: str, recipe: str, version: int, place: Location) -> None:
    convert(
        _trees[version],
        place,
        RECIPES[recipe],
        workers=0,
        max_rejects=0.5,
        overwrite=kind == "overwrite",
        without=_first_datasets if kind == "without" else [],
    )


@cache
def afresh(kind: str, recipe: str, version: int) -> Dataset:
    """Return the dataset that a command makes in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        execute(kind, recipe, version, out)
        assert verify(out) == []
        needed = {MANIFEST_NAME, *(file.name for file in open_dataset(out).manifest.files)}
        return Dataset(kind, recipe, version, contents(out), frozenset(needed))


class Histories(RuleBasedStateMachine):
    """Histories of a folder.

    Attributes:
        data: folder in which DST, `out`, is; files are named by their paths below it.
        mine: the user's files.
        bases: finished datasets that may be in DST, None for no dataset; several only during a swap.
        begun: kind, recipe and version of conversions that may be unfinished in DST.
        stopped: kinds of commands whose leftovers may be in DST or beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        self.data = self.folder / "data"
        self.place = self.data / "out"
        self.version = 0
        self.mine: Contents = {}
        self.bases: list[Dataset | None] = [None]
        self.begun: set[tuple[str, str, int]] = set()
        self.stopped: set[str] = set()

    # Steps of a history.

    @initialize()
    def belongings_beside(self) -> None:
        for name in BESIDE:
            self.put(name)

    @rule()
    def source_changes(self) -> None:
        self.version = min(self.version + 1, VERSIONS - 1)

    @rule(name=st.sampled_from(INSIDE))
    def user_puts_a_file_into_it(self, name: str) -> None:
        self.put(f"out/{name}")

    @rule()
    def user_takes_files_out_of_it(self) -> None:
        for name in self.inside():
            del self.mine[name]
            (self.data / name).unlink()
            with suppress(OSError):  # not empty
                os.removedirs((self.data / name).parent)

    @rule(
        kind=st.sampled_from(("convert", "overwrite", "without")),
        recipe=st.sampled_from(("shards", "shards", "webdataset")),
        stops=st.lists(st.tuples(st.integers(0, 999), st.sampled_from(("kill", *WAYS))), max_size=3),
        is_run_again=st.sampled_from((True, True, False)),
    )
    def command(self, kind: str, recipe: str, stops: list[tuple[int, str]], is_run_again: bool) -> None:
        """Run a command, stopped a few times; then, perhaps, to its end."""
        for number, way in stops:
            # hypothesis prefers small numbers: multiplied by a prime, they are late as often as early
            moment = number * 7919 % 1000 * MOMENTS // 1000 + 1
            self.attempt(kind, recipe, Stop(moment, way))
        if is_run_again or not stops:
            self.attempt(kind, recipe, Stop())

    # Properties of every state.

    @invariant()
    def nothing_of_the_users_is_lost(self) -> None:
        assert self.mine.items() <= contents(self.data).items()

    def attempt(self, kind: str, recipe: str, stop: Stop) -> None:
        """Run a command that `stop` may stop, and check what it leaves."""
        before, times = self.bases, self.modification_times()
        has_waiting = self.has_dataset_beside("new")  # it has the same files, if it is of the same source
        is_foreign = before == [None] and not self.begun and bool(self.inside())
        results = [self.result(kind, recipe, base) for base in before]
        error: BaseException | None = None
        try:
            with stopping(self.folder, stop):
                execute(kind, recipe, self.version, self.place)
        except (KilledError, KeyboardInterrupt, PrecacheError) as caught:
            error = caught
        self.nothing_of_the_users_is_lost()
        self.find_bases([*before, *filter(None, results)])
        if stop.where:  # the next run removes what an error of the disk has left
            self.stopped.add(kind)
            assert error is not None or stop.way == "error"
        this = ("without" if kind == "without" else "convert", recipe, self.version)
        if error is None:
            assert not is_foreign
            assert len(self.bases) == 1
            assert self.bases[0] in results
            self.begun.clear()
            if self.bases == before and kind != "overwrite" and not has_waiting:
                assert self.modification_times() == times, "was written again"
            if not stop.where and (
                before == [None] or kind == "overwrite" or "overwrite" not in self.stopped
            ):
                self.check_nothing_else()
        elif stop.where:
            self.begun |= {this} if None in before else set()
        else:
            others = self.begun - {this} if None in before and kind != "overwrite" else set()
            assert None in results or others or self.inside(), error
            assert "\n" not in str(error)

    def find_bases(self, possible: list[Dataset | None]) -> None:
        """Find out which of the `possible` datasets is in DST, and set `bases`."""
        files = contents(self.place)
        whole = [base for base in dict.fromkeys(possible) if base is not None and base.is_in(files)]
        assert len(whole) == (MANIFEST_NAME in files), sorted(files)
        if not whole and None not in possible:
            assert self.has_dataset_beside(), sorted(files)
            whole = possible
        elif whole and self.has_dataset_beside("new"):  # the next command will swap it in
            whole += [base for base in possible if base is not None and base not in whole]
        self.bases = [*whole] or [None]

    def check_nothing_else(self) -> None:
        """Check that DST holds the dataset and the user's files, and that nothing is beside it."""
        self.stopped.clear()
        (base,) = self.bases
        dataset = {f"out/{name}": content for name, content in base.files.items()} if base else {}
        assert contents(self.data) == {**dataset, **self.mine}
        folders = {path for path in self.data.rglob("*") if path.is_dir()}
        assert {path for path in folders if not any(path.iterdir())} <= {self.place}

    def teardown(self) -> None:
        try:
            self.user_takes_files_out_of_it()
            self.attempt("overwrite", "shards", Stop())
        finally:
            shutil.rmtree(self.folder)

    def inside(self) -> list[str]:
        """The user's files in DST."""
        return [name for name in self.mine if name.startswith("out/")]

    def put(self, name: str) -> None:
        self.mine[name] = THESIS
        put(self.data, {name: THESIS})

    def has_dataset_beside(self, kind: str = "*") -> bool:
        """Whether the old or the new dataset of a swap is beside DST."""
        return any(self.data.glob(f".out.precache-overwrite/{kind}/{MANIFEST_NAME}"))

    def result(self, kind: str, recipe: str, base: Dataset | None) -> Dataset | None:
        """Return the dataset in DST after the command, if `base` was there; None if it refuses."""
        if kind == "without" and self.version == 0:  # the other dataset holds all pictures
            return None
        if kind == "overwrite":
            return afresh("convert", recipe, self.version)
        if base is None:
            return afresh(kind, recipe, self.version)
        return base if (base.kind, base.recipe, base.version) == (kind, recipe, self.version) else None

    def modification_times(self) -> dict[str, int]:
        """Return the modification time of each file that readers of the dataset need."""
        names = self.bases[0].needed if self.bases[0] else ()
        paths = [self.place / name for name in names]
        return {path.name: path.stat().st_mtime_ns for path in paths if path.exists()}


LONG = pytest.mark.slow, pytest.mark.timeout(1800)


@pytest.mark.parametrize(("examples", "steps"), [(25, 8), pytest.param(500, 20, marks=LONG)])
def test_no_history_of_a_folder_loses_anything(examples: int, steps: int) -> None:
    options = settings(
        max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
    )  # fmt: skip
    run_state_machine_as_test(Histories, settings=options)


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize(
    "kind",
    ["convert", "without", "overwrite", "overwrite what was stopped"],
)
def test_a_conversion_stopped_at_any_change_is_completed(kind: str, step: int) -> None:
    """The command is stopped at every `step`th change of a file, and then run again."""
    for moment in range(min(7, step), 1000, step):
        machine = Histories()
        machine.belongings_beside()
        command, recipe = kind.split(maxsplit=1)[0], "shards"
        if command == "overwrite":
            machine.attempt("convert", "shards", Stop(40 if "what was stopped" in kind else 0))
        if command != "convert":
            machine.source_changes()
        if "what was stopped" in kind:
            recipe = "webdataset"
            for name in INSIDE:
                machine.user_puts_a_file_into_it(name)
        machine.attempt(command, recipe, stop := Stop(moment, WAYS[moment % len(WAYS)]))
        machine.attempt(command, recipe, Stop())
        machine.teardown()
        if not stop.where:
            break
    assert 40 < moment < 200
