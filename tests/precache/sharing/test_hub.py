"""`push` and `pull` with a dataset repository of Hugging Face: the real library, a stand-in for the service.

Its own transfer of chunks (Xet) has no stand-in, and is switched off.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, StorageError
from precache.sharing.push_pull import push
from tests.cloud.hub import Hub, hub_serving
from tests.command import check_bad_input, interrupted, run_here
from tests.precache.destinations import contents

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        # read when it was imported
        path_of_file = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + path_of_file)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def test_a_dataset_goes_to_the_hub_in_one_commit_and_comes_back(
    converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    place = "hf://datasets/me/photos/small"
    sent = run_here("precache", "push", converted["shards"], place, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    assert hub.commits == 1
    here = contents(converted["shards"])
    assert hub.repositories["me/photos"] == {f"small/{name}": content for name, content in here.items()}
    fetched = run_here("precache", "pull", place, "copy", cwd=tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    assert contents(tmp_path / "copy") == here


@pytest.mark.parametrize("flags", [(), ("--public",)])
def test_a_repository_that_is_made_is_private_unless_asked(
    flags: tuple[str, ...], converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    for more in (flags, ()):  # and one that is there stays as it is
        sent = run_here(
            "precache", "push", converted["shards"], "hf://datasets/me/photos", *more, cwd=tmp_path
        )
        assert sent.returncode == 0, sent.stderr
        assert hub.private == {"me/photos": not flags}


def test_no_repository_is_made_for_a_dataset_that_is_not_whole(
    converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    shutil.copytree(converted["shards"], tmp_path / "lacking")
    lost = next((tmp_path / "lacking").glob("train-*"))
    lost.unlink()
    refused = run_here("precache", "push", tmp_path / "lacking", "hf://datasets/me/photos", cwd=tmp_path)
    check_bad_input(refused, lost.name, "precache verify")
    assert hub.repositories == hub.private == {}


def test_files_of_somebody_else_stay(converted: dict[str, Path], hub: Hub, tmp_path: Path) -> None:
    name = next(path.name for path in converted["shards"].glob("train-*"))
    hub.repositories["me/photos"] = {name: b"mine" * 500, "README.md": b"mine"}
    for flags in ((), ("--overwrite",)):
        refused = run_here(
            "precache", "push", converted["shards"], "hf://datasets/me/photos", *flags, cwd=tmp_path
        )
        check_bad_input(refused, name, "are not part of a dataset", "move them elsewhere")
    assert hub.repositories["me/photos"] == {name: b"mine" * 500, "README.md": b"mine"}
    del hub.repositories["me/photos"][name]
    assert (
        run_here("precache", "push", converted["shards"], "hf://datasets/me/photos", cwd=tmp_path).returncode
        == 0
    )
    assert hub.repositories["me/photos"] == {"README.md": b"mine", **contents(converted["shards"])}


def test_a_push_ends_where_another_one_ended_first(
    converted: dict[str, Path], grey: dict[str, Path], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "hf://datasets/me/photos"
    with pytest.raises(StorageError, match="another commit was made meanwhile; run the same command again"):
        push(converted["shards"], place, on_progress=_once(lambda: push(grey["shards"], place)))
    assert hub.repositories["me/photos"] == contents(grey["shards"])
    with pytest.raises(DatasetError, match="holds another dataset"):
        push(converted["shards"], place)


def test_ctrl_c_does_not_wait_for_a_silent_service(
    converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    hub.silent = threading.Event()
    try:
        stopped, took_s = interrupted(
            lambda: hub.uploads > 0, "push", converted["shards"], "hf://datasets/me/photos", cwd=tmp_path
        )
    finally:
        hub.silent.set()
    assert (stopped.returncode, hub.commits) == (130, 0), stopped.stderr
    assert took_s < 6


def _once(act: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress that does so at its first report."""
    calls = iter((act,))
    return lambda done, total: (next(calls, None) or (lambda: None))() and None


def test_an_interrupted_push_shows_nothing_and_goes_on(
    converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    hub.uploads_until_failure = 2
    stopped = run_here("precache", "push", converted["shards"], "hf://datasets/me/photos", cwd=tmp_path)
    check_bad_input(stopped, "hf://datasets/me/photos", "check the network, and the login")
    assert "hf_secret" not in stopped.stderr
    assert hub.commits == 0
    hub.uploads_until_failure, already = None, len(hub.blobs)
    hub.uploads = 0
    assert (
        run_here("precache", "push", converted["shards"], "hf://datasets/me/photos", cwd=tmp_path).returncode
        == 0
    )
    assert hub.uploads == len(hub.blobs) - already
    assert hub.repositories["me/photos"] == contents(converted["shards"])


def test_another_dataset_there_is_replaced_only_if_asked(
    converted: dict[str, Path], grey: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    place = "hf://datasets/me/photos"
    assert run_here("precache", "push", converted["shards"], place, cwd=tmp_path).returncode == 0
    check_bad_input(
        run_here("precache", "push", grey["shards"], place, cwd=tmp_path), "holds another dataset"
    )
    again = run_here("precache", "push", grey["shards"], place, "--overwrite", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    manifest = json.loads(hub.repositories["me/photos"][MANIFEST_NAME])
    assert manifest["recipe"]["channels"] == "grey"
    assert hub.repositories["me/photos"] == contents(grey["shards"])


@pytest.mark.parametrize(
    ("place", "mention"),
    [
        ("hf://datasets/nobody/nothing", "not a converted dataset"),
        ("hf://photos", "write hf://datasets/OWNER/NAME"),
    ],
)
def test_what_is_not_there_is_one_line(place: str, mention: str, hub: Hub, tmp_path: Path) -> None:
    check_bad_input(run_here("precache", "pull", place, "copy", cwd=tmp_path), mention)
    assert not (tmp_path / "copy").exists()
