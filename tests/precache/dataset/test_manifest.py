"""A manifest is somebody else's word: what it names lies in its folder, and what it says has its type."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import Recipe, convert, export, open_dataset, verify
from precache.conversion.clean import leftovers
from precache.dataset import inspection
from precache.dataset.files import FileEntry
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.shard_table import shard_name
from precache.errors import DatasetError, PrecacheError
from precache.sharing.push_pull import pull, push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.conftest import small_recipe
from tests.damage import edit_manifest, lead_away, write_sealed
from tests.precache.destinations import THESIS, contents

NAMES = (
    "/etc/x",
    "../x",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "-x",
    "a b",
    "a\nb",
    "\ud800",
    "x" * 300,
    ".x",
    5,
    None,
)
"""Of a file or a split, in a manifest that somebody else has written."""


# What it names lies in its folder.


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_folder(name: Any, converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    before = (path / MANIFEST_NAME).read_bytes()
    content = json.loads(before)
    edit_manifest(path, index={**content["index"], "name": name})
    with pytest.raises(DatasetError, match="not as this project writes it"):
        open_dataset(path)
    (path / MANIFEST_NAME).write_bytes(before)
    lead_away(path, name)
    with pytest.raises(DatasetError, match=r"not as this project writes it|not a manifest"):
        open_dataset(path)
    with pytest.raises((ValueError, TypeError)):  # wherever else it may come from
        FileEntry(name, 1, "00000000")
    with pytest.raises((ValueError, TypeError)):
        shard_name(name, 0)


CONSUMERS: dict[str, Callable[[Path, Path, Path], object]] = {
    "open": lambda path, tree, new: open_dataset(path),
    "verify": lambda path, tree, new: verify(path),
    "clean": lambda path, tree, new: leftovers(path).__enter__().remove(),
    "export": lambda path, tree, new: export(path, new, workers=0),
    "read": lambda path, tree, new: convert(path, new, small_recipe("dali"), workers=0),
    "again": lambda path, tree, new: convert(tree, path, small_recipe("shards"), workers=0),
    "update": lambda path, tree, new: convert(tree, path, small_recipe("shards"), workers=0, update=True),
    "overwrite": lambda path, tree, new: convert(tree, path, small_recipe("dali"), workers=0, overwrite=True),
}


@pytest.fixture
def victim(tmp_path: Path, converted: dict[str, Path]) -> Path:
    """A folder of the user's, with files of the names that `train` and a number make."""
    (tmp_path / "user").mkdir()
    for shard in open_dataset(converted["shards"]).manifest.shards:
        (tmp_path / "user" / shard.file_name).write_bytes(THESIS)
    return tmp_path / "user"


@pytest.mark.parametrize("split", ["absolute", "relative"])
@pytest.mark.parametrize("name", CONSUMERS)
def test_nothing_outside_is_touched(
    name: str, split: str, victim: Path, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    lead_away(path, f"{victim}/train" if split == "absolute" else "../user/train")
    before = contents(tmp_path)
    with pytest.raises(DatasetError, match="splits"):
        CONSUMERS[name](path, raw_tree, tmp_path / "new")
    (tmp_path / ".set.precache-lock").unlink(missing_ok=True)
    assert contents(tmp_path) == before


def test_nothing_outside_is_written_by_a_pull_or_believed_by_a_push(
    victim: Path, converted: dict[str, Path], bucket: Url, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    lead_away(path, f"{victim}/train")
    store = ObjectStore(bucket / "set")
    for file in path.iterdir():
        store.upload(file, f"{victim}/{file.name}" if file.name.startswith("train") else file.name)
    before = contents(victim)
    with pytest.raises(DatasetError, match="splits"):
        pull(bucket / "set", tmp_path / "copy")
    with pytest.raises(DatasetError, match="splits"):
        push(path, bucket / "other")
    with pytest.raises(DatasetError, match="unknown which files are that dataset's: remove it yourself"):
        push(converted["shards"], bucket / "set")
    assert contents(victim) == before


# What it says has its type.


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tree with splits that was updated, with a reject and an ignored file; and a table with fields."""
    base = tmp_path_factory.mktemp("described")
    for number in range(12):
        _picture(
            base / "tree" / ("train", "val")[number % 3 == 0] / "ab"[number % 2] / f"{number}.png", number
        )
    (base / "tree/train/a/broken.jpg").write_bytes(b"broken")
    (base / "tree/train/notes.txt").write_text("a file")
    recipe = Recipe(format="shards", size=8, shard_bytes=3 * 8 * 8 * 3)
    convert(base / "tree", base / "of tree", recipe, workers=0, max_rejects=0.5)
    (base / "tree/val/a/0.png").unlink()
    _picture(base / "tree/val/b/new.png", 20)
    convert(base / "tree", base / "of tree", recipe, workers=0, max_rejects=0.5, update=True)
    rows = [
        {"image": f"tree/val/{name}.png", "label": "cd"[number % 2], "n": number, "box": [[1, 2, 3, 4]]}
        for number, name in enumerate(("b/3", "a/6", "b/9"))
    ]
    (base / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"label": "label", "fields": ("n", "box"), "boxes": "box"}
    convert(base / "table.jsonl", base / "of table", Recipe(format="dali", size=8), workers=0, **options)
    return {name: base / f"of {name}" for name in ("tree", "table")}


def _picture(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(path)


VALUES: tuple[Any, ...] = (
    10**400, "\ud800", None, True, 0, -1, 1.5, float("nan"), "", [], [1], ["x"], {}, {"x": 1}
)  # fmt: skip
"""Of every type; the first that an entry takes is put to use."""
GONE = object()


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a JSON value; of a list, its first."""
    lists = value[:1] if isinstance(value, list) else ()
    for key, part in value.items() if isinstance(value, dict) else enumerate(lists):
        yield (*place, key)
        yield from _places(part, (*place, key))


def _with(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = within = json.loads(json.dumps(content))
    for key in place[:-1]:
        within = within[key]
    if value is GONE:
        del within[place[-1]]
    else:
        within[place[-1]] = value
    return changed


def _use(path: Path, new: Path) -> None:
    """What anybody does who has opened a dataset."""
    dataset = open_dataset(path)
    for use in (
        lambda: inspection.facts(dataset),
        lambda: json.dumps(inspection.summary(dataset.manifest)),
        dataset.manifest.to_flags,
        lambda: verify(path),
        lambda: dataset.open_index("train"),
        lambda: export(path, new / "tree", workers=0),
        lambda: convert(path, new / "set", Recipe(format="shards", size=8), workers=0),
        lambda: convert(path.parent / "tree", shutil.copytree(path, new / "grown"), dataset.manifest.recipe,
                        workers=0, max_rejects=0.5, update=True),
    ):  # fmt: skip
        with contextlib.suppress(PrecacheError), contextlib.redirect_stdout(io.StringIO()):
            use()
        shutil.rmtree(new, ignore_errors=True)


@pytest.mark.parametrize("name", ["tree", "table"])
def test_every_value_is_refused_or_can_be_used(name: str, described: dict[str, Path], tmp_path: Path) -> None:
    """Of each entry of a manifest whose checksum fits: another value has its type, or is never seen."""
    path = described[name]  # of this test alone
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    content["made_by"] = {"pillow": "1"}  # one stands for all of them
    content["updates"] = [{**update, "made_by": {}} for update in content["updates"]]
    used = set()
    for place in _places(content):
        for value in (*VALUES, GONE) if place != ("checksum",) else ():
            changed = _with(content, place, value)
            if json.dumps(changed) == json.dumps(content):
                continue
            write_sealed(path, changed)
            try:
                open_dataset(path)
            except DatasetError:
                continue
            same = value is GONE or type(value) is type(reduce(getitem, place, content))
            assert same, f"{place} may be {value!r}"
            if place not in used:
                _use(path, tmp_path / "new")
                used.add(place)


@pytest.mark.parametrize("name", ["read", "smaller"])
@pytest.mark.parametrize(
    "changes", [{"size": 1}, {"size": 47}, {"size": 49}, {"channels": "grey"}, {"channels": "rgba"}], ids=str
)
def test_a_recipe_that_the_pictures_do_not_follow_is_refused(
    changes: dict[str, Any], name: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Its checksum fits, and every value has its type."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "set"))
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    edit_manifest(path, recipe={**content["recipe"], **changes})
    recipe = Recipe(format="dali", size=1, fit="crop" if name == "smaller" else "keep")
    with pytest.raises(DatasetError, match=r"first: 0.*, holds no \d+x\d+ pixels of "):
        convert(path, tmp_path / "new", recipe, workers=0)


def test_no_depth_of_its_json_is_a_bug(described: dict[str, Path]) -> None:
    """What Python can read, it cannot always write: the limit is one of the stack."""
    path = described["table"]
    text = (path / MANIFEST_NAME).read_text()
    for depth in range(700, 1020):
        nested = f'{{"x": {"[" * depth}{"]" * depth},'
        (path / MANIFEST_NAME).write_text(text.replace("{", nested, 1))
        with pytest.raises(DatasetError):
            open_dataset(path)
