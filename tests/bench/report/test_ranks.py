"""Result of several ranks: images/s together, and the slowest rank, unless that is noise."""

from bench.report.ranks import ALONE, IN_STEP, OWN_PACE, make_result
from bench.report.result import Result, Trial
from tests.bench.results import MACHINE

SETTINGS = {
    "ranks": 3, "trainers": ["emulated:1e3"], "launches": 0, "workers": None, "batch_size": 64,
    "size": 224, "repeats": 3, "augment": "eval", "data": {"data/shards": {"kind": "shards"}},
}  # fmt: skip


def make(own_of_rank_1: list[float]) -> Result:
    trials = []
    for rank in range(3):
        own = own_of_rank_1 if rank == 1 else [990.0, 1000.0, 1010.0]
        for kind, rates in ((ALONE, [1000.0] * 3), (OWN_PACE, own), (IN_STEP, [600.0, 610.0, 620.0])):
            if kind == ALONE and rank > 0:
                continue
            for repeat, rate in enumerate(rates):
                key = {"kind": kind, "backend": "shards", "data": "data/shards", "trainer": "emulated:1e3",
                       "ranks": 3, "rank": rank, "repeat": repeat}  # fmt: skip
                numbers = {"images_per_s": rate, "wait_share": 0.1 * rank, "page_cache_is_warm": 1.0}
                trials.append(Trial(key, numbers))
    return make_result(MACHINE, SETTINGS, trials, {})


def test_slowest_rank_is_named_unless_that_is_noise() -> None:
    for own, is_distinct in (
        ([620.0, 640, 660], True),
        ([880.0, 900, 1020], False),
        ([985.0, 986, 987], False),
    ):
        result = make(own)
        total = result.rows[1]
        assert total.values["fed_images_per_s"].median == 1830
        speedup = total.values["speedup"]
        assert (speedup.low, speedup.median, speedup.high) == (1.8, 1.83, 1.86)
        assert total.values["wait_share"].median == 0.2, "the rank that waits most"
        together, slowest = result.answer[0]
        assert "3 ranks in step train 1,830 images/s, 1.83" in together
        assert slowest.startswith("The slowest is rank 1: ")
        assert ("within noise" in slowest) != is_distinct
    assert [row.name for row in result.rows[2:]] == [f"shards, rank {rank} of 3" for rank in range(3)]
