"""Recipes, and plans made by them."""

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.errors import SettingError
from precache.formats import FORMATS
from precache.plan import plan_conversion, split_samples
from precache.recipe import Recipe, parse_splits, suggest_splits
from precache.sources.base import SampleList, Samples

PICTURE_BYTES = 8 * 8 * 3


def list_samples(labels: list[int], splits: Sequence[str] = ("",)) -> Samples:
    """Samples of these labels, in `splits` by turns."""
    listed = SampleList()
    for number in range(len(labels)):
        listed.add(f"{number}.jpg", file_bytes=1, split=splits[number % len(splits)])
    return listed.samples(np.array(labels, np.int64))


SAMPLES = list_samples([number % 3 for number in range(100)])
SHARES = st.sampled_from([{"train": 0.8, "val": 0.2}, {"a": 0.5, "b": 0.3, "c": 0.2}, {"x": 1.0}])


def recipe(**settings: object) -> Recipe:
    return Recipe(
        **{"format": "shards", "size": 8, "fit": "crop", "shard_bytes": 7 * PICTURE_BYTES, **settings}
    )


@settings(max_examples=25, deadline=None)
@given(SHARES, st.integers(1, 10 * PICTURE_BYTES), st.integers(0, 2**32))
def test_every_sample_is_in_one_shard_of_its_split(
    shares: dict[str, float], shard_bytes: int, seed: int
) -> None:
    splits = ",".join(f"{name}={share}" for name, share in shares.items())

    def plan_rows(name: str, seed: int) -> dict[tuple[str, str], list[int]]:
        """Return (split, shard) -> rows."""
        settings = recipe(format=name, splits=splits, shard_bytes=shard_bytes, seed=seed)
        shards = plan_conversion(SAMPLES, settings).shards
        return {(shard.split, shard.name): shard.rows.tolist() for shard in shards}

    plan = plan_rows("shards", seed)
    rows = [row for shard_rows in plan.values() for row in shard_rows]
    assert sorted(rows) == list(range(100))
    assert rows != sorted(rows)
    assert {split for split, _ in plan} == set(shares)
    assert all(name.startswith(f"{split}-") for split, name in plan)
    for split, share in shares.items():
        counts = [len(shard_rows) for (name, _), shard_rows in plan.items() if name == split]
        assert sum(counts) == round(100 * share)
        assert max(counts) <= max(1, shard_bytes // PICTURE_BYTES)
        assert max(counts) - min(counts) <= 1
    assert all(plan_rows(name, seed) == plan for name in FORMATS)
    assert plan_rows("shards", seed + 1) != plan


BAD_SETTINGS: dict[str, tuple[object, ...]] = {
    "format": ("sharks",),
    "size": (8193, (1, 2, 3), ()),
    "quality": (0, 101),
    "shard_bytes": (0,),
    "fit": ("squash",),
    "splits": ("train=0.8", "train=0.8,train=0.2", "a=1,b=0", ""),
    "background": ("#12", 7),
    "channels": ("gray", None),
}
INCOMPATIBLE_SETTINGS: list[tuple[dict[str, object], list[str]]] = [
    ({"fit": "keep", "size": (36, 60)}, ["keep", "one side"]),
    ({"fit": "crop", "enlarge": True}, ["crop", "keep and keep-longer"]),
]


def test_a_bad_setting_names_its_field_and_value() -> None:
    for setting, values in BAD_SETTINGS.items():
        for value in values:
            with pytest.raises(SettingError, match=rf"^(unknown )?{setting} ") as raised:
                recipe(**{setting: value})
            assert repr(value) in str(raised.value)


@pytest.mark.parametrize(("incompatible", "mentions"), INCOMPATIBLE_SETTINGS)
def test_incompatible_settings_are_named(incompatible: dict[str, object], mentions: list[str]) -> None:
    with pytest.raises(SettingError) as raised:
        recipe(**incompatible)
    assert [mention for mention in mentions if mention not in str(raised.value)] == []


SUGGESTIONS = {
    "0.8": "train=0.8,val=0.2", "0.8,0.2": "train=0.8,val=0.2", "80,20": "train=0.8,val=0.2",
    "80/20": "train=0.8,val=0.2", "8:2": "train=0.8,val=0.2", "90%": "train=0.9,val=0.1",
    "train=0.9": "train=0.9,val=0.1", "train:0.7, test:0.3": "train=0.7,test=0.3",
    "train=80,val=20": "train=0.8,val=0.2", "train 80% val 20%": "train=0.8,val=0.2",
    "val=0.3": "val=0.3,train=0.7", "0.7,0.2": "train=0.7,val=0.2,test=0.1",
    "train=1,val=0.25": "train=0.8,val=0.2",
    "a": "train=0.8,val=0.2", "train=1,val=0": "train=0.8,val=0.2",
}  # fmt: skip
"""Splits as people write them -> the suggested splits."""


def test_splits_that_do_not_sum_to_1_are_refused_with_a_suggestion() -> None:
    for text, suggestion in SUGGESTIONS.items():
        with pytest.raises(SettingError, match=f"'{suggestion}', got '{text}'"):
            recipe(splits=text)


@given(st.text("0123456789.,=:/% ab", max_size=12))
def test_suggested_splits_can_be_pasted(text: str) -> None:
    assert set(parse_splits(suggest_splits(text)).values()) <= {share / 10_000 for share in range(10_001)}


INTEGERS = {"size": 32, "quality": 90, "shard_bytes": 2**20, "seed": 3, "max_pixels": 10**6}


def test_integers_of_numpy_make_the_same_recipe() -> None:
    for kind in (np.int64, np.int32, np.array):
        converted = Recipe(format="dali", **{name: kind(value) for name, value in INTEGERS.items()})
        assert json.loads(json.dumps(converted.to_json())) == Recipe(format="dali", **INTEGERS).to_json()
    assert Recipe(format="dali", fit="crop", size=(np.int64(4), np.int64(4))).size == 4


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_setting_refuses_other_types(name: str) -> None:
    value = INTEGERS[name]
    for wrong in (True, np.True_, float(value), np.float64(value), str(value)):
        with pytest.raises(SettingError, match=name):
            recipe(**{name: wrong})


@given(SHARES, st.lists(st.integers(-1, 4), min_size=1, max_size=300), st.integers(0, 9))
def test_splits_are_stratified_seeded_and_within_a_sample_of_their_shares(
    shares: dict[str, float], labels: list[int], seed: int
) -> None:
    sample_labels, split_shares = np.array(labels), list(shares.values())
    split_of = split_samples(sample_labels, split_shares, seed)
    assert np.array_equal(split_samples(sample_labels, split_shares, seed), split_of)
    for members in (slice(None), *(sample_labels == label for label in range(-1, 5))):
        splits = split_of[members]
        for split, share in enumerate(split_shares):
            assert abs((splits == split).sum() - share * len(splits)) <= 1


@pytest.mark.parametrize("source", [("",), ("train",), ("train", "val")])
def test_shares_divide_only_samples_of_a_single_split(source: tuple[str, ...]) -> None:
    samples = list_samples([0] * 20, source)
    if len(source) > 1:
        with pytest.raises(SettingError, match="train, val"):
            plan_conversion(samples, recipe(splits="a=0.5,b=0.5"))
    else:
        plan = plan_conversion(samples, recipe(splits="a=0.5,b=0.5"))
        assert Counter(shard.split for shard in plan.shards for _ in shard.rows) == {"a": 10, "b": 10}
    plan = plan_conversion(samples, recipe())
    assert {shard.split for shard in plan.shards} == ({"train"} if source == ("",) else {*source})
