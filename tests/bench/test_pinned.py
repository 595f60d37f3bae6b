"""What must not change while bench is made smaller: the keys of its result, and what given figures say."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report.row import Result
from bench.report.verdict import sentences
from tests.command import run_here

ROW_KEYS = {
    "backend", "data", "trainer_name", "peer",
    "loader", "cold", "trainer", "together", "ratio", "of_limit", "over",
    "first_batch_s", "batch_s_median", "batch_s_p95", "epoch_gap_s", "first_step_s", "data_wait",
    "utilisation", "wait_s", "step_s", "epoch_starts", "spikes",
    "stages", "stalls", "predicted", "binds", "advice", "changes", "monitor", "image_bytes",
}  # fmt: skip
SETTINGS_KEYS = {
    "batch_size", "workers", "size", "warmup", "batches", "repeats", "device", "augment", "shuffle", "cold",
    "amp", "compiled", "cache", "trainers", "page_cache", "peers", "other_cpu", "notes", "data",
}  # fmt: skip
QUICK = (
    *("--batch-size", 4, "--batches", 3, "--warmup", 0, "--repeats", 2, "--size", 32, "--workers", 1),
    *("--trainer", "emulated:2000", "--device", "cpu", "--quiet"),
)


@pytest.mark.slow
def test_the_result_has_the_keys_that_it_had(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    flags = (*QUICK, "--backend", "imagefolder,pytorch,shards", "--json", "result.json")
    done = run_here("bench", "loaders", raw_tree, converted["shards"], *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result.keys() == {"version", "machine", "settings", "rows", "skipped", "host_to_device_gbps"}
    assert result["settings"].keys() >= SETTINGS_KEYS
    assert [row["backend"] for row in result["rows"] if not row["peer"]] == [
        "imagefolder",
        "pytorch",
        "shards",
    ]
    for row in result["rows"]:
        assert row.keys() >= ROW_KEYS


def estimate(middle: float) -> dict[str, float]:
    return {"median": middle, "low": middle * 0.98, "high": middle * 1.02}


def row(backend: str, data: str, loader: float, trainer: float | None = 7158.0) -> dict[str, Any]:
    """As in a result: fed, the slower of the two decides."""
    together = None if trainer is None else min(loader, 0.99 * trainer)
    return {
        "backend": backend,
        "data": data,
        "trainer_name": "none" if trainer is None else "emulated:h100",
        "loader": estimate(loader),
        "trainer": None if trainer is None else estimate(trainer),
        "together": None if together is None else estimate(together),
        "ratio": None if together is None or trainer is None else estimate(together / trainer),
        "utilisation": None if together is None or trainer is None else estimate(together / trainer),
        "first_batch_s": estimate(0.4),
        "batch_s_median": 64 / loader,
        "batch_s_p95": 80 / loader,
        "image_bytes": 270_000.0,
    }


def said(rows: list[dict[str, Any]], price: float | None = None, **settings: Any) -> list[str]:
    usual = {"trainers": ["emulated:h100"], "batch_size": 64, "size": 224, "workers": 2, "repeats": 3}
    machine = {"cpu": "c", "memory": "m", "accelerator": "none", "date": "2026-11-23"}
    content = {
        "version": 1,
        "machine": machine,
        "settings": {**usual, **settings},
        "rows": rows,
        "skipped": {},
    }
    return sentences(Result.from_json(content), price)


TODAY, LINE = row("imagefolder", "raw tree", 500), row("pytorch", "raw tree", 900)
SHARDS = row("shards", "shards", 9000)


def test_today_another_loader_and_converting() -> None:
    cost = {"convert_s": 24.2, "size_bytes": 286 << 20}
    data = {"shards on shards": {"samples": 768, "digest": "d"}}
    assert said([TODAY, LINE, {**SHARDS, **cost}], 2.5, data=data) == [
        "ImageFolder and DataLoader keep an emulated accelerator of 7,158 images/s busy 7% of the time. "
        "Change that line to `loaders.build`: it is busy 13%, and training ends 1.8 times sooner than today. "
        "Convert to shards (24.2 s, 286 MiB), too: it is busy 99%, and training ends 14 times sooner than "
        "today. Converting pays after 17 epochs. "
        "At $2.50 an hour, what costs $100 today then costs $7: $2.32 saved of every hour."
    ]


def test_what_keeps_up_already_gains_nothing() -> None:
    assert said([row("imagefolder", "raw tree", 9000), row("shards", "shards", 12000)]) == [
        "ImageFolder and DataLoader already keep an emulated accelerator of 7,158 images/s busy 99% of the "
        "time: neither another loader nor converting gains anything."
    ]


def test_overlapping_ranges_name_no_winner() -> None:
    assert said([TODAY, row("pytorch", "raw tree", 505)]) == [
        "ImageFolder and DataLoader keep an emulated accelerator of 7,158 images/s busy 7% of the time. "
        "The ranges of 3 runs overlap, so no loader wins."
    ]


def test_busy_machines_name_no_winner() -> None:
    (text,) = said([TODAY, SHARDS], other_cpu=0.4)
    assert text.startswith("ImageFolder and DataLoader keep an emulated accelerator of 7,158 images/s")
    assert "Other processes took 40% of the CPUs while this was measured" in text
    assert "Convert" not in text


def test_without_a_trainer_images_are_compared() -> None:
    alone = [row("imagefolder", "raw tree", 500, None), row("shards", "shards", 9000, None)]
    (text,) = said(alone, trainers=["none"])
    assert text.startswith("ImageFolder and DataLoader deliver 500 images/s. Convert to shards (")
    assert text.endswith("9,000 images/s, 18 times as many.")
