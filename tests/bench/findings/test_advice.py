"""What `bench recommend` says to do, from predictions that can be worked out on paper."""

from dataclasses import replace

from bench.findings import forecast as model
from bench.findings.advice import answer, busy_share, rule
from bench.findings.forecast import Prediction
from tests.bench.findings.test_forecast import INPUTS, RAW, SHARDS, TARS


def predictions(**changes: float) -> tuple[list[Prediction], model.Inputs]:
    inputs = replace(INPUTS, **changes)
    return model.predict([RAW, SHARDS, TARS], inputs), inputs


def test_the_answer_says_what_it_brings_and_costs() -> None:
    assert answer(*predictions()) == (
        "Convert to shards: the trainer then gets 2,000 images/s instead of 1,000; it takes 2,000. "
        "Converting once takes 7.00 s and 1.12 GiB, and pays after 3 epochs."
    )


def test_where_the_tree_keeps_up_nothing_is_converted() -> None:
    said = answer(*predictions(trainer_images_per_s=500))
    assert said == "Convert nothing: the tree as it is keeps the trainer busy 100% of the time."


def test_where_no_format_is_faster_nothing_is_converted() -> None:
    found, inputs = predictions()
    alike = [replace(one, trained_images_per_s=1000.0) for one in found]
    assert answer(alike, inputs) == (
        "Convert nothing: the tree as it is keeps the trainer busy 50% of the time, and no format would "
        "train more than 2% faster."
    )


def test_repeats_that_disagree_are_said_to() -> None:
    found, inputs = predictions()
    slow = [replace(one, trained_images_per_s=900.0) if one.name == "shards" else one for one in found]
    assert answer(found, inputs, [found, found]) == answer(found, inputs)
    assert answer(found, inputs, [found, slow]).startswith("Unclear, within noise: shards gives the trainer")


def test_the_rule_has_this_trees_figures() -> None:
    found, inputs = predictions()
    assert rule(found, inputs, 600e6) == (
        "Rule: plenty of disk: shards (1.12 GiB, trainer busy 100%); slow or small disk: webdataset "
        "(143 MiB, trainer busy 100%), faster than shards from a cold disk below 600 MB/s, "
        "and this one gives 500; "
        "the tree keeps up already: convert nothing (this tree does not: trainer busy 50%)."
    )
    assert "this tree does: trainer busy 100%" in rule(*predictions(trainer_images_per_s=500), None)
    assert rule([found[0]], inputs, None) == (
        "Rule: the tree keeps up already: convert nothing (this tree does not: trainer busy 50%)."
    )


def test_a_trainer_is_busy_for_the_share_of_its_own_rate() -> None:
    found, inputs = predictions(gpus=2)
    assert [busy_share(one, inputs) for one in found] == [0.25, 1.0, 0.75]
