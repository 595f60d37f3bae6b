"""A conversion whose destination is a URL, against a real S3 endpoint: the same command ends it."""

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.clean import leftovers
from precache.conversion.journal import JOURNAL_NAME
from precache.conversion.url import working_folder
from precache.errors import DatasetError, PrecacheError, StorageError
from precache.sharing.push_pull import push
from precache.storage import locks
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE
from precache.storage.urls import Url
from tests.cloud.proxy import FAULTS, Proxy, Seen
from tests.cloud.uploading import objects
from tests.command import run_here
from tests.conftest import small_recipe
from tests.precache.destinations import contents


def test_objects_are_what_a_folder_would_hold(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    url = bucket / "sets/caltech"
    done = convert(raw_tree, str(url), small_recipe("dali"), workers=0)
    assert done.published
    assert objects(url) == contents(converted["dali"])
    assert all(info.name.startswith("sets/caltech/") for info in ObjectStore(bucket).list())


def interrupt(tree: Path, url: Url) -> None:
    """Leave an unfinished conversion there."""

    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="of 70 pictures were finished; these are kept"):
        convert(tree, url, small_recipe("shards"), workers=0, on_progress=stop)


def shards_there(url: Url) -> list[str]:
    return [info.name for info in ObjectStore(url).list() if info.name.endswith(".safetensors")]


def left_here(url: Url) -> list[str]:
    """What lies on this machine of conversions into `url`, its lock among it."""
    folder = working_folder(url)
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in (*files, *folder.parent.glob(".*")))


def test_on_another_machine_it_starts_anew_and_says_so(
    bucket: Url,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupt(raw_tree, bucket)
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "of another machine"))
    with caplog.at_level(logging.WARNING, "precache"):
        done = convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert (
        "holds 3 files of a conversion whose journal is not on this machine, so it starts over" in caplog.text
    )
    assert done.converted == 70
    assert objects(bucket) == contents(converted["shards"])


def test_of_two_converters_one_is_told_and_the_other_ones_dataset_stays(
    bucket: Url,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another machine converts other pictures into the URL while this one has begun."""
    others: list[object] = []

    def convert_elsewhere(done: int, total: int) -> None:
        if not others:
            others.append(done)
            with monkeypatch.context() as patches:
                patches.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "of another machine"))
                convert(raw_tree, bucket, small_recipe("shards"), workers=0)

    with pytest.raises(DatasetError, match="another process has finished a dataset there"):
        convert(raw_tree, bucket, small_recipe("shards", seed=7), workers=0, on_progress=convert_elsewhere)
    assert objects(bucket) == contents(converted["shards"])


def test_two_processes_of_a_machine_are_kept_apart(
    bucket: Url, raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.0)

    def again(*_: object) -> None:
        convert(raw_tree, bucket, small_recipe("shards"), workers=0)

    with pytest.raises(DatasetError, match=f"{bucket}: is being converted by process"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, on_start=again)


def test_the_command_says_on_which_disk_shards_wait(bucket: Url, raw_tree: Path) -> None:
    flags = ("--format", "shards", "--size", "48", "--workers", "0")
    done = run_here("precache", "convert", raw_tree, str(bucket), *flags, cwd=raw_tree.parent)
    assert f"are free in {working_folder(bucket).parent}, where shards wait" in done.stdout


def test_workers_push_what_they_write_and_leave_nothing_here(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    convert(raw_tree, bucket, small_recipe("webdataset"), workers=2)
    assert objects(bucket) == contents(converted["webdataset"])
    assert left_here(bucket) == []


@pytest.mark.parametrize("damage", ["gone", "replaced", "record"])
def test_a_finished_shard_that_is_not_as_it_was_is_converted_again(
    damage: str, bucket: Url, raw_tree: Path, converted: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(raw_tree, bucket)
    store, name = ObjectStore(bucket), shards_there(bucket)[0]
    if damage == "gone":
        store.delete([name])
    elif damage == "replaced":  # as large as it was
        store.put(name, bytes(store.find(name).bytes))  # type: ignore[union-attr]
    else:
        journal = working_folder(bucket) / JOURNAL_NAME
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"1", b"2", 1)]))
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert "1 finished shard must be converted again" in caplog.text or "is damaged or cut off" in caplog.text
    assert objects(bucket) == contents(converted["shards"])


def test_what_a_push_left_of_an_unfinished_conversion_can_be_cleaned(
    bucket: Url, raw_tree: Path, tmp_path: Path
) -> None:
    """The journal stays, which alone knows the shards that the dataset does not have."""
    interrupt(raw_tree, bucket)
    convert(raw_tree, tmp_path / "one-shard", small_recipe("shards", shard_bytes=10**9), workers=0)
    push(tmp_path / "one-shard", str(bucket), overwrite=True)
    with pytest.raises(DatasetError, match="holds another conversion"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    with leftovers(bucket) as found:
        found.remove()
    assert objects(bucket) == contents(tmp_path / "one-shard")
    assert left_here(bucket) == []


def test_of_many_objects_of_somebody_else_it_does_not_say_a_number_that_is_none(
    bucket: Url, raw_tree: Path
) -> None:
    for number in range(30):  # more than are asked for
        ObjectStore(bucket).put(f"{number:02}.txt", b"mine")
    with pytest.raises(DatasetError, match=r"\(00\.txt, 01\.txt, 02\.txt and others\)"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0)


def test_a_shard_that_another_process_replaced_is_never_committed(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    store = ObjectStore(bucket)

    def replace(done: int, total: int) -> None:
        if done == total and (there := shards_there(bucket)):
            store.put(there[0], bytes(store.find(there[0]).bytes))  # type: ignore[union-attr]

    with pytest.raises(DatasetError, match="was replaced after it was pushed"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, on_progress=replace)
    assert store.find("dataset.json") is None
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert objects(bucket) == contents(converted["shards"])


def test_a_storage_that_takes_no_shard_is_named(
    bucket: Url, proxy: Proxy, raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE, "1")
    proxy.plan = lambda seen: "503" if seen.method == "PUT" and "train-" in seen.path else None
    with pytest.raises(StorageError, match=r"s3://bucket.*train-0000.*SlowDown"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=1)
    proxy.plan = lambda seen: None
    assert objects(bucket) == {}


def test_a_finished_dataset_that_lacks_a_shard_is_not_called_done(bucket: Url, raw_tree: Path) -> None:
    convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0)
    ObjectStore(bucket / "set").delete(["train-00002.safetensors"])
    with pytest.raises(DatasetError, match=r"train-00002.safetensors: missing or truncated; .* another DST"):
        convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0)


# With a storage that fails at random.


def at_random(seed: int) -> Callable[[Seen], str | None]:
    """A plan for a proxy: one request in four fails, in any way that there is."""
    draw = random.Random(seed)
    kinds = [fault for fault in FAULTS if fault not in ("flip", "stall")]  # stalls take their time

    def plan(seen: Seen) -> str | None:
        return draw.choice(kinds) if draw.random() < 0.25 else None

    return plan


def fails_at_random(seed: int, proxy: Proxy, url: Url, tree: Path, expected: Path) -> None:
    proxy.plan = at_random(seed)
    for _ in range(4):
        with suppress(PrecacheError):  # and nothing else
            convert(tree, url, small_recipe("shards"), workers=0)
    proxy.plan = lambda seen: None
    convert(tree, url, small_recipe("shards"), workers=0)
    store = ObjectStore(url)
    found = {info.name: store.get(info.name) for info in store.list()}
    assert found == {path.name: path.read_bytes() for path in expected.iterdir()}, f"seed {seed}"


@pytest.fixture
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "2")
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_impatient")
def test_a_storage_that_fails_at_random_loses_nothing(
    bucket: Url, proxy: Proxy, raw_tree: Path, converted: dict[str, Path]
) -> None:
    fails_at_random(0, proxy, bucket / "0", raw_tree, converted["shards"])


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_impatient")
def test_a_storage_that_fails_at_random_loses_nothing_by_many_seeds(
    bucket: Url, proxy: Proxy, raw_tree: Path, converted: dict[str, Path]
) -> None:
    for seed in range(1, 60):
        fails_at_random(seed, proxy, bucket / str(seed), raw_tree, converted["shards"])
