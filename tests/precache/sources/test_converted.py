"""What is peculiar to converted datasets as sources: what is kept, what is taken of them, what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from precache import Recipe, convert, export, open_dataset, verify_deep
from precache.errors import SettingError, SourceError
from precache.formats import FORMATS
from tests.conftest import IMAGES, small_recipe
from tests.precache.sources.archives import scan_of
from tests.precache.sources.objects import Items, picture
from tests.precache.sources.test_dataset import shards


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_recipe_gives_the_same_bytes_again(
    converted: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Pixels are exact; JPEGs are copied."""
    convert(converted[name], tmp_path / "again", small_recipe(name), workers=0)
    first, again = open_dataset(converted[name]), open_dataset(tmp_path / "again")
    for shard in first.manifest.shards:
        assert again.shard_path(shard).read_bytes() == first.shard_path(shard).read_bytes()
    before, after = first.read_index(), again.read_index()
    for column in ("paths", "source_sizes"):
        assert before[column].tolist() == after[column].tolist()


def test_targets_fields_and_splits_are_kept_and_of_a_subset_ids(tmp_path: Path) -> None:
    items = [
        {"image": picture(n), "label": [n % 3, 2], "caption": f"n° {n}", "part": "ab"[n % 2]}
        for n in range(9)
    ]
    dataset = Items(items, classes=["x", "y", "z"])
    named: dict[str, Any] = {"split": "part", "fields": ("caption",)}
    convert(dataset, tmp_path / "one", Recipe(format="shards", size=8), workers=0, **named)
    two = convert(
        tmp_path / "one", tmp_path / "two", Recipe(format="webdataset", size=4), workers=0, classes=("x",)
    )
    assert (two.manifest.target, two.manifest.classes, len(two.manifest.ignored)) == (
        "classes", ("x", "y", "z"), 6
    )  # fmt: skip
    index = {split: open_dataset(tmp_path / "two").read_index(split) for split in ("a", "b")}
    assert {split: sorted(found.ids.tolist()) for split, found in index.items()} == {"a": [0, 6], "b": [3]}
    assert index["b"].targets is not None
    assert (index["b"].targets.value(0), index["b"].fields["caption"].value(0)) == ([0, 2], "n° 3")
    (tmp_path / "ids.txt").write_text("6\n3\n")
    few = convert(
        tmp_path / "two",
        tmp_path / "few",
        Recipe(format="dali", size=4),
        workers=0,
        ids=str(tmp_path / "ids.txt"),
    )
    assert few.manifest.split_samples == {"a": 1, "b": 1}
    assert open_dataset(tmp_path / "few").read_index("a").ids.tolist() == [6]
    assert not verify_deep(tmp_path / "few", tmp_path / "two", workers=0).problems


def test_splits_are_those_of_the_source_unless_others_are_asked_for(raw_tree: Path, tmp_path: Path) -> None:
    def convert_to(name: str, source: Path, **settings: str) -> list[bytes]:
        convert(source, tmp_path / name, small_recipe("shards", size=8, **settings), workers=0)
        return shards(tmp_path / name)

    one = convert_to("one", raw_tree, splits="train=0.5,val=0.5")
    assert convert_to("kept", tmp_path / "one") == one
    other = {"splits": "train=0.9,test=0.1"}
    assert convert_to("new", tmp_path / "one", **other) == convert_to("direct", raw_tree, **other)


def test_what_is_rejected_and_left_out_stays_so(tree: Path, tmp_path: Path) -> None:
    victim = sorted((tree / "002.basket").iterdir())[0]
    victim.write_bytes(b"\xff\xd8\xff")
    (tree / "notes.txt").write_text("")
    convert(tree, tmp_path / "one", small_recipe("shards", size=8), workers=0, max_rejects=0.1)
    manifest = convert(tmp_path / "one", tmp_path / "two", small_recipe("dali", size=8), workers=0).manifest
    assert manifest.samples == IMAGES - 1
    assert {path for path, _ in manifest.ignored} == {"notes.txt", f"002.basket/{victim.name}"}


TAKEN: list[tuple[dict[str, Any], str]] = [
    ({"classes": ("002.basket",)}, ""),
    ({"ids": "7\n\n003.candle/003_0001.jpg\n7\n"}, ""),
    ({"classes": ("001.anchor",), "ids": "\n".join(map(str, range(IMAGES)))}, ""),
    ({"classes": ("002.baskt",)}, "no class '002.baskt' (did you mean '002.basket'?)"),
    ({"ids": "1\n70"}, "1 of these 2 samples are not in the dataset (first: '70')"),
    ({"ids": "001.anchor/001_0001.jpeg"}, "(first: '001.anchor/001_0001.jpeg')"),
    ({"ids": "\n \n"}, "one id or path per line"),
    ({"ids": None}, "one id or path per line"),
    ({"classes": ("001.anchor",), "ids": "69"}, "no sample has these classes and ids"),
]


@pytest.mark.parametrize(("options", "says"), TAKEN)
def test_samples_are_taken_by_class_and_by_a_list_or_named_with_what_would_do(
    options: dict[str, Any], says: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    named, asked = dict(options), set[str]()
    if "ids" in options:
        named["ids"] = str(tmp_path / "ids.txt")
        if options["ids"] is not None:
            asked = set(options["ids"].split())
            (tmp_path / "ids.txt").write_text(options["ids"])
    if says:
        with pytest.raises(SettingError) as caught:
            scan_of(converted["shards"], **named)
        assert says in str(caught.value)
        return
    scan = scan_of(converted["shards"], **named)
    expected = {
        ref.path
        for ref in scan_of(converted["shards"]).samples
        if scan.classes[ref.label] in options.get("classes", scan.classes)
        and (not asked or str(ref.id) in asked or ref.path in asked)
    }
    assert {ref.path for ref in scan.samples} == expected != set()
    assert len(scan.ignored) == IMAGES - len(expected)


def test_the_loss_of_a_second_jpeg_is_told_and_no_other(
    converted: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(converted["shards"], tmp_path / "first", small_recipe("dali"), workers=0)
    convert(converted["dali"], tmp_path / "pixels", small_recipe("shards"), workers=0)
    convert(converted["dali"], tmp_path / "copied", small_recipe("webdataset", quality=75), workers=0)
    assert not caplog.messages
    smaller = small_recipe("webdataset", quality=75, size=40)
    convert(converted["dali"], tmp_path / "second", smaller, workers=0)
    (line,) = caplog.messages
    assert "JPEG a second time, at quality 75" in line


def test_a_damaged_sample_is_a_reject_and_a_shard_that_disappears_is_named(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(converted["webdataset"], tmp_path / "source"))
    shard = source / "train-00002.tar"
    content = bytearray(shard.read_bytes())
    content[700] ^= 0xFF
    shard.write_bytes(content)
    result = convert(source, tmp_path / "out", small_recipe("shards", size=8), workers=0, max_rejects=0.05)
    (rejected,) = result.manifest.rejected
    assert "checksum" in rejected.reason
    shard.unlink()
    with pytest.raises(SourceError, match=r"train-00002\.tar: disappeared"):
        convert(source, tmp_path / "none", small_recipe("shards"), workers=0)


def test_16_bits_are_neither_converted_on_nor_exported(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", size=8, channels="grey", dtype="uint16")
    convert(raw_tree, tmp_path / "one", recipe, workers=0)
    with pytest.raises(SettingError, match="holds uint16 of channels grey"):
        convert(tmp_path / "one", tmp_path / "two", small_recipe("dali"), workers=0)
    with pytest.raises(SettingError, match="holds uint16; only uint8"):
        export(tmp_path / "one", tmp_path / "tree", workers=0)
