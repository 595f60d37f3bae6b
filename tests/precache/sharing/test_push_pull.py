"""`push` and `pull` copy whole datasets, and never replace files of the user or of others; over a fake S3."""

import random
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset, verify
from precache.dataset.index import INDEX_NAME, REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, PrecacheError, StorageError
from precache.sharing.push_pull import pull, push
from precache.storage import temporary_path
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE_VARIABLE
from precache.storage.urls import Url
from tests.cloud.storages import FAULTS, Storage, StorageRequest
from tests.cloud.uploading import objects, upload
from tests.command import check_bad_input, run_and_interrupt, run_here
from tests.conftest import small_recipe
from tests.damage import flip_a_bit
from tests.precache.destinations import contents
from tests.precache.sources.tars import put


@pytest.fixture(scope="module")
def states(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a dataset, `one`, and `another`, of fewer shards."""
    root = tmp_path_factory.mktemp("states")
    convert(raw_tree, root / "one", small_recipe("shards"), workers=0)
    convert(raw_tree, root / "another", small_recipe("shards", shard_bytes=1 << 30), workers=0)
    return {path.name: path for path in (root / "one", root / "another")}


def dataset_files(folder: Path) -> dict[str, bytes]:
    """Read the manifest and the files that it names."""
    names = [MANIFEST_NAME, *(file.name for file in open_dataset(folder).manifest.files)]
    return {name: (folder / name).read_bytes() for name in names}


def names_to_copy(states: dict[str, Path], before: str) -> list[str]:
    """Names of the first and the last file that `one` has and the state `before` has not."""
    present = contents(states[before]) if before in states else {}
    names = sorted(set(contents(states["one"])) - set(present) - {MANIFEST_NAME})
    return [names[0], names[-1]]


@pytest.mark.parametrize("name", [MANIFEST_NAME, INDEX_NAME, "train-00000.safetensors"])
def test_an_empty_object_is_named(
    name: str, states: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    upload(states["one"], bucket / "set")
    ObjectStore(bucket / "set").put(name, b"")
    with pytest.raises(PrecacheError, match=name):
        pull(bucket / "set", tmp_path / "out")
    with pytest.raises(PrecacheError, match=name):
        raise DatasetError(verify(bucket / "set")[0])


@pytest.mark.parametrize("seed", range(2))
def test_push_that_fails_at_any_request_leaves_a_whole_dataset_or_none(
    seed: int, states: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    """Keep the user's objects, too, and let the next push, of whichever dataset, continue."""
    random = np.random.default_rng(seed)
    ObjectStore(bucket / "set").put("notes.txt", b"mine")
    if seed % 2:
        upload(states["another"], bucket / "set")  # as other programs copy it
    files_of_states = {path: dataset_files(path) for path in states.values()}
    for requests in [*random.integers(0, 40, 3).tolist(), 1 << 30]:
        path = states[str(random.choice(sorted(states)))]
        last = len(storage.seen) + requests
        storage.plan = lambda seen, last=last: "expired" if seen.number > last else None
        with suppress(StorageError) if requests < 1 << 30 else nullcontext():
            push(path, bucket / "set", overwrite=True)
        storage.plan = lambda seen: None
        present = objects(bucket / "set")
        assert present["notes.txt"] == b"mine"
        if MANIFEST_NAME in present:
            (files,) = (
                files for files in files_of_states.values() if files[MANIFEST_NAME] == present[MANIFEST_NAME]
            )
            assert files.items() <= present.items()
    assert files_of_states[path].items() <= present.items()


def test_repeated_push_and_pull_have_nothing_to_do(
    states: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    push(states["another"], bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    for words in (("push", states["another"], bucket / "set"), ("pull", bucket / "set", tmp_path / "copy")):
        result = run_here("precache", *words, cwd=tmp_path)
        assert "nothing to do" in result.stdout, result.stderr


def test_push_refuses_to_replace_another_dataset(states: dict[str, Path], bucket: Url) -> None:
    push(states["one"], bucket / "set")
    with pytest.raises(DatasetError) as raised:
        push(states["another"], bucket / "set")
    assert raised.value.path == bucket / "set"
    assert "--overwrite" in raised.value.remedy


def test_push_with_overwrite_replaces_another_dataset(states: dict[str, Path], bucket: Url) -> None:
    """Replace an object of equal size, too, which the push of another dataset has left."""
    url = bucket / "set"
    push(states["one"], url)
    name = next(states["another"].glob("train-*")).name
    ObjectStore(url).put(name, bytes((states["another"] / name).stat().st_size), crc32c="0badc0de")
    push(states["another"], url, overwrite=True)
    assert objects(url) == contents(states["another"])


@pytest.mark.parametrize(
    ("before", "overwrite"), [("nothing", True), ("another", True), ("no manifest of ours", True)]
)
def test_push_refuses_to_replace_objects_it_did_not_send(
    before: str, overwrite: bool, states: dict[str, Path], bucket: Url
) -> None:
    store = ObjectStore(bucket / "set")
    if before in states:
        push(states[before], bucket / "set")
    names = [MANIFEST_NAME] if before == "no manifest of ours" else names_to_copy(states, before)
    for content in (b"", b"mine"):
        for name in names:
            store.put(name, content)
        present = objects(bucket / "set")
        with pytest.raises(DatasetError, match=f"^{bucket}/set.*{min(names)}"):
            push(states["one"], bucket / "set", overwrite=overwrite)
        assert objects(bucket / "set") == present


def test_push_replaces_an_unfinished_push_only_with_overwrite(
    states: dict[str, Path], grey: dict[str, Path], bucket: Url, storage: Storage
) -> None:
    storage.plan = lambda seen: "expired" if "/train-00003" in seen.path else None
    with pytest.raises(StorageError):
        push(grey["shards"], bucket / "set")
    storage.plan = lambda seen: None
    present = objects(bucket / "set")
    assert present
    with pytest.raises(DatasetError, match="train-00000") as raised:
        push(states["another"], bucket / "set")
    assert "finish the push" in raised.value.remedy
    assert objects(bucket / "set") == present
    push(states["another"], bucket / "set", overwrite=True)
    assert objects(bucket / "set").items() >= contents(states["another"]).items()


def test_a_shard_that_another_process_replaced_is_never_committed(
    converted: dict[str, Path], bucket: Url
) -> None:
    """The same command then sends the shard again."""
    store, name = ObjectStore(bucket / "set"), "train-00000.safetensors"

    def replace(done: int, total: int) -> None:
        if done == total:
            store.put(name, bytes(len(store.get(name))))

    with pytest.raises(DatasetError, check=lambda error: error.path == bucket / "set" / name):
        push(converted["shards"], bucket / "set", on_progress=replace)
    assert store.find(MANIFEST_NAME) is None
    with pytest.raises(DatasetError, match=name):  # nobody knows whose it is
        push(converted["shards"], bucket / "set")
    store.delete([name])
    push(converted["shards"], bucket / "set")
    assert objects(bucket / "set") == contents(converted["shards"])


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.faults)])
@pytest.mark.timeout(900)
def test_a_storage_that_fails_at_random_loses_nothing(
    seeds: range,
    bucket: Url,
    storage: Storage,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the requests fail, in every way but a stall, which would take too long."""
    monkeypatch.setenv(PATIENCE_VARIABLE, "1")
    storage.plan = lambda seen: "503" if seen.method == "PUT" and "train-" in seen.path else None
    with pytest.raises(StorageError, match=r"s3://bucket.*train-0000.*SlowDown"):
        push(converted["shards"], bucket / "none")
    monkeypatch.setenv(PATIENCE_VARIABLE, "2")
    kinds = [fault for fault in FAULTS if fault not in ("flip", "stall")]
    for seed in seeds:
        url, folder, draw = bucket / str(seed), tmp_path / str(seed), random.Random(seed)
        storage.plan = lambda seen, draw=draw: draw.choice(kinds) if draw.random() < 0.25 else None
        for _ in range(4):
            with suppress(PrecacheError):  # no other exception may arrive
                push(converted["shards"], url)
                pull(url, folder)
        storage.plan = lambda seen: None
        push(converted["shards"], url)
        pull(url, folder)
        assert objects(url) == contents(folder) == contents(converted["shards"]), f"seed {seed}"


def test_pull_refuses_to_replace_files_it_did_not_fetch(
    states: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    """Continue from an unfinished pull once these files are gone."""
    push(states["one"], bucket / "set")
    folder = tmp_path / "copy"
    storage.plan = lambda seen: "expired" if "/train-00003" in seen.path else None
    with pytest.raises(StorageError, check=lambda error: "credentials" in error.remedy):
        pull(bucket / "set", folder)
    storage.plan = lambda seen: None
    assert not (folder / MANIFEST_NAME).exists()
    present = contents(folder).keys()
    assert present
    for name in names_to_copy(states, "nothing"):
        if name not in present:
            (folder / name).write_text("mine")
            unchanged = contents(folder)
            with pytest.raises(DatasetError, match=rf"\({name}\)", check=lambda error: error.path == folder):
                pull(bucket / "set", folder)
            assert contents(folder) == unchanged
            (folder / name).unlink()
    temporary_path(folder / "train-00000.safetensors").touch()  # as a killed process leaves it
    transfer = pull(bucket / "set", folder)
    assert transfer.sent_files == transfer.files - len(present)
    assert contents(folder) == contents(states["one"])


@pytest.mark.parametrize("content", ["another dataset", "shards without a manifest", "a file of the user's"])
def test_pull_refuses_a_folder_with_other_files(
    content: str, states: dict[str, Path], grey: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    push(states["one"], bucket / "set")
    folder = tmp_path / "folder"
    if content == "a file of the user's":
        put(folder, {"mine.txt": b"mine"})
    else:
        shutil.copytree(grey["shards"], folder)
    if content == "shards without a manifest":
        (folder / MANIFEST_NAME).unlink()
    before = contents(folder)
    with pytest.raises(DatasetError) as raised:
        pull(bucket / "set", folder)
    assert raised.value.path == folder
    assert "choose another folder" in raised.value.remedy
    assert contents(folder) == before


def test_push_and_pull_ignore_the_users_file_named_rejected_csv(
    states: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    """Ignore it if the dataset has no rejected pictures, and so no file of this name."""
    ObjectStore(bucket / "set").put(REJECTED_NAME, b"mine")
    push(states["another"], bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(states["another"])
    assert objects(bucket / "set")[REJECTED_NAME] == b"mine"


def test_commands_refuse_to_replace_the_users_file_named_rejected_csv(
    states: dict[str, Path], bucket: Url, tree: Path, tmp_path: Path
) -> None:
    mine = {REJECTED_NAME: b"mine"}
    finished = put(Path(shutil.copytree(states["one"], tmp_path / "finished")), mine)
    next(tree.rglob("*.jpg")).with_name("new.jpg").write_bytes(b"")
    convert(tree, tmp_path / "rejecting", small_recipe("shards"), workers=0, max_rejects=0.5)
    push(tmp_path / "rejecting", bucket / "set")
    with pytest.raises(DatasetError, match=r"\(rejected.csv\)"):
        convert(tree, finished, small_recipe("shards", size=32), workers=0, overwrite=True)
    assert contents(finished) == {**contents(states["one"]), **mine}
    with pytest.raises(DatasetError, match=r"\(rejected.csv\)"):
        pull(bucket / "set", put(tmp_path / "empty", mine))
    assert contents(tmp_path / "empty") == mine


@pytest.mark.parametrize("overwrite", [False, True])
def test_push_raises_if_another_push_has_finished_meanwhile(
    overwrite: bool, converted: dict[str, Path], grey: dict[str, Path], bucket: Url
) -> None:
    """Keep the dataset of the push that has finished first."""
    has_pushed = False

    def push_once(*_: object) -> None:
        nonlocal has_pushed
        if not has_pushed:
            has_pushed = True
            push(grey["shards"], bucket / "set", overwrite=overwrite)

    with pytest.raises(DatasetError, check=lambda error: error.path == bucket / "set"):
        push(converted["shards"], bucket / "set", overwrite=overwrite, on_progress=push_once)
    assert objects(bucket / "set") == contents(grey["shards"])


@pytest.mark.parametrize(("command", "method"), [("push", "PUT"), ("pull", "GET"), ("verify", "GET")])
def test_ctrl_c_ends_a_command_that_waits_for_a_silent_storage(
    command: str,
    method: str,
    converted: dict[str, Path],
    bucket: Url,
    storage: Storage,
    tmp_path: Path,
) -> None:
    """Interrupt it while the storage answers no request, from that for the first shard on."""
    if command in ("pull", "verify"):
        push(converted["shards"], bucket)

    def be_silent(seen: StorageRequest) -> str | None:
        is_silent = bool(storage.faults) or (seen.method == method and "train-" in seen.path)
        return "silent" if is_silent else None

    storage.plan = be_silent
    words = {
        "push": (converted["shards"], bucket),
        "pull": (bucket, tmp_path / "copy"),
        "verify": (bucket,),
    }
    stopped, took_s = run_and_interrupt(
        lambda: storage.faults["silent"] > 0, command, *words[command], cwd=tmp_path
    )
    (line,) = stopped.stderr.splitlines()
    assert stopped.returncode == 130
    assert "interrupted" in line
    assert took_s < 10


def test_push_refuses_a_damaged_dataset(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    shutil.copytree(converted["shards"], tmp_path / "set")
    damaged, _ = flip_a_bit(tmp_path / "set")
    refused = run_here("precache", "push", tmp_path / "set", bucket / "set", cwd=tmp_path)
    check_bad_input(refused, damaged.name, "precache verify")
    assert ObjectStore(bucket / "set").find(MANIFEST_NAME) is None


def flip_a_shard(storage: Storage, folder: Path, times: int) -> str:
    """Make the storage change a bit of a shard for this number of requests, and return its name."""
    name = next(folder.glob("train-*.safetensors")).name

    def flip(seen: StorageRequest) -> str | None:
        is_wrong = seen.method == "GET" and seen.path.endswith(name) and storage.faults["flip"] < times
        return "flip" if is_wrong else None

    storage.plan = flip
    return name


def test_pull_fetches_wrong_bytes_up_to_three_times(
    converted: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    flip_a_shard(storage, converted["shards"], times=2)
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(converted["shards"])


def test_pull_raises_for_bytes_that_are_wrong_three_times(
    converted: dict[str, Path], bucket: Url, storage: Storage, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    name = flip_a_shard(storage, converted["shards"], times=99)
    with pytest.raises(StorageError, check=lambda error: error.path == bucket / f"set/{name}"):
        pull(bucket / "set", tmp_path / "copy")
    assert storage.faults["flip"] == 3
    assert not (tmp_path / "copy" / MANIFEST_NAME).exists()
