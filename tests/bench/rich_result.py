"""A result that has every field, made by hand; its noise is seeded."""

from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from bench.report.row import Change, Result, Row, typed
from bench.report.stats import Estimate, ratio

BATCHES = 140
EPOCH = 48
WORKERS = 4
BATCH_SIZE = 64
LIMIT = 2480.0
EXPLANATION = "Every 4 batches the trainer waits 100.2 ms on average: as many as the loader has workers."
HOSTILE = "<b></script><script>alert('x')</script>"


def around(middle: float, spread: float = 0.04) -> Estimate:
    return Estimate(middle, middle * (1 - spread), middle * (1 + spread))


def row(backend: str, data: str, loader: float, **fields: Any) -> Row:
    """A row; `fields` by the names that they have in JSON."""
    together = min(loader, 0.98 * LIMIT)
    measured: dict[str, Any] = {
        "trainer_name": "emulated:2480",
        "trainer": around(LIMIT, 0.005),
        "together": around(together),
        "ratio": around(together / LIMIT),
        "first_batch_s": around(0.4),
        "batch_s_median": BATCH_SIZE / together,
        "batch_s_p95": 2 * BATCH_SIZE / together,
    }
    named = {"backend": backend, "data": data, "loader": around(loader), **measured, **fields}
    return made(named)


def altered(row: Row, **fields: Any) -> Row:
    """`row` with other fields, by the names that they have in JSON."""
    return made({**asdict(row), **fields})


def made(fields: dict[str, Any]) -> Row:
    """As a row of JSON is read."""
    found: Row = typed(Row, {name: plain(value) for name, value in fields.items()})
    return found


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def peer(name: str, data: str, loader: float) -> Row:
    alone = {"trainer_name": "-", "trainer": None, "together": None, "ratio": None}
    return row(name, data, loader, peer=True, of_limit=around(loader / 40000), epoch_gap_s=0.2, **alone)


def waiting_row() -> Row:
    """A loader of 4 workers that cannot keep up: a spike every 4 batches, two epochs begin."""
    rng = np.random.default_rng(5)
    step_s = BATCH_SIZE / LIMIT * rng.normal(1, 0.02, BATCHES)
    wait_s = rng.exponential(0.0006, BATCHES)
    spikes = [batch for batch in range(3, BATCHES, WORKERS) if batch % EPOCH]
    starts = [EPOCH, 2 * EPOCH]
    wait_s[spikes] += rng.normal(0.1, 0.01, len(spikes))
    wait_s[starts] += 0.18
    rate = BATCHES * BATCH_SIZE / float(np.sum(wait_s + step_s))
    share = float(np.sum(wait_s) / np.sum(wait_s + step_s))
    return row(
        "pytorch",
        "raw tree",
        1150,
        together=around(rate),
        ratio=ratio([rate, rate * 1.01], [LIMIT, LIMIT]),
        cold=around(640, 0.1),
        data_wait=around(share, 0.02),
        utilisation=around(1 - share, 0.02),
        first_step_s=around(3.21),
        stalls={"fetch": 0.004, "prep": 0.019, "transfer": 0.0006},
        stages={"storage": 9400, "decode": 1160, "collate": 21000, "transfer": 88000, "compute": LIMIT},
        predicted=1160.0,
        binds="decode",
        advice="decoding is the bottleneck: 1,150 images/s against 2,480 of the trainer. Converting to "
        "shards gave 2,470.",
        changes=[
            change("Four workers,", 1900, measured=False),
            change(f"Backend dali on {HOSTILE}", 2300, measured=True),
        ],
        wait_s=wait_s.tolist(),
        step_s=step_s.tolist(),
        epoch_starts=starts,
        spikes={
            "wait_spikes": {"batches": spikes, "above_s": 0.01, "period": WORKERS},
            "step_spikes": {"batches": [], "above_s": None, "period": None},
            "explanation": [EXPLANATION],
        },
        monitor=monitored(rng),
    )  # fmt: skip


def change(what: str, rate: float, **fields: Any) -> dict[str, Any]:
    return asdict(Change(what, around(rate), **fields))


def monitored(rng: np.random.Generator) -> dict[str, Any]:
    time_s = np.arange(0.1, 7.5, 0.1)
    busy = np.clip(0.9 + 0.08 * np.sin(time_s * 3) + rng.normal(0, 0.03, len(time_s)), 0, 1)
    series = {f"cpu_{core}_share": np.clip(busy + rng.normal(0, 0.1, len(busy)), 0, 1) for core in range(8)}
    series |= {
        "cpu_share": busy,
        "gpu_share": np.clip(0.5 + 0.4 * np.sign(np.sin(time_s * 9)), 0, 1),
        "gpu_memory_share": np.minimum(0.93, time_s),
        "disk_read_bytes_per_s": np.abs(rng.normal(1.2e8, 3e7, len(time_s))),
        "disk_write_bytes_per_s": np.abs(rng.normal(1e6, 1e6, len(time_s))),
        "network_receive_bytes_per_s": np.zeros(len(time_s)),
        "private_bytes": 3e9 + 1e8 * time_s,
        "shared_bytes": 1.2e9 + 1e7 * time_s,
        "gpu_power_w": 300 + 100 * np.sin(time_s * 9),
        "gpu_clock_mhz": np.full(len(time_s), 1755.0),
    }
    return {
        "time_s": time_s.tolist(),
        "series": {name: values.tolist() for name, values in series.items()},
        "peak": {name: float(values.max()) for name, values in series.items()},
        "mean": {name: float(values.mean()) for name, values in series.items()},
        "flags": ["GPU memory was filled to 93%: a larger batch or picture may not fit."],
    }


def rich_result() -> Result:
    ratios = {"ffcv-raw": around(1.2), "imagefolder": around(26)}
    rows = (
        waiting_row(),
        row("shards", "shards", 24000, over=ratios, of_limit=around(0.6)),
        row("dali", f"dali{HOSTILE}", 2300, monitor={"time_s": [], "peak": {}, "mean": {}, "flags": []}),
        peer("ffcv-raw", "raw pixels", 20000),
        peer("imagefolder", "raw tree", 930),
        peer("gather", "shards", 40000),
    )
    machine = {
        "date": "2026-11-21", "cpu": "AMD EPYC, 8 CPUs", "memory": "24 GiB", "accelerator": "NVIDIA H100",
        "python": "3.11.7", "torch": "2.15.0", "pillow": "13.0.0",
    }  # fmt: skip
    settings = {
        "batch_size": BATCH_SIZE, "workers": WORKERS, "size": 224, "warmup": 4, "batches": BATCHES,
        "repeats": 5, "device": "cuda", "trainers": ["emulated:2480"], "page_cache": "warm",
        "peers": {"ffcv-raw": "ffcv 1.0.2", "imagefolder": "torchvision 0.29.2"},
    }  # fmt: skip
    return Result(machine, settings, rows, {f"webdataset on {HOSTILE}": "does not exist"}, 24.7)
