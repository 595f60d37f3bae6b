"""Converting on first use: `precache=` of `loaders.build` and `loaders.ImageDataset`."""

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
import precache
from loaders import first_use
from precache import Recipe, SettingError
from precache.dataset.unfinished import CONVERSION_NAME
from precache.errors import DatasetError, SourceError
from precache.storage import locks
from tests.building import build_loader
from tests.command import ROOT, run_here
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import ids_of
from tests.precache.destinations import contents

RECIPE = small_recipe("shards")
SETTINGS = {"batch_size": 16, "size": 32, "workers": 1}
INTERRUPTED = 77
"""Exit code of a rank that got Ctrl-C."""


@pytest.fixture(autouse=True)
def _without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in the test's own process, which is quicker: workers would import much."""
    monkeypatch.setattr(first_use, "convert", partial(precache.convert, workers=0))


@pytest.fixture
def tree(raw_tree: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(raw_tree, tmp_path / "tree"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shards"


def build(tree: Path, folder: Path, **settings: Any) -> loaders.Loader:
    return build_loader(tree, precache=folder, **{"recipe": RECIPE, **SETTINGS, **settings})


def are_equal(loader: loaders.Loader, expected: loaders.Loader) -> bool:
    for batch, expected_batch in zip(loader, expected, strict=True):
        if not all(map(torch.equal, batch, expected_batch)) or not torch.equal(batch.ids, expected_batch.ids):
            return False
    return True


def test_the_first_call_converts_and_later_ones_find_it(
    tree: Path, folder: Path, converted: dict[str, Path]
) -> None:
    for _ in range(2):
        with build(tree, folder) as loader, build_loader(folder, **SETTINGS) as expected:
            assert are_equal(loader, expected)
            assert repr(loader) == repr(expected)
        assert contents(folder) == contents(converted["shards"])
        for path in folder.iterdir():  # so that a file that is written again is seen
            os.utime(path, ns=(0, 7))
    assert {path.stat().st_mtime_ns for path in folder.iterdir()} == {7}


@pytest.mark.parametrize("kind", ["webdataset", "dali"])
def test_any_format_is_converted_to(kind: str, tree: Path, folder: Path, converted: dict[str, Path]) -> None:
    with pytest.raises(DatasetError, match="backend"):
        build(tree, folder, recipe=small_recipe(kind), backend="shards")
    assert not folder.exists()
    build(tree, folder, recipe=small_recipe(kind), backend="synthetic").close()
    assert contents(folder) == contents(converted[kind])


@pytest.mark.parametrize("form", ["shares", "recipe", "list"])
def test_splits_and_class_depth_are_those_of_the_conversion(
    form: str, tree: Path, folder: Path, tmp_path: Path
) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    tree.rename(deep / "all")
    shares, split_list = "train=0.7,val=0.3", tmp_path / "list.csv"
    paths = sorted(str(path.relative_to(deep)) for path in deep.glob("*/*/*.jpg"))
    split_list.write_text("".join(f"{path},{('train', 'val')[i % 2]}\n" for i, path in enumerate(paths)))
    settings: dict[str, dict[str, Any]] = {
        "shares": {"splits": shares},
        "recipe": {"recipe": small_recipe("shards", splits=shares)},
        "list": {"splits": split_list},
    }
    of_tree: dict[str, Any] = {"split": "val", "class_depth": 2, **SETTINGS}
    splits = split_list if form == "list" else shares
    with build_loader(deep, splits=splits, **of_tree) as from_tree:
        expected, classes = sorted(ids_of(from_tree)), from_tree.classes
    for _ in range(2):
        with build(deep, folder, **of_tree, **settings[form]) as loader:
            assert sorted(ids_of(loader)) == expected
            assert loader.classes == classes


def test_an_image_dataset_converts_on_first_use(tree: Path, folder: Path) -> None:
    for _ in range(2):
        dataset = loaders.ImageDataset(tree, decode="tensor", precache=folder, recipe=RECIPE)
        expected = loaders.ImageDataset(folder, decode="tensor")
        assert (dataset.root, dataset.samples) == (expected.root, expected.samples)
        assert all(torch.equal(dataset[row][0], expected[row][0]) for row in range(IMAGES))


def _run_rank(tree: Path, folder: Path, rank: int, ranks: int, kill_at: int, results: Any) -> None:
    """Build the loader of a rank, and send whether it converted, and the ids that it serves.

    Args:
        kill_at: signal that the process gets in the middle of its conversion; 0: none.
    """
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    published = []

    def convert(*args: Any, on_progress: Any, **settings: Any) -> None:
        def report(done: int, total: int) -> None:
            if done > 40 and kill_at:
                os.kill(os.getpid(), kill_at)
            on_progress(done, total)

        published.append(precache.convert(*args, on_progress=report, workers=0, **settings).published)

    first_use.convert = convert  # type: ignore[assignment]
    try:
        with build(tree, folder, rank=rank, world_size=ranks) as loader:
            ids = [i for batch in loader for i in batch.ids[~batch.padding].tolist()]
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    results.send((published, ids))


@pytest.fixture(scope="module")
def _preloaded() -> Iterator[None]:
    """Fork ranks from a process that has imported torch, so that they start quickly."""
    multiprocessing.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def start(tree: Path, folder: Path, rank: int = 0, ranks: int = 1, kill_at: int = 0) -> tuple[Any, Any]:
    """Start a rank; return its process, and the end of the pipe of its results."""
    context = multiprocessing.get_context("forkserver")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_rank, args=(tree, folder, rank, ranks, kill_at, sender))
    process.start()
    return process, results


@pytest.mark.usefixtures("_preloaded")
def test_one_of_several_ranks_converts_and_all_serve_their_parts(
    tree: Path, folder: Path, converted: dict[str, Path]
) -> None:
    started = [start(tree, folder, rank, 3) for rank in range(3)]
    results = [receiver.recv() for _, receiver in started]
    assert sorted(published for published, _ in results) == [[False], [False], [True]]
    assert sorted(i for _, ids in results for i in ids) == list(range(IMAGES))
    assert contents(folder) == contents(converted["shards"])


@pytest.mark.usefixtures("_preloaded")
@pytest.mark.parametrize(
    ("kill_at", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, INTERRUPTED)]
)
def test_an_interrupted_conversion_is_gone_on_from(
    kill_at: int, code: int, tree: Path, folder: Path, converted: dict[str, Path]
) -> None:
    process, _ = start(tree, folder, kill_at=kill_at)
    process.join()
    assert process.exitcode == code
    assert (folder / CONVERSION_NAME).exists()
    with build(tree, folder) as loader:
        assert len(ids_of(loader)) == IMAGES
    assert contents(folder) == contents(converted["shards"])


@pytest.fixture
def holder(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Process that holds the folder's lock."""
    code = (
        "import sys, time; from pathlib import Path; from precache.storage.locks import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_waiting_process_takes_over_from_one_that_died(
    holder: "subprocess.Popen[bytes]",
    tree: Path,
    folder: Path,
    converted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(locks, "_WAIT_S", 0.1)
    monkeypatch.setattr(first_use, "_REMIND_S", 0.5)
    threading.Timer(2, holder.kill).start()
    build(tree, folder).close()
    assert contents(folder) == contents(converted["shards"])
    waits = [message for message in caplog.messages if message.startswith(f"waiting for {folder}, ")]
    assert 2 <= len(waits) <= 5


def write_all_again(tree: Path) -> None:
    for path in tree.glob("*/*"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace_a_picture(tree: Path) -> None:
    """Replace one picture by another one of the same size in bytes."""
    small, large = sorted(tree.glob("*/*.jpg"), key=lambda path: path.stat().st_size)[:2]
    large.write_bytes(small.read_bytes().ljust(large.stat().st_size, b"\0"))


def last_class(tree: Path) -> Path:
    return sorted(path for path in tree.iterdir() if path.is_dir())[-1]


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "copied": (write_all_again, ""),
    "replaced": (replace_a_picture, "1 source picture changed"),
    "longer": (lambda tree: sorted(tree.glob("*/*.jpg"))[3].open("ab").write(b"\0"), "1 written again"),
    "removed": (lambda tree: sorted(tree.glob("*/*.jpg"))[3].unlink(), "1 gone"),
    "added": (lambda tree: shutil.copy(next(tree.glob("*/*.jpg")), last_class(tree) / "zz.jpg"), "1 new"),
}
"""Changes of a tree after it was converted, and how the error names them; empty: there is none."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tree_is_refused_with_the_command_that_converts_it(
    change: str, tree: Path, folder: Path
) -> None:
    change_tree, mention = CHANGES[change]
    precache.convert(tree, folder, RECIPE, workers=0)
    change_tree(tree)
    if mention:
        with pytest.raises(DatasetError, match=mention) as caught:
            build(tree, folder)
        assert Path(caught.value.path) == folder
        with pytest.raises(DatasetError, match=mention):
            loaders.ImageDataset(tree, precache=folder, recipe=RECIPE)
        command = caught.value.remedy.partition("run: ")[2].partition(";")[0]
        assert run_here(*shlex.split(command), "--workers", 0, cwd=tree.parent).returncode == 0
    with build(tree, folder) as loader, build_loader(folder, **SETTINGS) as expected:
        assert are_equal(loader, expected)


def test_pictures_that_are_rejected_are_accepted_once_they_were(tree: Path, folder: Path) -> None:
    for path in sorted(tree.glob("*/*.jpg"))[:3]:
        path.write_bytes(b"no picture")
    with pytest.raises(DatasetError, match="precache convert"):
        build(tree, folder)
    precache.convert(tree, folder, RECIPE, workers=0, max_rejects=1.0)
    with build(tree, folder) as loader:
        assert len(ids_of(loader)) == IMAGES - 3


def test_what_cannot_be_converted_on_first_use_is_refused(
    tree: Path, folder: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    refused: list[tuple[Any, Any, type[precache.PrecacheError]]] = [
        ([tree, tree], folder, SettingError),
        ("s3://bucket/shards", folder, SettingError),
        (converted["shards"], folder, SettingError),
        (tree, "s3://bucket/shards", SettingError),
        (None, folder, SettingError),
        (tmp_path / "nowhere", folder, SourceError),
        (tree, converted["dali"], DatasetError),
        (tree, tree, SettingError),
    ]
    for path, place, error in refused:
        for function in (build, lambda root, place: loaders.ImageDataset(root, precache=place)):
            with pytest.raises(error) as caught:
                function(path, place)
            assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(SettingError, match="loader"):
        loaders.ImageDataset(tree, loader=str, precache=folder)
    with pytest.raises(SettingError, match="precache"):
        loaders.build(tree, recipe=Recipe(format="shards"))
    assert not folder.exists()
