import pytest

from bench.measure.equal_work import Facts, check_facts, check_served
from bench.measure.run import Served
from precache.errors import DatasetError

WORK = Served(ids=48, images=48, shapes=("3x32x32 torch.uint8",))


def test_equal_work_is_compared() -> None:
    check_served({"pytorch on raw": WORK, "shards on shards": WORK})
    check_facts({"pytorch on raw": Facts(70, 5), "shards on shards": Facts(70, 5)})


@pytest.mark.parametrize(
    ("other", "numbers"),
    [
        (Served(40, 48, WORK.shapes), "48 images, 40 distinct ids"),
        (Served(48, 48, ("3x64x64 torch.uint8",)), "3x64x64 torch.uint8"),
        (Served(48, 48, ("3x32x32 torch.float32",)), "3x32x32 torch.float32"),
    ],
)
def test_unequal_work_is_refused_with_the_numbers(other: Served, numbers: str) -> None:
    with pytest.raises(DatasetError, match="unequal work") as raised:
        check_served({"pytorch on raw": WORK, "shards on shards": other})
    assert f"shards on shards: {numbers}" in str(raised.value) or numbers in str(raised.value)
    assert "pytorch on raw: 48 images, 48 distinct ids, 3x32x32 torch.uint8" in str(raised.value)


def test_trees_of_different_numbers_of_pictures_are_refused() -> None:
    with pytest.raises(DatasetError, match="a: 70 pictures; b: 60 pictures"):
        check_facts({"a": Facts(70, 5), "b": Facts(60, 5)})


def test_a_loader_with_a_recipe_of_its_own_may_serve_another_dtype_but_not_other_shapes() -> None:
    theirs = Served(47, 48, ("3x32x32 torch.float32",))
    check_served({"imagefolder on raw": theirs, "shards on shards": WORK}, {"imagefolder on raw"})
    larger = Served(48, 48, ("3x64x64 torch.float32",))
    with pytest.raises(DatasetError, match="3x64x64"):
        check_served({"imagefolder on raw": larger, "shards on shards": WORK}, {"imagefolder on raw"})
    fewer = Served(40, 40, theirs.shapes)
    with pytest.raises(DatasetError, match="40 images"):
        check_served({"imagefolder on raw": fewer, "shards on shards": WORK}, {"imagefolder on raw"})
