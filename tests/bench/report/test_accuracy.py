"""The statistics of trainings, the sentences that follow, the table and the page."""

from typing import Any

import numpy as np
import pytest

from bench.report.accuracy import (
    BETTER,
    CANNOT_TELL,
    SAME,
    WORSE,
    Compared,
    answers,
    cdf,
    compare,
    holm,
    html,
    interval,
    p_value,
    quantile,
    sentence,
)
from tests.bench.rich_result import HOSTILE


def line(source: str, seed: int, top1: float, **more: Any) -> dict[str, Any]:
    recipe = {"model": "resnet10", "size": 64, "epochs": 2, "batch_size": 64, "lr": 0.2, "amp": "bf16"}
    machine = {"date": "2026-11-22", "cpu": "Xeon, 2 CPUs", "memory": "24 GiB", "accelerator": "none"}
    told = {"arm": source, "seed": seed, "conditions": {**recipe, "workers": 2, "threads": 1}}
    told |= {"source": {"described": f"shards on {source}"}, "machine": machine, "train_s": 20.0}
    told |= {"curve": [[1, top1 / 2, 10.0], [2, top1, 20.0]], "other_cpu": 0.01, "steps": 94, "classes": 102}
    return {**told, **more}


def lines(name: str = "crop", **more: Any) -> list[dict[str, Any]]:
    baseline = [line("imagefolder", seed, 60 + seed / 10, train_s=50.0, **more) for seed in range(3)]
    return [*baseline, *(line(name, seed, 60.2 - seed / 10, **more) for seed in range(3))]


def beside(baseline: list[float], top1: list[float]) -> Compared:
    both = {"imagefolder": baseline, "crop": top1}
    (found,) = compare([line(name, seed, v) for name in both for seed, v in enumerate(both[name])], 1.0)
    return found


def test_quantiles_intervals_and_holms_p_values_are_those_of_the_books() -> None:
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    for share, degrees, expected in ((0.975, 1, 12.706), (0.95, 3, 2.353), (0.975, 100, 1.984)):
        assert quantile(share, degrees) == pytest.approx(expected, abs=6e-4)
        assert cdf(-expected, degrees) == pytest.approx(1 - share, abs=1e-4)
    runs = np.random.default_rng(17).normal(0.3, 0.8, (4000, 3))
    covered = [low <= 0.3 <= high for low, high in (interval(run.tolist()) for run in runs)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)
    values = [0.2, -0.1, 0.4, 0.3, 0.5]
    assert min(map(abs, interval(values, level=1 - p_value(values)))) == pytest.approx(0, abs=1e-9)
    adjusted = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "b": 0.03, "c": 0.06, "a": 0.06})  # Holm (1979), section 3


def test_the_verdict_is_that_of_the_interval_of_differences_paired_by_seed() -> None:
    for top1, verdict in (
        ([60.1, 61.0, 59.9, 60.4, 60.2], SAME),
        ([57.0, 58.4, 57.1, 57.0, 57.9], WORSE),
        ([63.0, 64.4, 63.1, 63.0, 63.9], BETTER),
        ([58.0, 63.0, 59.0, 61.5, 60.0], CANNOT_TELL),
    ):
        found = beside([60.0, 61.2, 59.8, 60.3, 60.4], top1)
        assert found.verdict == verdict
        assert (found.low > 0, found.high < 0) == (verdict == BETTER, verdict == WORSE)
    assert beside([50.0, 60.0, 70.0], [49.5, 59.51, 69.49]).verdict == WORSE  # though seeds differ more


def test_among_many_sources_one_that_is_hardly_worse_may_be_chance() -> None:
    rng = np.random.default_rng(0)
    trained = [line("imagefolder", seed, 60.0) for seed in range(5)]
    for number in range(9):
        trained += [line(f"same{number}", seed, 60 + rng.normal(0, 0.3)) for seed in range(5)]
    trained += [line("hardly", seed, top1) for seed, top1 in enumerate((59.9, 59.5, 59.8, 59.4, 59.5))]
    assert "by chance in" in sentence(compare(trained, 1.0)[-1])


def test_the_page_has_every_training_and_nothing_is_told_of_models_that_learnt_nothing() -> None:
    for more, said in (
        ({}, "is as good as"),
        ({"classes": 3}, "Nothing can be told"),
        ({"other_cpu": 0.4}, "took 40%"),
    ):
        assert said in answers(lines(**more), 1.0)[-1]
    drawn = html(lines(HOSTILE), 1.0)
    assert HOSTILE not in drawn
    assert drawn.count("60.20%") == 2
    assert drawn.count('"mode":"lines"') == 2 * (3 + 1)  # each seed and the mean
