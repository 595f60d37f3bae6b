"""What `bench recommend` says to do, from predictions that can be worked out on paper."""

from dataclasses import replace

import pytest
from bench.report.advice import answer, busy_share, rule

from bench.report import forecast as model
from bench.report.forecast import Prediction
from tests.bench.report.test_forecast import INPUTS, RAW, SHARDS, TARS, TODAY


def predictions(**changes: float) -> tuple[list[Prediction], model.Inputs]:
    inputs = replace(INPUTS, **changes)
    return model.predict([TODAY, RAW, SHARDS, TARS], inputs), inputs


def test_the_answer_says_what_each_step_brings_and_costs() -> None:
    assert answer(*predictions()) == (
        "ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 30% of the time. "
        "Change that line to `loaders.build`: it is busy 50%, and training ends 1.7 times sooner than today. "
        "Convert to shards (7.00 s, 1.12 GiB), too: it is busy 100%, and training ends 3.3 times sooner than "
        "today. Converting pays after 1 epoch."
    )
    assert "keep 2 accelerators of 2,000 images/s busy 15%" in answer(*predictions(gpus=2))


def test_where_imagefolder_keeps_up_nothing_is_changed() -> None:
    assert answer(*predictions(trainer_images_per_s=500)) == (
        "ImageFolder and DataLoader already keep an accelerator of 500 images/s busy 100% of the time: "
        "neither another loader nor converting gains anything."
    )


def test_where_the_other_line_is_enough_nothing_is_converted() -> None:
    assert answer(*predictions(trainer_images_per_s=1000)) == (
        "ImageFolder and DataLoader keep an accelerator of 1,000 images/s busy 60% of the time. Change that "
        "line to `loaders.build`: it is busy 100%, and training ends 1.7 times sooner than today. "
        "Converting gains no more."
    )


def test_where_nothing_is_faster_nothing_is_advised() -> None:
    found, inputs = predictions()
    alike = [replace(one, trained_images_per_s=1000.0) for one in found]
    assert answer(alike, inputs) == (
        "ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 50% of the time. "
        "Neither another loader nor converting would train more than 2% faster."
    )


def test_a_tree_that_imagefolder_refuses_has_the_other_line_as_its_baseline() -> None:
    found = model.predict([RAW, SHARDS, TARS], INPUTS)
    assert answer(found, INPUTS) == (
        "`loaders.build` keeps an accelerator of 2,000 images/s busy 50% of the time. Convert to shards "
        "(7.00 s, 1.12 GiB): it is busy 100%, and training ends 2.0 times sooner than today. "
        "Converting pays after 3 epochs."
    )


@pytest.mark.parametrize(("name", "rate"), [("shards", 900.0), ("raw tree", 550.0)])
def test_repeats_that_disagree_are_said_to(name: str, rate: float) -> None:
    found, inputs = predictions(trainer_images_per_s=2000 if name == "shards" else 1000)
    slow = [replace(one, trained_images_per_s=rate) if one.name == name else one for one in found]
    assert answer(found, inputs, [found, found]) == answer(found, inputs)
    said = answer(found, inputs, [found, slow])
    assert "Unclear, within noise: whether" in said
    assert said.endswith("the 2 repeats disagree.")


def test_the_rule_has_this_trees_figures() -> None:
    found, inputs = predictions()
    assert rule(found, inputs, 600e6) == (
        "Rule: plenty of disk: shards (1.12 GiB, trainer busy 100%); slow or small disk: webdataset "
        "(143 MiB, trainer busy 100%), faster than shards from a cold disk below 600 MB/s, "
        "and this one gives 500; "
        "loaders.build keeps up on the tree: convert nothing (here it does not: trainer busy 50%)."
    )
    assert "here it does: trainer busy 100%" in rule(*predictions(trainer_images_per_s=500), None)
    assert rule(found[:2], inputs, None) == (
        "Rule: loaders.build keeps up on the tree: convert nothing (here it does not: trainer busy 50%)."
    )


def test_a_trainer_is_busy_for_the_share_of_its_own_rate() -> None:
    found, inputs = predictions(gpus=2)
    assert [busy_share(one, inputs) for one in found] == [0.15, 0.25, 1.0, 0.75]
