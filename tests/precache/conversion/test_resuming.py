"""Stopped conversions: the same command continues them.

`test_histories.py` stops runs at any moment; the attack `kills` in `tests/faults` sends SIGKILL.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

import loaders
from precache import check, convert, open_dataset, verify, verify_deep
from precache.cli import commandline
from precache.dataset.unfinished import CONVERSION_NAME
from precache.errors import DatasetError
from precache.pictures.kinds import decoder_versions
from precache.reporting import human_bytes
from precache.sources import open_source
from precache.storage import staging
from tests.command import ROOT, run_here
from tests.conftest import small_recipe
from tests.precache.cli.test_terminal import CONVERT
from tests.precache.destinations import THESIS, contents, interrupt

STOPPED_PROGRAM = """
import os
from precache.pictures import images
render, pictures = images.render_or_copy, iter(range(70))
def render_or_stop(*arguments):
    if next(pictures) == 40:
        os.kill(os.getpid(), NUMBER)
    return render(*arguments)
images.render_or_copy = render_or_stop
from precache.cli.main import entry_point
entry_point()
"""


@pytest.mark.parametrize(
    ("number", "code", "overwrites"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)]
)
def test_a_signal_ends_convert_with_its_code_and_what_is_kept(
    number: int, code: int, overwrites: bool, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ["convert", str(raw_tree), "out", *CONVERT, "--workers", "0"]
    if overwrites:
        convert(raw_tree, tmp_path / "out", small_recipe("dali"), workers=0)
        arguments.append("--overwrite")
    program = STOPPED_PROGRAM.replace("NUMBER", str(int(number)))
    stopped = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert stopped.returncode == code
    (line,) = stopped.stderr.splitlines()
    match = re.match(r"precache: error: .* after (\d+) of 70 pictures were finished; these are kept", line)
    assert match, line
    resumed = run_here("precache", *arguments, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    resumed_at = re.search(r"out: (\d+) of 70 pictures are already converted", resumed.stdout)
    assert resumed_at
    assert resumed_at[1] == match[1]
    assert contents(tmp_path / "out") == contents(converted["shards"])


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "class folders in folders": {"class_depth": 2},
    "a list of splits": {"split_list": "list of splits.csv"},
    "more rejects": {"max_rejects": 0.25},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_unfinished_conversion_names_what_is_done_and_how_to_go_on(
    name: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(raw_tree, "my tree/group")
    tree = Path("my tree") if name == "class folders in folders" else Path("my tree/group")
    paths = [path.relative_to(tree) for path in tree.rglob("*") if path.is_file()]
    rows = [f"{path},{('train', 'val')[number % 2]}" for number, path in enumerate(paths)]
    Path("list of splits.csv").write_text("\n".join(["path,split", *rows]))
    whole_bytes: list[int] = []

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    recipe = small_recipe("shards", size=24)
    with pytest.raises(KeyboardInterrupt, match="these are kept"):
        convert(
            tree, "out", recipe, workers=0, on_progress=stop,
            on_start=lambda needed, free: whole_bytes.append(needed), **REQUESTS[name],
        )  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    out, commands = tmp_path / "out", set()
    looks: list[Callable[[], object]] = [
        lambda: open_dataset(out), lambda: verify(out), lambda: verify_deep(out, tmp_path / tree),
        lambda: loaders.build(out, split="val"), lambda: loaders.build([out]),
        lambda: loaders.ImageDataset(out), lambda: open_source(out),
    ]  # fmt: skip
    for look in looks:
        with pytest.raises(DatasetError, match=r"unfinished conversion, (\d+) of 70 pictures") as raised:
            look()
        assert raised.value.path == out
        commands.add(raised.value.remedy.removeprefix("go on with: "))
    (command,) = commands
    done = re.search(r"(\d+) of 70", str(raised.value))
    assert done
    resumed = run_here(*shlex.split(command), "--workers", "0", cwd=Path.cwd())
    assert f"{done[1]} of 70 pictures are already converted" in resumed.stdout
    rest = whole_bytes[0] * (1 - int(done[1]) / 70)
    assert f"out: will take about {human_bytes(rest)}; " in resumed.stdout
    assert verify(out) == []


@pytest.mark.parametrize("start", ["", "~/"])
def test_the_command_that_goes_on_has_absolute_paths(
    start: str, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [path.relative_to(raw_tree) for path in raw_tree.rglob("*") if path.is_file()]
    shutil.copytree(raw_tree, "pictures")
    Path("table.csv").write_text("\n".join(["path,label", *(f"{path},{path.parent}" for path in paths)]))
    Path("few.csv").write_text("\n".join(["path,label", *(f"{path},{path.parent}" for path in paths[:9])]))
    recipe, root = small_recipe("shards", size=24), f"{start}pictures"
    convert(f"{start}few.csv", "first", recipe, workers=0, root=root, label="label")
    with pytest.raises(KeyboardInterrupt):
        convert(
            f"{start}table.csv", "out", recipe, workers=0, on_progress=stop,
            root=root, label="label", without=[f"{start}first"],
        )  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DatasetError, match="unfinished") as raised:
        open_dataset(tmp_path / "out")
    words = shlex.split(raised.value.remedy.removeprefix("go on with: "))
    run_here(*words, "--workers", "0", cwd=Path.cwd())
    assert verify(tmp_path / "out") == []


def test_an_unfinished_conversion_of_a_dataset_names_the_call(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    pictures = [(Image.new("RGB", (24, 24), (number, 0, 0)), number % 2) for number in range(40)]
    with pytest.raises(KeyboardInterrupt):
        convert(pictures, tmp_path / "out", small_recipe("shards", size=24), workers=0, on_progress=stop)
    with pytest.raises(DatasetError, match=r" of 40 pictures; go on with: the same call of "):
        open_dataset(tmp_path / "out")


def test_tars_of_an_unfinished_conversion_are_no_source(raw_tree: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    out, recipe = tmp_path / "out", small_recipe("webdataset", size=24)
    with pytest.raises(KeyboardInterrupt):
        convert(raw_tree, out, recipe, workers=0, on_progress=stop)
    assert list(out.glob("*.tar"))
    with pytest.raises(DatasetError, match="unfinished conversion"):
        convert(out, tmp_path / "again", recipe, workers=0)


def test_a_tree_with_somebody_elses_description_is_a_tree(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    for content in ("", "Dear diary\n", '{"inputs": 2}\n', '{"a": 1, "checksum": "0123456789abcdef"}\n'):
        (tree / CONVERSION_NAME).write_text(content)
        assert len(loaders.build(tree).dataset) == 70


def test_an_interruption_offers_to_go_on_only_where_something_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.group()
    def group() -> None:
        """Group of commands."""

    @group.command()
    def look() -> None:
        """Do work of which nothing is kept."""
        raise KeyboardInterrupt

    assert commandline.run(group, "precache", ["look"]) == 130
    assert capsys.readouterr().err == "precache: error: interrupted\n"


# Damage.


@pytest.mark.parametrize(
    "damage", ["cut off", "a digit", "of another shard", "of another conversion", "a link"]
)
def test_convert_repeats_a_shard_whose_sidecar_is_damaged(
    damage: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    interrupt(raw_tree, out)
    sidecars = sorted(out.glob("*-*.json"))
    assert len(sidecars) > 2
    first, second = sidecars[:2]
    content = first.read_bytes()
    if damage == "cut off":
        first.write_bytes(content[:-30])
    elif damage == "a digit":
        first.write_bytes(content.replace(b'"pixels":2', b'"pixels":3'))
    elif damage == "of another shard":
        shutil.copyfile(second, first)
    elif damage == "of another conversion":
        interrupt(raw_tree, tmp_path / "other", "webdataset")
        shutil.copyfile(tmp_path / "other" / first.name, first)
    else:
        shutil.move(first, tmp_path / "moved")
        first.symlink_to(tmp_path / "moved")
    assert damage == "a link" or first.read_bytes() != content
    conversion = convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert conversion.converted == 70 - 12 * (len(sidecars) - 1)
    assert str(first) in caplog.text
    assert contents(out) == contents(converted["shards"])


@pytest.mark.parametrize("format_name", ["shards", "webdataset"])
def test_a_shard_that_loses_all_its_pictures_leaves_no_file(
    format_name: str, raw_tree: Path, tmp_path: Path
) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    interrupt(tree, out, format_name)
    pictures = sorted(path for path in tree.rglob("*.*") if path.is_file())
    for picture in pictures[1:]:
        picture.write_bytes(bytes(picture.stat().st_size))
    convert(tree, out, small_recipe(format_name), workers=0, max_rejects=1)
    manifest = open_dataset(out).manifest
    assert manifest.samples == 1
    assert {path.name for path in out.iterdir()} == {*manifest.own_names, "dataset.json"}


@pytest.mark.parametrize("content", ["Dear diary\n", "", "{}", "{" * 100_000])
def test_a_foreign_file_with_the_name_of_the_description_stays(
    content: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(converted["shards"], tmp_path / "out"))
    (out / CONVERSION_NAME).write_text(content)
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 0
    assert (out / CONVERSION_NAME).read_text() == content
    (tmp_path / "new").mkdir()
    shutil.copyfile(out / CONVERSION_NAME, tmp_path / "new" / CONVERSION_NAME)
    for overwrite in (False, True):
        with pytest.raises(DatasetError) as raised:
            convert(raw_tree, tmp_path / "new", small_recipe("shards"), workers=0, overwrite=overwrite)
        assert raised.value.path == tmp_path / "new" / CONVERSION_NAME
    assert contents(tmp_path / "new") == {CONVERSION_NAME: content.encode()}


def test_convert_refuses_to_resume_with_another_pillow(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(raw_tree, tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr(
        "precache.conversion.convert.decoder_versions", lambda: {**decoder_versions(), "pillow": "99"}
    )
    with pytest.raises(DatasetError, match=r"pillow .*99") as raised:
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert raised.value.path == tmp_path / "out"
    assert "--overwrite" in raised.value.remedy
    assert contents(tmp_path / "out") == before


def test_convert_resumes_without_a_decoder_that_was_there(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = "precache.conversion.convert.decoder_versions"
    with monkeypatch.context() as patch:
        patch.setattr(versions, lambda: {**decoder_versions(), "another decoder": "1"})
        interrupt(raw_tree, tmp_path / "out")
    assert convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0).converted < 70


def test_check_of_an_unfinished_folder_says_how_to_go_on(raw_tree: Path, tmp_path: Path) -> None:
    interrupt(raw_tree, tmp_path / "out")
    with pytest.raises(DatasetError, match=r"unfinished conversion, \d+ of 70") as raised:
        check(tmp_path / "out", workers=0)
    assert f"precache convert {raw_tree} {tmp_path / 'out'}" in raised.value.remedy


def test_staging_folders_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(staging, "_own", {})
    own_folder = staging.folder()
    with staging.temporary_folder(tmp_path) as elsewhere:
        assert elsewhere.parent.parent == tmp_path
    abandoned, foreign = tmp_path / "tmp/precache-staging-0000", tmp_path / "tmp/precache-staging-mine"
    for folder, names in ((abandoned, (".precache-staging", "train-00000.tar")), (foreign, ("thesis.txt",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(THESIS)
    assert staging.remove_abandoned() == [abandoned]
    assert own_folder.exists()
    assert (foreign / "thesis.txt").read_bytes() == THESIS
    assert not abandoned.exists()


_KILLED = """
import os, signal
from precache.storage.staging import temporary_folder
with temporary_folder() as folder:
    (folder / "large").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_process_removes_what_a_killed_one_left_in_tmpdir(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    for program, code in ((_KILLED, -signal.SIGKILL), (_KILLED.replace("SIGKILL", "SIGCONT"), 0)):
        command = [sys.executable, "-c", program]
        assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == code
        assert len(list(tmp_path.glob("*/*/large"))) == (code != 0)
    assert os.listdir(tmp_path) == []
