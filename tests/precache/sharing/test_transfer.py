"""`push` and `pull`: what is copied, what is not, and what stands in the way; over a real S3 endpoint."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precache import convert
from precache.dataset.files import check_file
from precache.errors import DatasetError, SettingError, StorageError
from precache.manifest import MANIFEST_NAME
from precache.sharing.transfer import PULL_NAME, pull, push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.cloud.proxy import Proxy, Seen
from tests.command import ROOT, check_bad_input, run
from tests.conftest import small_recipe
from tests.damage import flip_a_bit


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def puts(proxy: Proxy) -> list[str]:
    return [seen.path.rpartition("/")[2] for seen in proxy.seen if seen.method == "PUT"]


def gets(proxy: Proxy) -> list[str]:
    return [seen.path.rpartition("/")[2].partition("?")[0] for seen in proxy.seen if seen.method == "GET"]


@pytest.mark.parametrize("form", ["shards", "webdataset", "dali"])
def test_what_is_pushed_and_pulled_is_the_same_folder(
    form: str, converted: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    done = push(converted[form], bucket / "set")
    assert done.sent_files == done.files == len(contents(converted[form])) - 1  # and the manifest
    pulled = pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(converted[form])
    assert (pulled.sent_files, pulled.sent_bytes) == (done.files, done.bytes)


def test_a_second_time_nothing_is_sent_or_fetched(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    proxy.seen.clear()
    assert push(converted["shards"], bucket / "set").sent_files == 0
    assert puts(proxy) == []
    proxy.seen.clear()
    assert pull(bucket / "set", tmp_path / "copy").sent_files == 0
    assert set(gets(proxy)) <= {MANIFEST_NAME, "rejected.csv"}


def test_the_manifest_goes_last_and_a_push_goes_on(
    converted: dict[str, Path], bucket: Url, proxy: Proxy
) -> None:
    def stop(seen: Seen) -> str | None:
        return "expired" if seen.method == "PUT" and len(puts(proxy)) > 3 else None

    proxy.plan = stop
    with pytest.raises(StorageError, match="renew the credentials"):
        push(converted["shards"], bucket / "set")
    store = ObjectStore(bucket / "set")
    assert store.find(MANIFEST_NAME) is None
    there = [one.name for one in store.list()]
    assert there
    proxy.plan = lambda seen: None
    proxy.seen.clear()
    push(converted["shards"], bucket / "set")
    assert not set(there) & set(puts(proxy))
    assert puts(proxy)[-1] == MANIFEST_NAME


def test_an_object_of_the_same_size_is_not_taken_for_the_file(
    converted: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    store = ObjectStore(bucket / "set")
    name = next(path.name for path in converted["shards"].glob("*.safetensors"))
    store.put(name, bytes((converted["shards"] / name).stat().st_size))
    push(converted["shards"], bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(converted["shards"])


def test_a_damaged_file_is_not_pushed(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    shutil.copytree(converted["shards"], tmp_path / "set")
    damaged, _ = flip_a_bit(tmp_path / "set")
    with pytest.raises(DatasetError, match=damaged.name):
        push(tmp_path / "set", bucket / "set")
    assert ObjectStore(bucket / "set").find(MANIFEST_NAME) is None


def test_wrong_bytes_are_fetched_again_and_then_named(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    name = sorted(path.name for path in converted["shards"].glob("train-*.safetensors"))[0]
    left = [2]

    def flip(seen: Seen) -> str | None:
        hit = seen.method == "GET" and seen.path.endswith(name) and left[0] > 0
        left[0] -= hit
        return "flip" if hit else None

    proxy.plan = flip
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(converted["shards"])
    left[0] = 99
    with pytest.raises(DatasetError) as caught:
        pull(bucket / "set", tmp_path / "other")
    assert f"{bucket}/set/{name}: came 3 times with CRC-32C" in str(caught.value)
    assert not (tmp_path / "other" / name).exists()
    assert not (tmp_path / "other" / MANIFEST_NAME).exists()


def test_another_dataset_is_replaced_only_if_asked(
    converted: dict[str, Path], grey: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    with pytest.raises(DatasetError, match="holds another dataset; choose another URL, or pass --overwrite"):
        push(grey["shards"], bucket / "set")
    push(grey["shards"], bucket / "set", overwrite=True)
    pull(bucket / "set", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(grey["shards"])


def test_an_update_sends_and_fetches_what_is_new(
    raw_tree: Path, bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    shutil.copytree(raw_tree, tmp_path / "tree")
    convert(tmp_path / "tree", tmp_path / "set", small_recipe("shards"), workers=0)
    push(tmp_path / "set", bucket / "set")
    pull(bucket / "set", tmp_path / "copy")
    picture = next((tmp_path / "tree").rglob("*.jpg"))
    shutil.copy(picture, picture.with_name("new.jpg"))
    convert(tmp_path / "tree", tmp_path / "set", small_recipe("shards"), workers=0, update=True)
    proxy.seen.clear()
    done = push(tmp_path / "set", bucket / "set")
    assert 0 < done.sent_files < done.files
    pull(bucket / "set", tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / MANIFEST_NAME).read_text())
    assert manifest == json.loads((tmp_path / "set" / MANIFEST_NAME).read_text())


@pytest.mark.parametrize("what", ["files", "dataset", "pull"])
def test_a_folder_with_something_else_is_left_alone(
    what: str, converted: dict[str, Path], grey: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    folder = tmp_path / "folder"
    if what == "files":
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    elif what == "dataset":
        shutil.copytree(grey["shards"], folder)
    else:
        folder.mkdir()
        (folder / PULL_NAME).write_text('{"digest": "of another"}')
    before = contents(folder)
    with pytest.raises(DatasetError, match="choose another folder"):
        pull(bucket / "set", folder)
    assert contents(folder) == before


def test_a_pull_that_is_killed_goes_on(
    converted: dict[str, Path], bucket: Url, proxy: Proxy, tmp_path: Path
) -> None:
    push(converted["shards"], bucket / "set")
    proxy.bytes_per_s = 200_000.0
    command = [sys.executable, "-m", "precache", "pull", str(bucket / "set"), str(tmp_path / "copy")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "copy").glob("*.safetensors")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "copy" / MANIFEST_NAME).exists()
    proxy.bytes_per_s = None
    done = pull(bucket / "set", tmp_path / "copy")
    assert done.sent_files < done.files
    assert contents(tmp_path / "copy") == contents(converted["shards"])


def test_the_commands_say_what_they_did(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    for _ in range(2):
        sent = run("precache", "push", converted["shards"], bucket / "set", cwd=tmp_path)
        assert sent.returncode == 0, sent.stderr
    assert "nothing to do" in sent.stdout
    fetched = run("precache", "pull", bucket / "set", "copy", cwd=tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    assert f"copy: {len(contents(converted['shards'])) - 1} files" in fetched.stdout
    assert all(check_file(tmp_path / "copy", file) is None for file in _files(converted["shards"]))


def test_bad_input_is_one_line(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    for arguments, mention in [
        (("push", tmp_path, bucket), "not a converted dataset"),
        (("push", converted["shards"], tmp_path / "there"), "copy the dataset with 'cp -r'"),
        (("pull", bucket / "nothing", tmp_path / "there"), "not a converted dataset"),
        (("pull", "s4://bucket", tmp_path / "there"), "unknown kind of URL 's4'"),
    ]:
        check_bad_input(run("precache", *arguments, cwd=tmp_path), mention)
    with pytest.raises(SettingError, match="is a path of this machine"):
        pull(tmp_path, tmp_path / "there")  # type: ignore[arg-type]


def _files(folder: Path) -> tuple:  # type: ignore[type-arg]
    from precache import open_dataset

    return open_dataset(folder).manifest.files
