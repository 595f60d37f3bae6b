"""The permutation that is computed place by place."""

import numpy as np
import pytest

from loaders.order import KeyedPermutation

COUNT, KEYS = 1000, 2000


@pytest.mark.parametrize("count", [1, 2, 3, 5, 255, 256, 257, 1000, 65_537, 1 << 17, (1 << 17) + 1, 300_000])
def test_each_sample_comes_once_and_its_place_can_be_asked(count: int) -> None:
    places = np.arange(count)
    permutation = KeyedPermutation(count, (3, 1, 4))
    positions = permutation.at(places)
    assert np.array_equal(np.sort(positions), places)
    assert np.array_equal(permutation.places_of(positions), places)
    assert np.array_equal(permutation.at(places[::-7]), positions[::-7]), "any part, in any order"
    if count > 256:
        assert not np.array_equal(positions, KeyedPermutation(count, (3, 2, 4)).at(places))


@pytest.mark.parametrize("count", [10**9, (1 << 30) + 1, 10**12, 1 << 40])
def test_places_of_any_number_of_samples_can_be_asked(count: int) -> None:
    places = np.random.default_rng(0).integers(0, count, 50_000)
    permutation = KeyedPermutation(count, (0, 0, 1))
    positions = permutation.at(places)
    assert 0 <= positions.min() <= positions.max() < count
    assert np.array_equal(permutation.places_of(positions), places)
    assert abs(positions.mean() / count - 0.5) < 5 * 0.29 / np.sqrt(len(places))


def test_a_permutation_is_the_same_on_every_machine() -> None:
    assert KeyedPermutation(1000, (7, 1, 2)).at(np.arange(5)).tolist() == [546, 669, 875, 975, 354]
    assert KeyedPermutation(10**9, (7, 1, 2)).at(np.arange(5)).tolist() == [
        508507684,
        837948263,
        580567251,
        795006585,
        727330719,
    ]


def deviations(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """By how many of its standard deviations the chi-squared statistic is off."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """[keys, places]: permutations of 1,000 samples, a number at which hashes are the least random."""
    return np.stack([KeyedPermutation(COUNT, (key, 7)).at(np.arange(COUNT)) for key in range(KEYS)])


def test_each_sample_comes_anywhere_as_often(drawn: np.ndarray) -> None:
    seen = np.stack([np.bincount(column, minlength=COUNT) for column in drawn.T])
    assert abs(deviations(seen, KEYS / COUNT)) < 5


def test_what_comes_side_by_side_lies_as_far_apart_as_by_lot(drawn: np.ndarray) -> None:
    """Four rounds are off by 9 deviations."""
    apart = np.bincount(np.abs(np.diff(drawn)).ravel(), minlength=COUNT)[1:]
    of_lots = 2 * (COUNT - np.arange(1, COUNT)) / (COUNT * (COUNT - 1)) * KEYS * (COUNT - 1)
    assert abs(deviations(apart, of_lots)) < 5


def test_as_many_samples_stay_in_their_places_as_by_lot(drawn: np.ndarray) -> None:
    """One of each permutation, with a variance of one."""
    staying = (drawn == np.arange(COUNT)).sum(axis=1)
    assert abs(staying.mean() - 1) < 5 / np.sqrt(KEYS)
    assert abs(staying.var() - 1) < 5 * np.sqrt(3 / KEYS)


@pytest.mark.parametrize("bit", [0, 4, 5, 9])
def test_places_that_differ_in_one_bit_have_nothing_in_common(drawn: np.ndarray, bit: int) -> None:
    """Pairs of them, by tenths of the samples."""
    pairs = drawn[:, 5] // 100 * 10 + drawn[:, 5 ^ (1 << bit)] // 100
    assert abs(deviations(np.bincount(pairs, minlength=100), KEYS / 100)) < 5


def test_neighbouring_keys_have_nothing_in_common(drawn: np.ndarray) -> None:
    same = (drawn[1:] == drawn[:-1]).sum(axis=1)
    assert abs(same.mean() - 1) < 5 / np.sqrt(KEYS)
