"""What `precache auto` says, of figures that can be worked out on paper."""

from dataclasses import replace
from itertools import pairwise

from bench.findings import choice as rules
from bench.findings import forecast as model
from bench.findings.choice import Choice, Gain, Setting
from bench.findings.stats import Estimate
from tests.bench.findings.test_forecast import INPUTS, RAW, SHARDS, TARS

GAIN = Gain(
    before=Estimate(500, 480, 520),
    after=Estimate(2000, 1900, 2100),
    times=Estimate(4, 3.8, 4.2),
    busy_before=0.25,
    busy_after=1.0,
    images=10_000,
    conversion_s=40.0,
)


def test_settings_go_from_what_keeps_most_of_a_picture_to_the_smallest() -> None:
    found = rules.settings(224)
    assert found[0] == Setting(256, 95)
    assert found[-1] == Setting(224, 75)
    assert all(a.stored_size >= b.stored_size and a.quality >= b.quality for a, b in pairwise(found))


def test_jpegs_are_given_room_to_be_larger_than_predicted_and_pixels_need_none() -> None:
    assert rules.needed_bytes("shards", 100.0) == 100.0
    assert rules.needed_bytes("webdataset", 100.0) > 100.0


def test_three_lines_say_what_it_brings_what_it_costs_and_why_not_the_others() -> None:
    predictions = model.predict([RAW, SHARDS, TARS], INPUTS)
    sizes = {"shards": 1e9, "webdataset": 1.5e8}
    choice = Choice(Setting(256, 95), sizes, ("shards", "webdataset"), True, "the 20GB of --max-bytes")
    assert rules.why(predictions[1], predictions, INPUTS, choice) == [
        "Convert to shards, 256 px: the trainer then gets 2,000 images/s instead of 1,000; it takes 2,000.",
        "Converting takes about 7.00 s and 1.12 GiB of the 20GB of --max-bytes, and pays after 3 epochs.",
        "256 px: room for random crops; webdataset would take 143 MiB and 10.0 s, and give the trainer "
        "2,000 images/s.",
    ]


def test_what_does_not_fit_is_said_with_its_size() -> None:
    predictions = model.predict([RAW, TARS], INPUTS)
    sizes = {"shards": 2**30, "webdataset": 1.5e8}
    choice = Choice(Setting(256, 75), sizes, ("webdataset",), False, "the 200MB of --max-bytes")
    last = rules.why(predictions[1], predictions, INPUTS, choice)[-1]
    assert last == (
        "256 px, JPEG quality 75: the most that fits; shards would take 1 GiB, more than the 200MB of "
        "--max-bytes."
    )


def test_a_gain_is_said_with_its_range_and_when_it_pays() -> None:
    assert GAIN.words() == [
        "Gained: the trainer gets 2,000 images/s instead of 500, 4.00 times as many (3.80 to 4.20).",
        "It works 100% of the time instead of 25%.",
        "An epoch of 10,000 pictures takes 5.00 s instead of 20.0 s; converting took 40.0 s, which pays "
        "after 3 epochs.",
    ]
    assert "converting took" not in replace(GAIN, conversion_s=None).words()[2]


def test_what_overlaps_is_no_gain_and_what_is_slower_every_time_is_a_loss() -> None:
    level = replace(GAIN, times=Estimate(1.01, 0.95, 1.05))
    assert level.words()[0].startswith("Gained nothing that can be told from noise")
    assert not level.is_loss
    slower = replace(GAIN, times=Estimate(0.8, 0.7, 0.9))
    assert slower.words()[0].startswith("Lost: ")
    assert slower.is_loss


def test_the_error_is_the_median_of_how_far_off_predictions_are_either_way() -> None:
    assert rules.median_error([0.0, -0.5, 0.1]) == 0.1
