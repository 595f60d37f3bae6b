"""`push` and `pull` with a dataset repository of Hugging Face: the real library, a stand-in for the service.

Its own transfer of chunks (Xet) has no stand-in, and is switched off.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precache.errors import DatasetError, StorageError
from precache.sharing.push_pull import pull, push
from tests.cloud.hub import Hub, hub_serving
from tests.command import check_bad_input, interrupted, run_here
from tests.precache.destinations import contents

constants = pytest.importorskip("huggingface_hub.constants")
PLACE, NAME = "hf://datasets/me/photos", "me/photos"


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


@pytest.fixture
def pushed(hub: Hub, tmp_path: Path) -> Callable[..., Any]:
    """Pushes a folder."""
    return lambda folder, *flags: run_here("precache", "push", folder, PLACE, *flags, cwd=tmp_path)


@pytest.mark.parametrize("flags", [(), ("--public",)])
def test_a_dataset_goes_to_the_hub_in_one_commit_comes_back_and_stays_unless_asked(
    flags: tuple[str, ...],
    pushed: Callable[..., Any],
    converted: dict[str, Path],
    grey: dict[str, Path],
    hub: Hub,
    tmp_path: Path,
) -> None:
    here = contents(converted["shards"])
    assert pushed(converted["shards"], *flags).returncode == 0
    assert (hub.commits, hub.repositories[NAME], hub.private) == (1, here, {NAME: not flags})
    pull(PLACE, tmp_path / "copy")
    assert contents(tmp_path / "copy") == here
    check_bad_input(pushed(grey["shards"]), PLACE, "another dataset", "--overwrite")
    assert pushed(grey["shards"], "--overwrite").returncode == 0
    assert hub.repositories[NAME] == contents(grey["shards"])


def test_files_of_somebody_else_stay(
    pushed: Callable[..., Any], converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    """And no repository is made for a dataset that is not whole."""
    lacking = Path(shutil.copytree(converted["shards"], tmp_path / "lacking"))
    lost = next(lacking.glob("train-*"))
    lost.unlink()
    check_bad_input(pushed(lacking), lost.name, "precache verify")
    assert hub.repositories == {}
    hub.repositories[NAME] = mine = {lost.name: b"mine" * 500, "README.md": b"mine"}
    for flags in ((), ("--overwrite",)):
        check_bad_input(pushed(converted["shards"], *flags), lost.name, "move them elsewhere")
        assert hub.repositories[NAME] == {lost.name: b"mine" * 500, "README.md": b"mine"}
    del mine[lost.name]
    assert pushed(converted["shards"]).returncode == 0
    assert hub.repositories[NAME] == {"README.md": b"mine", **contents(converted["shards"])}


def test_a_push_ends_where_another_one_ended_first(
    converted: dict[str, Path], grey: dict[str, Path], hub: Hub
) -> None:
    others = iter([grey["shards"]])

    def intrude(done: int, total: int) -> None:
        for other in others:
            push(other, PLACE)

    with pytest.raises(StorageError, match="another commit was made meanwhile; run the same command again"):
        push(converted["shards"], PLACE, on_progress=intrude)
    assert hub.repositories[NAME] == contents(grey["shards"])
    with pytest.raises(DatasetError, match="holds another dataset"):
        push(converted["shards"], PLACE)


def test_ctrl_c_does_not_wait_for_a_silent_service(
    converted: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    hub.silent = threading.Event()
    try:
        stopped, took_s = interrupted(
            lambda: hub.uploads > 0, "push", converted["shards"], PLACE, cwd=tmp_path
        )
    finally:
        hub.silent.set()
    assert (stopped.returncode, hub.commits) == (130, 0), stopped.stderr
    assert took_s < 6


def test_an_interrupted_push_shows_nothing_and_goes_on(
    pushed: Callable[..., Any], converted: dict[str, Path], hub: Hub
) -> None:
    hub.uploads_until_failure = 2
    stopped = pushed(converted["shards"])
    check_bad_input(stopped, PLACE, "check the network, and the login")
    assert "hf_secret" not in stopped.stderr
    assert hub.commits == 0
    hub.uploads_until_failure, hub.uploads, already = None, 0, len(hub.blobs)
    assert pushed(converted["shards"]).returncode == 0
    assert hub.uploads == len(hub.blobs) - already
    assert hub.repositories[NAME] == contents(converted["shards"])
