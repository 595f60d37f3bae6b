"""The sentence for whoever pays for the accelerator, in every case that a result can be."""

from dataclasses import replace
from typing import Any

import pytest

from bench.report import gain
from bench.report.result import Result, Row
from bench.report.stats import Estimate
from tests.bench.rich_result import LIMIT, altered, peer, rich_result, row

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


def test_the_accelerator_is_named_for_what_it_is() -> None:
    rows = [replace(r, trainer_name="resnet50") for r in (TODAY, SHARDS)]
    assert said(*rows).startswith("ImageFolder and DataLoader keep this accelerator busy 31% of the time. ")
    assert "keep an accelerator of 2,480 images/s busy 31% of the time" in said(TODAY, SHARDS)
    assert "keep resnet50 on this CPU busy 31%" in said(*rows, device="cpu")


def test_a_conversion_that_did_not_run_has_no_time_and_pays_after_no_number_of_epochs() -> None:
    text = said(TODAY, replace(SHARDS, image_bytes=196_608.0))
    assert "Convert to shards (time not measured, 5.6 GiB): it is busy 99%" in text
    assert "pays" not in text


@pytest.mark.parametrize("others", [(), (SHARDS,), (RAW, SHARDS)])
def test_a_loader_that_keeps_up_needs_no_conversion(others: tuple[Row, ...]) -> None:
    text = said(ALREADY, *others)
    assert text.endswith("already keep an accelerator of 2,480 images/s busy 99% of the time: "
        "neither another loader nor converting gains anything.")  # fmt: skip


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
    assert "sooner" in said(TODAY, SHARDS, other_cpu=0.02)


def test_a_slower_loader_gains_nothing() -> None:
    assert "No other loader here is faster" in said(TODAY, fed("shards", "shards", 0.2))


def test_where_the_other_line_does_as_well_no_conversion_is_advised() -> None:
    text = said(TODAY, fed("pytorch", "raw tree", 0.987), SHARDS)
    assert "Change that line to `loaders.build`: it is busy 99%" in text
    assert text.endswith("Converting gains no more.")
    assert "with backend dali: it is busy 99%" in said(TODAY, RAW, fed("dali", "raw tree", 0.987), SHARDS)


def test_formats_that_cannot_be_told_apart_are_named_side_by_side() -> None:
    text = said(TODAY, RAW, SHARDS, fed("webdataset", "webdataset", 0.985), conversions=QUICK)
    assert "Convert to shards (24.2 s, 286 MiB) or webdataset (31.0 s, 47.7 MiB), too: it is busy" in text


@pytest.mark.parametrize("rows", [(SHARDS,), (RAW, SHARDS)])
def test_without_today_s_loader_nothing_is_compared(rows: tuple[Row, ...]) -> None:
    """Ours on the raw tree does not stand in for it: there is one baseline."""
    text = said(*rows)
    assert text.startswith(
        "Backend `shards` delivers 20,000 images/s and keeps the accelerator busy 99% of the"
    )
    assert "ImageFolder and DataLoader do was not measured: add the raw tree" in text
    assert "sooner" not in text


def test_loaders_alone_are_compared_with_imagefolder_of_against() -> None:
    alone: dict[str, Any] = {"trainer_name": "none", "trainer": None, "together": None, "ratio": None}
    rows = [
        row("pytorch", "raw tree", 3_300, **alone),
        altered(peer("imagefolder", "raw tree", 1_100), **alone),
    ]
    assert said(*rows) == (
        "ImageFolder and DataLoader deliver 1,100 images/s. Change that line to `loaders.build`: 3,300 "
        "images/s, 3.0 times as many."
    )
    assert said(TODAY, SHARDS, peer("imagefolder", "raw tree", 90_000)).startswith(
        "ImageFolder and DataLoader keep"
    )
    slower = row("dali", "raw tree", 1_000, **alone)
    assert said(slower, rows[1]).endswith("No other loader here is faster.")


def test_money_is_that_of_the_time_saved() -> None:
    text = said(TODAY, fed("shards", "shards", 0.93), price=3.0)
    assert "what costs $100 today then costs $33: $2.00 saved of every hour." in text
    assert "$" not in said(TODAY, SHARDS)


def test_noise_and_other_libraries_never_win() -> None:
    rows = rich_result().rows
    noise = fed("synthetic", "raw tree", 0.995)
    assert "synthetic" not in said(TODAY, noise, SHARDS, *(r for r in rows if r.peer))
    assert gain.sentences(result(noise)) == []


def test_each_trainer_has_its_sentence() -> None:
    other = [replace(r, trainer_name="resnet50") for r in (ALREADY, SHARDS)]
    first, second = gain.sentences(result(TODAY, SHARDS, *other))
    assert first.startswith("emulated:2480: ImageFolder")
    assert second.startswith("resnet50: ImageFolder and DataLoader already keep")
