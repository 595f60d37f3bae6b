"""What `precache auto` says, of figures that can be worked out on paper."""

from dataclasses import replace
from itertools import pairwise

from bench.report.advice import answer
from bench.report.choice import Choice, Gain, Setting
from bench.report.payback import LINE, TODAY, Cost, Way

from bench.report import choice as rules
from bench.report import forecast as model
from bench.report.stats import Estimate
from precache.recipe import DEFAULT_SIZE
from tests.bench.report.test_forecast import INPUTS, RAW, SHARDS, TARS

GAIN = Gain(
    today=Way(TODAY, 500, 0.25),
    line=Way(LINE, 1000, 0.5),
    converted=Way("shards", 2000, 1.0, Cost(40.0, 2**30)),
    line_gains=True,
    over_today=Estimate(4, 3.8, 4.2),
    over_line=Estimate(2, 1.9, 2.1),
    images=10_000,
)


def test_settings_go_from_what_keeps_most_of_a_picture_to_the_smallest() -> None:
    found = rules.settings(224)
    assert rules.stored_size(224) == DEFAULT_SIZE
    assert found[0] == Setting(448, 95)
    assert found[-1] == Setting(256, 75)  # of which validation shows 224, without enlarging
    assert all(a.stored_size >= b.stored_size and a.quality >= b.quality for a, b in pairwise(found))


def test_three_lines_say_what_it_brings_what_it_costs_and_why_not_the_others() -> None:
    predictions = model.predict([RAW, SHARDS, TARS], INPUTS)
    sizes = {"shards": 1e9, "webdataset": 1.5e8}
    choice = Choice(Setting(448, 95), sizes, ("shards", "webdataset"), True, "the 20GB of --max-bytes")
    assert rules.why(predictions[1], predictions, INPUTS, choice, 224) == [
        answer(predictions, INPUTS),
        "Pictures are stored whole, their shorter side at most 448 px: twice the side that is trained, "
        "within the 20GB of --max-bytes.",
        "Instead, webdataset would take 143 MiB and 10.0 s, and give the trainer 2,000 images/s.",
    ]


def test_what_does_not_fit_is_said_with_its_size_and_what_a_smaller_side_risks_with_its_points() -> None:
    predictions = model.predict([RAW, TARS], INPUTS)
    sizes = {"shards": 2**30, "webdataset": 1.5e8}
    choice = Choice(Setting(256, 75), sizes, ("webdataset",), False, "the 200MB of --max-bytes")
    assert rules.why(predictions[1], predictions, INPUTS, choice, 224)[1:] == [
        "Pictures are stored whole, their shorter side at most 256 px, JPEG quality 75: the most that fits "
        f"into the 200MB of --max-bytes. {rules.RISK}",
        "Instead, shards would take 1 GiB, more than the 200MB of --max-bytes.",
    ]


def test_what_overlaps_is_no_gain_and_what_is_slower_every_time_is_a_loss() -> None:
    level = replace(GAIN, over_line=Estimate(1.01, 0.95, 1.05))
    said = " ".join(level.words("a GPU"))
    assert "Converting gained nothing that can be told from noise" in said
    assert "Change that line to `loaders.build`" in said
    assert "Convert to" not in said
    assert not level.is_loss
    slower = replace(GAIN, over_line=Estimate(0.8, 0.7, 0.9))
    assert "Converting lost: from shards the trainer gets" in " ".join(slower.words("a GPU"))
    assert slower.is_loss
    assert "Change that line" not in " ".join(replace(GAIN, line_gains=False).words("a GPU"))
    alone = replace(GAIN, today=Way(LINE, 500, 0.25), line=None, over_line=GAIN.over_today, line_gains=False)
    assert "Change that line" not in " ".join(alone.words("a GPU"))


def test_the_error_is_the_median_of_how_far_off_predictions_are_either_way() -> None:
    assert rules.median_error([0.0, -0.5, 0.1]) == 0.1
