"""Every kind of source keeps the contract; those of trees give what the tree gives, whatever it holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import open_source
from precache.sources.tree import scan_tree
from tests import source_contract as contract
from tests.precache.pictures.drawing import encoded
from tests.precache.sources.archives import JPEG, Files, files_of, put
from tests.source_contract import KINDS, Kind

PARTS = ("a", "b c", "\u00fc \u540d", "latin\udcef", "n" * 120, "tab\t'\"", ".hidden", "astral\U0001f600")
SAFE_PARTS = ("a", "b c", "\u00fc \u540d", "n" * 120, ".hidden", "astral\U0001f600")
ENDINGS = (".jpg", ".JPG", ".jpeg", ".png", ".txt", ".psd", ".svg", "", ".b.gif", ".sgi")
STARTS = (JPEG, b"\x89PNG\r\n\x1a\n", b"", b"text", b"\x01\xda\x00\x01", b"8BPS")


OF_DAMAGED = pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].damage], indirect=True)
OF_FILES = pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].is_tree], indirect=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def place(kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if kind.at_url:
        return request.getfixturevalue("bucket")
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_a_source_holds_its_pictures(
    kind: Kind, place: Any, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(raw_tree)
    made = kind.make(files, place)
    scan = kind.open(made).scan()
    contract.check_holds_the_pictures(kind, scan, files)
    contract.check_accounts_for_all(scan)
    contract.check_is_read_elsewhere(kind, scan)
    contract.check_says_the_same_again(kind.open(made))
    contract.check_is_never_written_to(kind.open(made))
    contract.check_refuses_options_of_others(made, kind)
    if kind.is_converted:
        contract.check_converts_as_its_tree(kind, made, converted["shards"], tmp_path / "out")
    if kind.change is not None:
        contract.check_names_what_changed(made, kind)


@OF_DAMAGED
@pytest.mark.parametrize("times", [15, pytest.param(500, marks=pytest.mark.faults)])
def test_damage_ends_in_one_line_or_in_what_is_stored(kind: Kind, place: Path, times: int) -> None:
    """Of a file by another program, too: the same is found in it, or an error."""
    files = {
        f"{'abc'[number % 3]}/{number}{name}.png": encoded(Image.new("RGB", (9, 7), (number * 40, 99, 0)))
        for number, name in enumerate(("", "", "", "", "long" * 20))
    }
    made = kind.make(files, place)
    contract.check_damage_ends_in_one_line_or_in_what_is_stored(kind, made, place, times)


def any_files(rng: np.random.Generator, parts: tuple[str, ...]) -> Files:
    """Files with strange names and contents, in class folders, in folders inside these, and beside them."""
    files = {"class/1.jpg": JPEG, "other/2.jpg": JPEG}
    for number in range(60):
        folders = [str(rng.choice(parts)) for _ in range(int(rng.choice([0, 1, 1, 1, 1, 2])))]
        name = f"{rng.choice(parts)}{number}{rng.choice(ENDINGS)}"
        files["/".join([*folders, name])] = STARTS[rng.integers(len(STARTS))] * int(rng.integers(1, 4))
    return files


@OF_FILES
@pytest.mark.parametrize(("seed", "prefix"), [(0, ""), (1, "train/")])
def test_what_a_tree_holds_any_other_place_of_its_files_holds(
    kind: Kind, place: Any, seed: int, prefix: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng((seed, 26))
    files = {f"{prefix}{name}": content for name, content in any_files(rng, SAFE_PARTS).items()}
    if kind.holds_any_name:
        files |= {f"{prefix}{name}": content for name, content in any_files(rng, PARTS).items()}
    if prefix:
        files["val/class/9.jpg"] = JPEG
    tree = scan_tree(put(tmp_path / "files", files))
    contract.check_is_as_the_tree(open_source(kind.make(files, place)).scan(), tree)


@pytest.mark.parametrize("make", contract.ROWS.values(), ids=contract.ROWS)
def test_columns_are_labels_splits_and_fields(make: Any, tmp_path: Path) -> None:
    contract.check_columns_are_labels_splits_and_fields(make, tmp_path)
