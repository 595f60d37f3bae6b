"""One baseline, one figure, one wording: whoever says what converting gains says the same of the same."""

from pathlib import Path

import pytest
from bench.report.advice import accelerator, answer
from bench.report.choice import Gain
from bench.report.payback import Cost, Way, advice, does, epochs_to_pay

from bench.report import gain
from bench.report import payback as rules
from bench.report.forecast import Inputs, Prediction
from bench.report.stats import Estimate
from tests.bench.report.test_forecast import INPUTS
from tests.bench.report.test_gain import fed, result
from tests.bench.rich_result import LIMIT
from tests.command import ROOT

IMAGES = 30_607
COST = Cost(24.2, 300e6)
SHARES = {"imagefolder": 0.31, "raw tree": 0.5, "shards": 0.99}


def measured() -> str:
    """As `bench loaders` and `bench quickstart` say it."""
    rows = (
        fed("imagefolder", "raw tree", SHARES["imagefolder"]),
        fed("pytorch", "raw tree", SHARES["raw tree"]),
        fed("shards", "shards", SHARES["shards"]),
    )
    cost = {"seconds": COST.seconds, "size_bytes": COST.size_bytes}
    (said,) = gain.sentences(result(*rows, conversions={"shards": cost}))
    return said


def predicted() -> str:
    """As `bench recommend` and the first line of `precache auto` say it."""
    found = [
        Prediction(
            name=name, bytes=COST.size_bytes or 0, conversion_s=(COST.seconds or 0) * (name == "shards"),
            warm_images_per_s=9e4, cold_images_per_s=9e4, cached=True, trained_images_per_s=share * LIMIT,
            epochs_to_pay=None,
        )
        for name, share in SHARES.items()
    ]  # fmt: skip
    return answer(found, inputs())


def proven() -> str:
    """As the last lines of `precache auto` say it."""
    ways = [
        Way(name, share * LIMIT, share, cost)
        for (name, share), cost in zip(
            {rules.TODAY: 0.31, rules.LINE: 0.5, "shards": 0.99}.items(), (None, None, COST), strict=True
        )
    ]
    times = Estimate(3.2, 3.1, 3.3)
    said = Gain(ways[0], ways[1], ways[2], True, times, times, IMAGES).words(accelerator(inputs()))
    assert said[-1] == "Turn by turn the trainer got 3.10 to 3.30 times as many images/s as today."
    return " ".join(said[:-1]).removeprefix("Measured: ")


def inputs() -> Inputs:
    settings = {name: getattr(INPUTS, name) for name in INPUTS.__dataclass_fields__}
    return Inputs(**{**settings, "trainer_images_per_s": LIMIT, "train_images": IMAGES})


@pytest.mark.parametrize("said", [measured, predicted, proven])
def test_all_that_say_it_say_the_same(said: object) -> None:
    assert callable(said)
    assert said() == (
        "ImageFolder and DataLoader keep an accelerator of 2,480 images/s busy 31% of the time. "
        "Change that line to `loaders.build`: it is busy 50%, and training ends 1.6 times sooner than today. "
        "Convert to shards (24.2 s, 286 MiB), too: it is busy 99%, and training ends 3.2 times sooner than "
        "today. Converting pays after 1 epoch."
    )


def test_it_pays_after_the_first_epoch_that_ends_sooner_with_the_conversion() -> None:
    """An epoch takes 10 s with what people have, 5 s with what was converted."""
    for conversion_s, count in ((0.0, 1), (4.9, 1), (5.1, 2), (32.0, 7)):
        assert epochs_to_pay(conversion_s, 1000, 100.0, 200.0) == count
    for slower in (100.0, 90.0):
        assert epochs_to_pay(1.0, 1000, 100.0, slower) is None


def test_what_is_not_known_is_not_said() -> None:
    today, shards = Way(rules.TODAY, 100, 0.1), Way("shards", 990, 0.99, Cost(None, 3e8))
    assert advice(today, None, [shards], 1000) == [
        "Convert to shards (time not measured, 286 MiB): it is busy 99%, and training ends 9.9 times sooner "
        "than today."
    ]
    timed = Way("shards", 990, 0.99, COST)
    assert len(advice(today, None, [timed], 1000)) == 2
    assert len(advice(today, None, [timed], None)) == 1
    assert advice(today, None, [], 1000) == []


def test_a_small_gain_is_a_share_and_not_a_multiple() -> None:
    today, line = Way(rules.TODAY, 100, 0.89), Way(rules.LINE, 111, 0.99)
    assert "training ends 10% sooner than today" in advice(today, line, [], 1000)[0]


def test_loaders_alone_have_rates_and_nothing_that_pays() -> None:
    today, shards = Way(rules.TODAY, 430, None), Way("shards", 12_900, None, COST)
    assert does(today, "") == "ImageFolder and DataLoader deliver 430 images/s"
    assert advice(today, None, [shards], 1000) == [
        "Convert to shards (24.2 s, 286 MiB): 12,900 images/s, 30 times as many."
    ]


def test_nothing_else_words_or_computes_it() -> None:
    table = Path("commands/recommend.py")  # the title of a column, and what it means
    for path in sorted((ROOT / "bench").rglob("*.py")):
        if path.relative_to(ROOT / "bench") not in (Path("findings/payback.py"), table):
            found = [word for word in ("pays after", "sooner", "saved_s =") if word in path.read_text()]
            assert not found, path
