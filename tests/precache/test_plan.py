import pytest

from precache.errors import SettingError
from precache.plan import plan_conversion
from precache.recipe import FORMAT_NAMES, Recipe
from precache.source import SampleRef

SAMPLES = tuple(SampleRef(i, f"c/{i}.jpg", i % 3, 1) for i in range(100))


def recipe(**settings: object) -> Recipe:
    return Recipe(**{"format": "shards", "size": 8, "shard_bytes": 8 * 8 * 3 * 7, **settings})


def test_every_sample_is_in_exactly_one_shard() -> None:
    plan = plan_conversion(SAMPLES, recipe())
    ids = [sample.id for shard in plan.shards for sample in shard.samples]
    assert sorted(ids) == list(range(100))
    assert ids != sorted(ids)


def test_shards_are_near_equal_and_within_their_bytes() -> None:
    counts = {len(shard.samples) for shard in plan_conversion(SAMPLES, recipe()).shards}
    assert max(counts) <= 7
    assert max(counts) - min(counts) <= 1


def test_the_plan_is_the_same_for_every_format_and_differs_by_seed() -> None:
    plans = [plan_conversion(SAMPLES, recipe(format=name)).shards for name in FORMAT_NAMES]
    assert plans[0] == plans[1] == plans[2]
    assert plan_conversion(SAMPLES, recipe(seed=1)).shards != plans[0]


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
        ("seed", -1, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_a_bad_setting_names_field_value_and_choices(setting: str, value: object, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        recipe(**{setting: value})
    assert str(caught.value) == message


def test_a_recipe_survives_json() -> None:
    assert Recipe(**recipe().to_json()) == recipe()
