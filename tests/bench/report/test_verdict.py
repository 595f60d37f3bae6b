from dataclasses import replace

import pytest

from bench.report.stats import Estimate
from bench.report.verdict import (
    COLD_FETCH,
    KEEPS_UP,
    LOADER_BINDS,
    NO_TRAINER,
    NOT_DISTINGUISHABLE,
    Change,
    Measured,
    advise,
    binding,
    judge,
    lost_share,
    stage_rates,
    stalls,
)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Estimate(0.50, 0.48, 0.52), LOADER_BINDS),
        (Estimate(1.00, 0.99, 1.01), KEEPS_UP),
        (Estimate(0.985, 0.984, 0.986), KEEPS_UP),  # told apart, but negligible
        (Estimate(0.97, 0.969, 0.971), LOADER_BINDS),
        (Estimate(0.56, 0.34, 1.00), NOT_DISTINGUISHABLE),  # one repeat kept up
        (Estimate(1.10, 1.09, 1.11), KEEPS_UP),
        (None, NO_TRAINER),
    ],
)
def test_judge(ratio: Estimate | None, verdict: str) -> None:
    assert judge(ratio) == verdict


def test_lost_share_is_never_negative() -> None:
    assert lost_share(Estimate(0.75, 0.7, 0.8)) == 0.25
    assert lost_share(Estimate(1.2, 1.1, 1.3)) == 0


def at(rate: float, spread: float = 0.02) -> Estimate:
    return Estimate(rate, rate * (1 - spread), rate * (1 + spread))


def pipeline(**rates: float | None) -> Measured:
    """One that decodes at 1,150 images/s and feeds a trainer of 2,480, unless told otherwise."""
    given = {
        "loader": 1_150.0, "trainer": 2_480.0, "together": 1_140.0, "transfer": 90_000.0,
        "read": 40_000.0, "decode": 1_300.0, **rates,
    }  # fmt: skip
    made = {name: at(rate) for name, rate in given.items() if rate is not None}
    if "trainer" in made and "together" in made:
        share = made["together"].median / made["trainer"].median
        made["ratio"] = Estimate(share, share - 0.01, share + 0.01)
    return Measured(**made)


@pytest.mark.parametrize(
    ("rates", "bound"),
    [
        ({}, "decode"),
        ({"read": 1_300, "decode": 40_000}, "storage"),
        ({"read": 40_000, "decode": 6_000}, "collate"),
        ({"transfer": 1_300, "decode": 40_000}, "transfer"),
        ({"transfer": 600, "together": 590}, "transfer"),
        ({"loader": 20_000, "decode": 22_000, "together": 2_470}, "compute"),
        ({"loader": 2_450, "decode": 2_700, "together": 2_400}, None),  # overlaps with the trainer
        ({"loader": 20_000, "decode": 22_000, "together": 1_500}, None),  # the parts contradict the whole
        ({"read": 2_500, "decode": 2_400}, None),  # two stages alike
        ({"trainer": None, "together": None}, "decode"),
        ({"cold": 300}, "storage"),
        ({"cold": 1_140}, "decode"),  # told apart from nothing: the disk is as fast as the cache
        ({"loader": 20_000, "decode": 22_000, "together": 2_470, "cold": 300}, "storage"),
    ],
)
def test_the_narrowest_stage_is_the_bottleneck(rates: dict[str, float | None], bound: str | None) -> None:
    measured = pipeline(**rates)
    assert binding(measured) == bound
    said = advise(measured, [])
    assert (bound is None) == ("no stage stands out" in said or "no single stage" in said)


def test_a_loader_whose_stages_cannot_be_run_apart_is_one_stage() -> None:
    measured = Measured(loader=at(1_000), trainer=at(2_000), together=at(990), ratio=at(0.495), does="decode")
    assert binding(measured) == "decode"
    assert stage_rates(measured) == {"decode": pytest.approx(1_000), "compute": 2_000}


@pytest.mark.parametrize(
    ("cold", "bound", "said"),
    [
        (None, "storage or decode", "the two cannot be told apart without --cold."),
        (990, "storage or decode", "the two cannot be told apart."),  # the loader itself read cold files
        (300, "storage", "storage is the bottleneck from a cold disk: 300"),
    ],
)
def test_storage_cannot_be_told_from_a_loader_of_one_stage_whose_files_were_not_warmed(
    cold: float | None, bound: str, said: str
) -> None:
    measured = Measured(
        loader=at(1_000), trainer=at(2_000), together=at(990), ratio=at(0.495), does="decode", warmed=False,
        cold=None if cold is None else at(cold),
    )  # fmt: skip
    assert binding(measured) == bound
    assert bound in stage_rates(measured)
    assert said in advise(measured, [])
    lost_s = stalls(measured, 64)
    assert ("fetch or prep" in lost_s) == (bound != "storage")
    lost_s.pop(COLD_FETCH, None)
    assert sum(lost_s.values()) == pytest.approx(64 / 990 - 64 / 2_000)


def test_a_loader_whose_stages_ran_apart_is_split_even_if_its_files_were_not_warmed() -> None:
    assert binding(replace(pipeline(), warmed=False)) == "decode"


def test_the_parts_of_a_loader_add_up_to_it() -> None:
    rates = stage_rates(pipeline())
    assert rates.pop("compute") == 2_480
    assert sum(1 / rate for rate in rates.values()) == pytest.approx(1 / 1_150)
    assert rates["decode"] == pytest.approx(1_300)


def test_the_whole_is_predicted_to_be_as_fast_as_its_slowest_part() -> None:
    assert pipeline().predicted == 1_150
    assert pipeline(loader=9_000).predicted == 2_480
    assert pipeline(transfer=700).predicted == 700
    assert pipeline(trainer=None, together=None).predicted is None


def test_stalls_are_what_the_trainer_loses() -> None:
    lost_s = stalls(pipeline(), 64)
    assert sum(lost_s.values()) == pytest.approx(64 / 1_140 - 64 / 2_480)
    assert lost_s["prep"] > 10 * lost_s["fetch"] > 0
    slow_disk = stalls(pipeline(read=1_300, decode=40_000), 64)
    assert slow_disk["fetch"] > 4 * slow_disk["prep"]
    assert sum(stalls(pipeline(loader=9_000, together=2_480), 64).values()) == pytest.approx(0)
    assert stalls(pipeline(trainer=None, together=None), 64) == {}


def test_what_a_cold_cache_adds_is_no_part_of_the_warm_stalls() -> None:
    cold = stalls(pipeline(cold=300), 64)
    assert cold.pop(COLD_FETCH) == pytest.approx(64 / 300 - 64 / 1_150)
    assert cold == stalls(pipeline(), 64)
    assert COLD_FETCH not in stalls(pipeline(cold=1_140), 64)


def test_the_advice_is_the_change_with_the_largest_gain_in_words_and_numbers() -> None:
    changes = [
        Change("Four workers", at(1_900), False),
        Change("Converting to shards", at(2_470), False, 6_000_000_000),
    ]
    assert advise(pipeline(), changes) == (
        "decoding is the bottleneck: 1,150 images/s against 2,480 of the trainer. Converting to shards is "
        "predicted to give 2,470; it takes 5.59 GiB."
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([Change("A", at(2_300), True), Change("B", at(2_480), False)], "B is predicted to give 2,480."),
        ([Change("A", at(2_450), True), Change("B", at(2_480), False)], "A gave 2,450."),
        (
            [Change("A", at(2_480), False, 6_000_000_000), Change("B", at(2_450), False)],
            "B is predicted to give 2,450.",
        ),
        ([Change("A", at(2_480), True, 10**9), Change("B", at(2_450), True)], "B gave 2,450."),
        ([Change("A", at(2_450), False), Change("B", at(2_480), False)], "B is predicted to give 2,480."),
    ],
)
def test_the_largest_gain_goes_first_then_a_measured_one_then_one_for_free(
    changes: list[Change], said: str
) -> None:
    assert advise(pipeline(), changes).endswith(said)


def test_a_change_that_overlaps_is_within_noise_and_none_is_said() -> None:
    wide = Change("Backend dali on data/dali", Estimate(1_400, 1_100, 1_900), True)
    assert "gave 1,400, no more than that within noise" in advise(pipeline(), [wide])
    assert "No change known here is predicted to gain." in advise(pipeline(), [Change("x", at(900), True)])


def test_where_the_trainer_is_the_bottleneck_no_loader_is_advised() -> None:
    measured = pipeline(loader=20_000, decode=22_000, together=2_470)
    said = advise(measured, [Change("Converting to shards", at(9_000), False)])
    assert said == (
        "the trainer itself is the bottleneck: it takes 2,480 images/s and the loader could give 20,000. "
        "Only a faster step would help."
    )
