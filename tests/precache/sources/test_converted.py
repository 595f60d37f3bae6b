import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache import Recipe, SourceOptions, convert, export, open_dataset, verify_deep
from precache.dataset.converted import ConvertedDataset
from precache.errors import PrecacheError, SettingError, SourceError
from precache.formats import FORMATS
from precache.sources import open_source
from tests.conftest import IMAGES, small_recipe
from tests.faults.mutations import spoil
from tests.format_contract import stored
from tests.precache.sources.objects import Items
from tests.precache.sources.test_dataset import picture, shards

DAMAGES = 90


def pixels(dataset: ConvertedDataset) -> dict[int, bytes]:
    return {sample.id: sample.pixels(path).tobytes() for path, sample in stored(dataset)}


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
    assert [before[name].tolist() for name in ("paths", "source_sizes")] == [
        after[name].tolist() for name in ("paths", "source_sizes")
    ]
    assert not verify_deep(tmp_path / "again", converted[name], workers=0).problems


def test_targets_fields_and_splits_are_kept(tmp_path: Path) -> None:
    items = [
        {"image": picture(n), "label": [n % 3, 2], "caption": f"n° {n}", "part": "ab"[n % 2]}
        for n in range(9)
    ]
    dataset = Items(items, classes=["x", "y", "z"])
    recipe = Recipe(format="shards", size=8)
    convert(dataset, tmp_path / "one", recipe, workers=0, split="part", fields=("caption",))
    convert(tmp_path / "one", tmp_path / "two", Recipe(format="webdataset", size=4), workers=0)
    one, two = (open_dataset(tmp_path / name) for name in ("one", "two"))
    assert two.manifest.target == "classes"
    for split in ("a", "b"):
        before, after = one.read_index(split), two.read_index(split)
        assert before.ids.tolist() == after.ids.tolist()
        assert before.targets is not None
        assert after.targets is not None
        assert before.targets.content() == after.targets.content()
        assert before.fields["caption"].content() == after.fields["caption"].content()
    taken = open_source(tmp_path / "one", SourceOptions(classes=("x",))).scan()
    assert taken.samples.ids.tolist() == [0, 3, 6]


def test_splits_are_those_of_the_source_unless_others_are_asked_for(raw_tree: Path, tmp_path: Path) -> None:
    halves = "train=0.5,val=0.5"
    convert(raw_tree, tmp_path / "one", small_recipe("shards", splits=halves), workers=0)
    convert(tmp_path / "one", tmp_path / "kept", small_recipe("shards"), workers=0)
    convert(
        tmp_path / "one", tmp_path / "new", small_recipe("shards", splits="train=0.9,test=0.1"), workers=0
    )
    assert shards(tmp_path / "kept") == shards(tmp_path / "one")
    direct = small_recipe("shards", splits="train=0.9,test=0.1")
    convert(raw_tree, tmp_path / "direct", direct, workers=0)
    assert shards(tmp_path / "new") == shards(tmp_path / "direct")


def test_a_subset_keeps_ids_and_labels_and_counts_the_others_as_ignored(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    where = SourceOptions(classes=("002.basket", "004.drum"))
    manifest = convert(
        converted["webdataset"], tmp_path / "out", small_recipe("shards"), workers=0, options=where
    ).manifest
    whole = open_dataset(converted["webdataset"])
    index = whole.read_index()
    wanted = index.ids[np.isin(index.labels, [1, 3])]
    assert sorted(open_dataset(tmp_path / "out").read_index().ids.tolist()) == sorted(wanted.tolist())
    assert manifest.classes == whole.manifest.classes
    assert len(manifest.ignored) == IMAGES - len(wanted)
    assert not verify_deep(tmp_path / "out", converted["webdataset"], workers=0).problems
    # and a subset of that, by a list
    ids = sorted(wanted.tolist())[:3]
    (tmp_path / "ids.txt").write_text("\n".join(map(str, ids)))
    convert(
        tmp_path / "out", tmp_path / "few", small_recipe("dali"), workers=0, ids=str(tmp_path / "ids.txt")
    )
    assert sorted(open_dataset(tmp_path / "few").read_index().ids.tolist()) == ids


def test_what_is_rejected_and_left_out_stays_so(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    victim = sorted((tree / "002.basket").iterdir())[0]
    victim.write_bytes(b"\xff\xd8\xff")
    (tree / "notes.txt").write_text("")
    convert(tree, tmp_path / "one", small_recipe("shards"), workers=0, max_rejects=0.1)
    manifest = convert(tmp_path / "one", tmp_path / "two", small_recipe("dali"), workers=0).manifest
    assert manifest.samples == IMAGES - 1
    assert {path for path, _ in manifest.ignored} == {"notes.txt", f"002.basket/{victim.name}"}


TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "one class": ({"classes": ("002.basket",)}, ""),
    "ids and paths": ({"ids": "7\n\n003.candle/003_0001.jpg\n7\n"}, ""),
    "of both": ({"classes": ("001.anchor",), "ids": "\n".join(map(str, range(IMAGES)))}, ""),
    "no such class": ({"classes": ("002.baskt",)}, "no class '002.baskt' (did you mean '002.basket'?)"),
    "no such id": ({"ids": "1\n70"}, "1 of these 2 samples are not in the dataset (first: '70')"),
    "no such path": ({"ids": "001.anchor/001_0001.jpeg"}, "(first: '001.anchor/001_0001.jpeg')"),
    "nothing": ({"ids": "\n \n"}, "lists nothing; write one id or path per line"),
    "nothing of both": ({"classes": ("001.anchor",), "ids": "69"}, "no sample has these classes and ids"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_samples_are_taken_by_class_and_by_a_list_or_named_with_what_would_do(
    case: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    options, says = TAKEN[case]
    asked = set(options.get("ids", "").split())
    if asked:
        (tmp_path / "ids.txt").write_text(options["ids"])
    elif "ids" in options:
        (tmp_path / "ids.txt").write_text(" \n")
    ids = {"ids": str(tmp_path / "ids.txt")} if "ids" in options else {}
    source = open_source(converted["shards"], SourceOptions(**{**options, **ids}))
    if says:
        with pytest.raises(SettingError) as caught:
            source.scan()
        assert says in str(caught.value)
        return
    scan = source.scan()
    taken = {ref.path for ref in scan.samples}
    expected = {
        ref.path
        for ref in open_source(converted["shards"]).scan().samples
        if scan.classes[ref.label] in options.get("classes", scan.classes)
        and (not asked or str(ref.id) in asked or ref.path in asked)
    }
    assert taken == expected != set()
    assert len(scan.ignored) == IMAGES - len(taken)


@pytest.mark.parametrize("path", ["nowhere.txt", "a\0b"])
def test_a_list_that_cannot_be_read_is_named(converted: dict[str, Path], path: str) -> None:
    with pytest.raises(SettingError, match=r"--ids .*cannot be read .*one id or path per line"):
        open_source(converted["shards"], SourceOptions(ids=path)).scan()


@pytest.mark.parametrize("settings", [{}, {"fit": "keep", "enlarge": True}])
def test_enlarging_is_refused(
    converted: dict[str, Path], tmp_path: Path, settings: dict[str, object]
) -> None:
    with pytest.raises(SettingError, match=r"size 49 is more than the 48x48 that .* stores"):
        convert(converted["shards"], tmp_path / "out", small_recipe("dali", size=49, **settings), workers=0)
    assert not (tmp_path / "out").exists()


def test_the_defaults_keep_smaller_pictures_as_they_are(converted: dict[str, Path], tmp_path: Path) -> None:
    convert(converted["dali"], tmp_path / "out", Recipe(format="shards"), workers=0)
    assert pixels(open_dataset(tmp_path / "out")) == pixels(open_dataset(converted["dali"]))


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
    assert "is written as JPEG a second time, at quality 75, which costs" in line


def test_a_damaged_sample_is_a_reject_that_names_its_shard(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(converted["webdataset"], tmp_path / "source"))
    shard = source / "train-00002.tar"
    content = bytearray(shard.read_bytes())
    content[700] ^= 0xFF
    shard.write_bytes(content)
    result = convert(source, tmp_path / "out", small_recipe("shards"), workers=0, max_rejects=0.05)
    (rejected,) = result.manifest.rejected
    assert "its bytes changed since they were written (checksum)" in rejected.reason
    shard.unlink()
    with pytest.raises(SourceError, match=r"train-00002\.tar: disappeared"):
        convert(source, tmp_path / "none", small_recipe("shards"), workers=0)


def test_damaged_datasets_end_in_one_line_or_in_what_was_stored(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    """Mutated by seed; what is read of a sample is what was stored, or an error."""
    for name in FORMATS:
        source = Path(shutil.copytree(converted[name], tmp_path / name))
        whole = open_source(source).scan()
        right = {ref.id: _content(whole.source.read(ref, 10**6)) for ref in whole.samples}
        files = sorted(path for path in source.iterdir() if path.is_file())
        for seed in range(DAMAGES // len(FORMATS)):
            draw = random.Random(seed)
            victim = draw.choice(files)
            before = victim.read_bytes()
            victim.write_bytes(spoil(before, draw))
            says = ""
            try:
                scan = open_source(source).scan()
                for ref in scan.samples:
                    assert _content(scan.source.read(ref, 10**6)) == right[ref.id], (name, seed)
            except PrecacheError as error:
                says = str(error)
            assert "\n" not in says, (name, seed)
            victim.write_bytes(before)


def _content(picture: object) -> bytes:
    return picture if isinstance(picture, bytes) else picture.tobytes()  # type: ignore[attr-defined]


def test_16_bits_are_neither_converted_on_nor_exported(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", channels="grey", dtype="uint16")
    convert(raw_tree, tmp_path / "one", recipe, workers=0)
    with pytest.raises(
        SettingError, match="holds uint16 of channels grey, which can only be converted from the orig"
    ):
        convert(tmp_path / "one", tmp_path / "two", small_recipe("dali"), workers=0)
    with pytest.raises(SettingError, match=r"holds uint16; only uint8 can be exported"):
        export(tmp_path / "one", tmp_path / "tree", workers=0)
    dataset = open_dataset(tmp_path / "one")
    places = FORMATS["shards"].find_samples(dataset.shard_path(dataset.manifest.shards[0]))
    assert set(places[:, 1].tolist()) == {48 * 48 * 2}
