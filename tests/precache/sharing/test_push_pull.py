"""`push` and `pull`: what is copied, what is not, and what stands in the way; over a stand-in for S3."""

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError, StorageError
from precache.sharing.push_pull import pull, push
from precache.storage import temporary_path
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.cloud.storages import Seen, Storage
from tests.cloud.uploading import objects, upload
from tests.command import check_bad_input, interrupted, run_here
from tests.conftest import small_recipe
from tests.damage import flip_a_bit
from tests.precache.destinations import contents
from tests.precache.sources.archives import put


@pytest.fixture(scope="module")
def states(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dataset, `earlier` than an `update` of it; and `another` one, of fewer shards."""
    root = tmp_path_factory.mktemp("states")
    shutil.copytree(raw_tree, root / "tree")
    convert(raw_tree, root / "another", small_recipe("shards", shard_bytes=1 << 30), workers=0)
    convert(root / "tree", root / "update", small_recipe("shards"), workers=0)
    shutil.copytree(root / "update", root / "earlier")
    picture = next((root / "tree").rglob("*.jpg"))
    shutil.copy(picture, picture.with_name("new.jpg"))
    convert(root / "tree", root / "update", small_recipe("shards"), workers=0, update=True)
    return {path.name: path for path in root.iterdir() if path.is_dir() and path.name != "tree"}


def named(folder: Path) -> dict[str, bytes]:
    """The manifest and the files that it names: an update leaves those of the state before, too."""
    names = [MANIFEST_NAME, *(file.name for file in open_dataset(folder).manifest.files)]
    return {name: (folder / name).read_bytes() for name in names}


def names_of(states: dict[str, Path], before: str) -> list[str]:
    """Of files that `update` needs and `before` has not: the first and the last."""
    there = contents(states[before]) if before in states else {}
    names = sorted(set(contents(states["update"])) - set(there) - {MANIFEST_NAME})
    return [names[0], names[-1]]


@pytest.mark.parametrize("seed", range(2))
def test_a_push_that_stops_anywhere_leaves_a_whole_dataset_or_none(
    seed: int, states: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    """And the user's objects; the next push, of whichever dataset, goes on from there."""
    random = np.random.default_rng(seed)
    ObjectStore(bucket / "set").put("notes.txt", b"mine")
    if seed % 2:
        upload(states["another"], bucket / "set")  # as others copy one there
    whole = {path: named(path) for path in states.values()}
    for left in [*random.integers(0, 40, 3).tolist(), 1 << 30]:
        path = states[str(random.choice(sorted(states)))]
        last = len(storage.seen) + left
        storage.plan = lambda seen, last=last: "expired" if seen.number > last else None
        with suppress(StorageError) if left < 1 << 30 else nullcontext():
            push(path, bucket / "set", overwrite=True)
        storage.plan = lambda seen: None
        there = objects(bucket / "set")
        assert there["notes.txt"] == b"mine"
        if MANIFEST_NAME in there:
            files = next(files for files in whole.values() if files[MANIFEST_NAME] == there[MANIFEST_NAME])
            assert files.items() <= there.items()
    assert whole[path].items() <= there.items()


def test_what_is_pushed_and_pulled_is_the_same_folder_and_goes_there_once(
    states: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    """Also in the place of an object of the same size, which a push of another dataset has left."""
    folder, url, copy = states["update"], bucket / "set", tmp_path / "copy"
    for state in ("earlier", "update"):
        done = push(states[state], url)
        pull(url, copy)
        assert contents(copy) == contents(states[state])
    assert 0 < done.sent_files < done.files
    for again in (("push", folder, url), ("pull", url, copy)):
        said = run_here("precache", *again, cwd=tmp_path)
        assert "nothing to do" in said.stdout, said.stderr
    with pytest.raises(DatasetError, match="choose another URL, or pass --overwrite"):
        push(states["another"], url)
    name = next(states["another"].glob("train-*")).name
    ObjectStore(url).put(name, bytes((states["another"] / name).stat().st_size), crc32c="0badc0de")
    push(states["another"], url, overwrite=True)
    assert objects(url) == contents(states["another"])


# What is in the way.


@pytest.mark.parametrize(
    ("before", "overwrite"), [("nothing", True), ("earlier", False), ("no manifest of ours", True)]
)
def test_push_refuses_to_replace_objects_it_did_not_send(
    before: str, overwrite: bool, states: dict[str, Path], bucket: Url
) -> None:
    store = ObjectStore(bucket / "set")
    if before in states:
        push(states[before], bucket / "set")
    names = [MANIFEST_NAME] if before == "no manifest of ours" else names_of(states, before)
    for content in (b"", b"mine"):
        for name in names:
            store.put(name, content)
        there = objects(bucket / "set")
        with pytest.raises(DatasetError, match=f"^{bucket}/set.*{min(names)}.*choose another URL"):
            push(states["update"], bucket / "set", overwrite=overwrite)
        assert objects(bucket / "set") == there


def test_push_replaces_an_unfinished_conversion_only_with_overwrite(
    states: dict[str, Path], raw_tree: Path, bucket: Url
) -> None:
    """And the conversion is told of what has replaced it."""
    refused: list[dict[str, bytes]] = []

    def intrude(done: int, total: int) -> None:
        if done > 40 and not refused:
            refused.append(objects(bucket / "set"))
            with pytest.raises(DatasetError, match=r"train-00000.*; finish the conversion that wrote them"):
                push(states["another"], bucket / "set")
            assert objects(bucket / "set") == refused[0]
            push(states["another"], bucket / "set", overwrite=True)

    with pytest.raises(DatasetError, match="another process has finished a dataset there"):
        convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0, on_progress=intrude)
    assert refused[0]
    assert objects(bucket / "set").items() >= contents(states["another"]).items()


@pytest.mark.parametrize("before", ["begun", "earlier"])
def test_pull_refuses_to_replace_files_it_did_not_fetch(
    before: str, states: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    """And goes on where it was cut, or from an earlier state."""
    push(states["update"], bucket / "set")
    folder = tmp_path / "copy"
    if before == "earlier":
        shutil.copytree(states["earlier"], folder)
    else:
        storage.plan = lambda seen: "expired" if "/train-00003" in seen.path else None
        with pytest.raises(StorageError, match="credentials"):
            pull(bucket / "set", folder)
        storage.plan = lambda seen: None
        assert not (folder / MANIFEST_NAME).exists()
    there = named(states["update"]).keys() & contents(folder).keys() - {MANIFEST_NAME}
    assert there
    for name in names_of(states, before):
        if name not in there:
            (folder / name).write_text("mine")
            kept = contents(folder)
            with pytest.raises(DatasetError, match=rf"{folder}: .*\({name}\); move them elsewhere"):
                pull(bucket / "set", folder)
            assert contents(folder) == kept
            (folder / name).unlink()
    temporary_path(folder / "train-00000.safetensors").touch()  # by SIGKILL
    mine = {"mine.txt": b"mine"} if before == "earlier" else {}
    put(folder, mine)
    done = pull(bucket / "set", folder)
    assert done.sent_files == done.files - len(there)
    assert named(folder) == named(states["update"])
    assert mine.items() <= contents(folder).items()


def test_a_folder_with_something_else_is_left_alone(
    states: dict[str, Path], grey: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    push(states["earlier"], bucket / "set")
    folder = Path(shutil.copytree(grey["shards"], tmp_path / "folder"))
    for change in (lambda: None, (folder / MANIFEST_NAME).unlink, (folder / "mine.txt").touch):
        change()
        before = contents(folder)
        with pytest.raises(DatasetError, match="choose another folder"):
            pull(bucket / "set", folder)
        assert contents(folder) == before


def test_a_list_of_rejects_is_of_a_dataset_that_has_some(
    states: dict[str, Path], bucket: Url, tree: Path, tmp_path: Path
) -> None:
    """Else a file of its name is the user's, which nothing replaces or removes."""
    ObjectStore(bucket / "set").put(REJECTED_NAME, b"mine")
    push(states["another"], bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(states["another"])
    assert objects(bucket / "set")[REJECTED_NAME] == b"mine"
    folder = put(Path(shutil.copytree(states["earlier"], tmp_path / "folder")), {REJECTED_NAME: b"mine"})
    next(tree.rglob("*.jpg")).with_name("new.jpg").write_bytes(b"")
    rejecting = Path(shutil.copytree(states["earlier"], tmp_path / "rejecting"))
    update = {"update": True, "max_rejects": 0.5}
    convert(tree, rejecting, small_recipe("shards"), workers=0, **update)
    push(rejecting, bucket / "more")
    for act in (
        lambda: convert(tree, folder, small_recipe("shards"), workers=0, **update),
        lambda: convert(tree, folder, small_recipe("shards", size=32), workers=0, overwrite=True),
        lambda: pull(bucket / "more", folder),
    ):
        with pytest.raises(DatasetError, match=r"\(rejected.csv\)"):
            act()
        assert contents(folder) == {**contents(states["earlier"]), REJECTED_NAME: b"mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_push_raises_if_another_push_has_finished_meanwhile(
    overwrite: bool, converted: dict[str, Path], grey: dict[str, Path], raw_tree: Path, bucket: Url
) -> None:
    """The one that ends later; what the other one put there stays."""
    told = []

    def intrude(*_: object) -> None:
        if not told:
            told.append(True)
            push(grey["shards"], bucket / "set", overwrite=overwrite)
            with pytest.raises(SettingError, match="holds a finished dataset"):
                convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0, overwrite=True)

    with pytest.raises(DatasetError, match=f"^{bucket}/set: another process has finished a dataset there"):
        push(converted["shards"], bucket / "set", overwrite=overwrite, on_progress=intrude)
    assert objects(bucket / "set") == contents(grey["shards"])


# What fails.


@pytest.mark.parametrize(
    ("command", "method"), [("push", "PUT"), ("pull", "GET"), ("verify", "GET"), ("convert", "PUT")]
)
def test_ctrl_c_ends_a_command_that_waits_for_a_silent_storage(
    command: str,
    method: str,
    converted: dict[str, Path],
    raw_tree: Path,
    bucket: Url,
    storage: Storage,
    tmp_path: Path,
) -> None:
    """Nothing is answered from the first shard on."""
    if command in ("pull", "verify"):
        push(converted["shards"], bucket)

    def silent(seen: Seen) -> str | None:
        begun = bool(storage.faults) or (seen.method == method and "train-" in seen.path)
        return "silent" if begun else None

    storage.plan = silent
    words = {
        "push": (converted["shards"], bucket),
        "pull": (bucket, tmp_path / "copy"),
        "verify": (bucket,),
        "convert": (raw_tree, bucket, "--format", "shards", "--workers", "1"),
    }
    stopped, took_s = interrupted(
        lambda: storage.faults["silent"] > 0, command, *words[command], cwd=tmp_path
    )
    (line,) = stopped.stderr.splitlines()
    assert stopped.returncode == 130
    assert "interrupted" in line
    assert took_s < 10


def test_a_damaged_file_is_not_pushed(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    shutil.copytree(converted["shards"], tmp_path / "set")
    damaged, _ = flip_a_bit(tmp_path / "set")
    refused = run_here("precache", "push", tmp_path / "set", bucket / "set", cwd=tmp_path)
    check_bad_input(refused, damaged.name, "precache verify")
    assert ObjectStore(bucket / "set").find(MANIFEST_NAME) is None


def test_wrong_bytes_are_fetched_again_and_then_named(
    converted: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    name = next(converted["shards"].glob("train-*.safetensors")).name

    def flip(seen: Seen) -> str | None:
        hit = seen.method == "GET" and seen.path.endswith(name) and storage.faults["flip"] < most
        return "flip" if hit else None

    storage.plan, most = flip, 2
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(converted["shards"])
    most = 99
    with pytest.raises(StorageError, match=f"^{bucket}/set/{name}: .*fetched 3 times"):
        pull(bucket / "set", tmp_path / "other")
    assert not (tmp_path / "other" / MANIFEST_NAME).exists()
