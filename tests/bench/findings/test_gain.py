"""The sentence for whoever pays for the accelerator, in every case that a result can be."""

from dataclasses import replace
from typing import Any

import pytest

from bench.findings import gain
from bench.findings.result import Result, Row
from bench.findings.stats import Estimate
from tests.bench.rich_result import LIMIT, altered, change, peer, rich_result, row

SAMPLES = 30_607
QUICK = {"shards": {"seconds": 24.2, "size_bytes": 300e6}, "webdataset": {"seconds": 31.0, "size_bytes": 5e7}}


def fed(backend: str, data: str, share: float, spread: float = 0.005, **fields: Any) -> Row:
    """A loader that keeps the trainer busy for `share` of the time."""
    busy = Estimate(share, share - spread, share + spread)
    together = Estimate(*(LIMIT * part for part in (share, share - spread, share + spread)))
    return row(backend, data, 20_000, together=together, ratio=busy, **fields)


def result(*rows: Row, repeats: int = 5, **settings: Any) -> Result:
    rich = rich_result()
    data = {f"{r.backend} on {r.data}": {"samples": SAMPLES, "digest": "0"} for r in rows}
    return replace(rich, rows=rows, settings={**rich.settings, "repeats": repeats, "data": data, **settings})


TODAY = fed("imagefolder", "raw tree", 0.31)
RAW = fed("pytorch", "raw tree", 0.5)
SHARDS = fed("shards", "shards", 0.99)
ALREADY = fed("imagefolder", "raw tree", 0.99)


def said(*rows: Row, price: float | None = None, **settings: Any) -> str:
    (sentence,) = gain.sentences(result(*rows, **settings), price)
    return sentence


def test_what_converting_gains_is_one_sentence() -> None:
    today = replace(TODAY, trainer_name="resnet50")
    rows = (today, replace(RAW, trainer_name="resnet50"), replace(SHARDS, trainer_name="resnet50"))
    assert said(*rows, conversions=QUICK) == (
        "ImageFolder and DataLoader keep this accelerator busy 31% of the time. After converting once "
        "(24 s, 0.3 GB) `shards` keep it busy 99%: training ends 3.2 times sooner. It pays from epoch 1 on."
    )
    assert "keep an accelerator of 2,480 images/s busy 31% of the time" in said(TODAY, SHARDS)
    assert "keep resnet50 on this CPU busy 31%" in said(*rows, device="cpu")


def test_it_pays_from_the_first_epoch_that_ends_sooner_with_the_conversion() -> None:
    saved_s = SAMPLES / (0.31 * LIMIT) - SAMPLES / (0.99 * LIMIT)
    for seconds, epoch in ((0.99 * saved_s, 1), (1.01 * saved_s, 2), (6.5 * saved_s, 7)):
        cost = {"shards": {"seconds": seconds, "size_bytes": 3e8}}
        assert f"It pays from epoch {epoch} on." in said(TODAY, SHARDS, conversions=cost)


def test_a_conversion_that_did_not_run_has_the_time_of_decoding_at_least_or_none() -> None:
    predicted = altered(RAW, changes=[change("Converting to shards", 2470, measured=True, seconds=51.0)])
    text = said(TODAY, predicted, replace(SHARDS, image_bytes=196_608.0))
    assert "After converting once (at least 51 s, 6.0 GB) `shards`" in text
    assert text.endswith("It pays from epoch 2 on at the earliest.")
    unknown = said(TODAY, SHARDS)
    assert "(time not measured)" in unknown
    assert "pays" not in unknown


@pytest.mark.parametrize("others", [(), (SHARDS,), (RAW, SHARDS)])
def test_a_loader_that_keeps_up_needs_no_conversion(others: tuple[Row, ...]) -> None:
    text = said(ALREADY, *others)
    assert text.endswith("already keep an accelerator of 2,480 images/s busy 99% of the time: "
        "converting gains nothing here.")  # fmt: skip


def test_ranges_that_overlap_name_no_winner() -> None:
    wide = fed("shards", "shards", 0.5, spread=0.2)
    text = said(TODAY, wide)
    assert "so no loader wins" in text
    assert "sooner" not in text
    assert "sooner" not in said(TODAY, SHARDS, repeats=1)
    assert "--repeats 2" in said(TODAY, SHARDS, repeats=1)


def test_beside_other_busy_processes_no_winner_is_named() -> None:
    text = said(TODAY, SHARDS, other_cpu=0.4)
    assert "Other processes took 40% of the CPUs" in text
    assert "sooner" not in text
    priced = said(TODAY, SHARDS, other_cpu=0.4, conversions=QUICK)
    assert "After converting once (24 s, 0.3 GB) `shards` keep it busy 99%. Other processes took" in priced
    assert "sooner" in said(TODAY, SHARDS, other_cpu=0.02)


def test_a_slower_loader_gains_nothing() -> None:
    assert "No other loader here is faster" in said(TODAY, fed("shards", "shards", 0.2))


def test_where_no_conversion_does_as_well_none_is_advised() -> None:
    text = said(TODAY, fed("pytorch", "raw tree", 0.987), SHARDS)
    assert "With no conversion `pytorch` keeps it busy 99%" in text


def test_loaders_that_cannot_be_told_apart_are_named_side_by_side() -> None:
    text = said(TODAY, RAW, SHARDS, fed("webdataset", "webdataset", 0.985), conversions=QUICK)
    assert "After converting once `shards` (24 s, 0.3 GB) or `webdataset` (31 s, 50 MB) keeps it busy" in text


def test_pytorch_on_the_raw_tree_stands_in_for_imagefolder() -> None:
    assert said(RAW, SHARDS).startswith("`pytorch` on the raw tree keeps an accelerator")


def test_without_today_s_loader_nothing_is_compared() -> None:
    text = said(SHARDS)
    assert text.startswith("`shards` keep the accelerator busy 99%.")
    assert "was not measured: add the raw tree" in text


def test_loaders_alone_are_compared_by_images_per_second() -> None:
    alone: dict[str, Any] = {"trainer_name": "none", "trainer": None, "together": None, "ratio": None}
    text = said(row("imagefolder", "raw tree", 430, **alone), row("shards", "shards", 12_900, **alone))
    assert text.startswith("ImageFolder and DataLoader deliver 430 images/s. After converting once")
    assert text.endswith("`shards` deliver 12,900: 30 times as many.")


def test_loaders_alone_are_compared_with_imagefolder_of_against() -> None:
    alone: dict[str, Any] = {"trainer_name": "none", "trainer": None, "together": None, "ratio": None}
    rows = [
        row("pytorch", "raw tree", 3_300, **alone),
        altered(peer("imagefolder", "raw tree", 1_100), **alone),
    ]
    assert said(*rows) == (
        "ImageFolder and DataLoader deliver 1,100 images/s. With no conversion `pytorch` delivers 3,300: "
        "3.0 times as many."
    )
    assert said(TODAY, SHARDS, peer("imagefolder", "raw tree", 90_000)).startswith(
        "ImageFolder and DataLoader keep"
    )
    slower = row("dali", "raw tree", 1_000, **alone)
    assert said(rows[0], slower).endswith("No other loader here is faster.")


def test_money_is_that_of_the_time_saved() -> None:
    text = said(TODAY, fed("shards", "shards", 0.93), price=3.0)
    assert "what costs $100 today then costs $33: $2.00 saved of every hour." in text
    assert "$" not in said(TODAY, SHARDS)


def test_noise_and_other_libraries_never_win() -> None:
    rows = rich_result().rows
    noise = fed("synthetic", "raw tree", 0.995)
    assert "synthetic" not in said(TODAY, noise, SHARDS, *(r for r in rows if r.peer))
    assert gain.sentences(result(noise)) == []


def test_a_small_gain_is_a_share_and_not_a_multiple() -> None:
    assert "training ends 10% sooner" in said(fed("imagefolder", "raw tree", 0.89), SHARDS)


def test_each_trainer_has_its_sentence() -> None:
    other = [replace(r, trainer_name="resnet50") for r in (ALREADY, SHARDS)]
    first, second = gain.sentences(result(TODAY, SHARDS, *other))
    assert first.startswith("emulated:2480: ImageFolder")
    assert second.startswith("resnet50: ImageFolder and DataLoader already keep")
