import numpy as np
import pytest

from precache.errors import SettingError
from precache.plan import Grown, plan_conversion, plan_update, split_samples
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sources.base import SampleRef, Samples

SAMPLES = Samples.of([SampleRef(i, f"c/{i}.jpg", i % 3, 1) for i in range(100)])


def recipe(**settings: object) -> Recipe:
    return Recipe(**{"format": "shards", "size": 8, "fit": "crop", "shard_bytes": 8 * 8 * 3 * 7, **settings})


def test_every_sample_is_in_exactly_one_shard() -> None:
    plan = plan_conversion(SAMPLES, recipe())
    ids = [row for shard in plan.shards for row in shard.rows]
    assert sorted(ids) == list(range(100))
    assert ids != sorted(ids)


def test_shards_are_near_equal_and_within_their_bytes() -> None:
    counts = {len(shard.rows) for shard in plan_conversion(SAMPLES, recipe()).shards}
    assert max(counts) <= 7
    assert max(counts) - min(counts) <= 1


def test_the_plan_is_the_same_for_every_format_and_differs_by_seed() -> None:
    def rows(**settings: object) -> dict[str, list[int]]:
        return {s.name: s.rows.tolist() for s in plan_conversion(SAMPLES, recipe(**settings)).shards}

    plans = [rows(format=name) for name in FORMAT_NAMES]
    assert plans[0] == plans[1] == plans[2]
    assert rows(seed=1) != plans[0]


def test_a_sample_larger_than_a_shard_gets_one_of_its_own() -> None:
    assert len(plan_conversion(SAMPLES, recipe(shard_bytes=1)).shards) == 100


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("format", "sharks", "unknown format 'sharks'; choose from: dali, shards, webdataset"),
        ("size", 0, "size must be an integer from 1 to 8,192, got 0"),
        ("size", 8193, "size must be an integer from 1 to 8,192, got 8193"),
        ("size", True, "size must be an integer from 1 to 8,192, got True"),
        ("quality", 101, "quality must be an integer from 1 to 100, got 101"),
        ("shard_bytes", 0, "shard_bytes must be an integer of at least 1, got 0"),
        ("fit", "squash", "unknown fit 'squash'; choose from: crop, keep, keep-longer, pad, stretch"),
        ("resample", "nearest", "unknown resample 'nearest'; choose from: area, bicubic, bilinear, lanczos"),
        *(
            ("splits", bad, f"splits must be shares that sum to 1, as in 'train=0.8,val=0.2', got {bad!r}")
            for bad in ("train=0.8", "train", "train=0.8,train=0.2", "a=0.5,b=0.4", "a=1,b=0", "a=.,b=1", "")
        ),
        ("seed", -1, "seed must be an integer of at least 0, got -1"),
        ("decode", "half", "unknown decode 'half'; choose from: full, scaled"),
        ("allow_truncated", 1, "allow_truncated must be True or False, got 1"),
        *(
            ("background", bad, f"background must be a colour as 'black' or '#1e90ff', got {bad!r}")
            for bad in ("blackish", "#12", "#11223344", "", 7)
        ),
    ],
)
def test_a_bad_setting_names_field_value_and_choices(setting: str, value: object, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        recipe(**{setting: value})
    assert str(caught.value) == message


def test_a_recipe_survives_json() -> None:
    assert Recipe(**recipe().to_json()) == recipe()


@pytest.mark.parametrize("shares", [{"train": 0.8, "val": 0.2}, {"a": 0.5, "b": 0.3, "c": 0.2}, {"x": 1.0}])
def test_splits_are_stratified_seeded_and_within_one_sample_of_their_shares(shares: dict[str, float]) -> None:
    labels = np.array(sorted([*range(50)] * 7 + [3] * 4))
    split_of = split_samples(labels, list(shares.values()), seed=0)
    for index, share in enumerate(shares.values()):
        assert abs((split_of == index).sum() - share * len(labels)) <= 1
        for label in range(50):
            in_class = split_of[labels == label]
            assert abs((in_class == index).sum() - share * len(in_class)) <= 1
    assert np.array_equal(split_samples(labels, list(shares.values()), seed=0), split_of)
    if len(shares) > 1:
        assert not np.array_equal(split_samples(labels, list(shares.values()), seed=1), split_of)


def test_each_split_has_shards_of_its_own_name() -> None:
    plan = plan_conversion(SAMPLES, recipe(splits="train=0.8,val=0.2"))
    assert {shard.split for shard in plan.shards} == {"train", "val"}
    assert all(shard.name.startswith(f"{shard.split}-") for shard in plan.shards)
    counts = {split: sum(len(s.rows) for s in plan.shards if s.split == split) for split in ("train", "val")}
    assert counts == {"train": 80, "val": 20}


def test_splits_grow_by_their_shares_however_few_samples_come_at_a_time() -> None:
    shares = [0.7, 0.3]
    kept = [np.zeros(0, np.int64), np.zeros(0, np.int64)]
    for update in range(120):
        labels = np.array([update % 3, 2, 2][: 1 + update % 3])
        split_of = split_samples(labels, shares, seed=update, present=kept)
        kept = [np.concatenate((has, labels[split_of == split])) for split, has in enumerate(kept)]
        for label in range(3):
            counts = [np.count_nonzero(has == label) for has in kept]
            assert abs(counts[0] - 0.7 * sum(counts)) <= 1
    assert np.array_equal(split_samples(labels, shares, 1, kept), split_samples(labels, shares, 1, kept))


def test_a_split_that_lost_its_samples_gets_the_new_ones_first() -> None:
    kept = [np.zeros(80, np.int64), np.zeros(0, np.int64)]
    split_of = split_samples(np.zeros(20, np.int64), [0.8, 0.2], seed=0, present=kept)
    assert np.bincount(split_of, minlength=2).tolist() == [0, 20]


def test_an_update_continues_the_names_of_shards_and_writes_what_is_new_alone() -> None:
    grown = Grown(update=1, shards={"train": 15}, kept={"train": SAMPLES.labels})
    rows = np.arange(40, 60)
    plan = plan_update(SAMPLES, rows, recipe(), grown)
    assert [shard.name for shard in plan.shards] == ["train-00015", "train-00016", "train-00017"]
    written = np.concatenate([shard.rows for shard in plan.shards])
    assert sorted(written.tolist()) == rows.tolist() != written.tolist()
    other = plan_update(SAMPLES, rows, recipe(), Grown(update=2, shards={}, kept={}))
    assert [shard.rows.tolist() for shard in other.shards] != [shard.rows.tolist() for shard in plan.shards]
