"""Trials, rows and results with chosen numbers, for tests of functions that compute from them.

Noise in them is seeded.
"""

from typing import Any

import numpy as np

from bench.report import loaders
from bench.report.result import RAW, Activity, Result, Row, Trial
from bench.report.stats import Estimate

BATCHES = 140
EPOCH = 48
WORKERS = 4
BATCH_SIZE = 64
REPEATS = 3
LIMIT = 2480.0
TRAINER = "emulated:2480"
SPIKES = "Every 4 batches the trainer waits 99.6 ms on average, as many as the loader has workers"
HOSTILE = "<b></script><script>alert('x')</script>"
SAMPLES = 30_607
MACHINE = {
    "date": "2026-11-21", "cpu": "AMD EPYC, 8 CPUs", "memory": "24 GiB", "accelerator": "NVIDIA H100",
    "python": "3.11.7", "torch": "2.15.0", "pillow": "13.0.0",
}  # fmt: skip


def around(middle: float, spread: float = 0.04) -> Estimate:
    return Estimate(middle, middle * (1 - spread), middle * (1 + spread))


def make_row(backend: str, data: str, **values: Estimate | float | None) -> Row:
    """Return a row with these values, by their names in COLUMNS; a number becomes an estimate around it."""
    key: dict[str, Any] = {
        "backend": backend,
        "data": data,
        "trainer": TRAINER,
        "workers": 2,
        "batch_size": 64,
    }
    estimates = {
        name: around(value) if isinstance(value, (int, float)) else value
        for name, value in values.items()
        if value is not None
    }
    kind = RAW if data == "raw tree" else data
    return Row(name=f"{backend} on {data}", key=key, data_kind=kind, values=estimates)


def make_fed_row(backend: str, data: str, share: float, spread: float = 0.005, **values: float) -> Row:
    """Return the row of a loader of 20,000 images/s that keeps a trainer of LIMIT busy by `share`, 0 to 1."""
    busy = Estimate(share, share - spread, share + spread)
    fed = Estimate(LIMIT * busy.median, LIMIT * busy.low, LIMIT * busy.high)
    return make_row(
        backend,
        data,
        **{"loader_images_per_s": 20_000, **values},
        trainer_images_per_s=around(LIMIT, 0.005),
        fed_images_per_s=fed,
        fed_ratio=busy,
        busy_share=busy,
    )


def jitter(repeat: int) -> float:
    """Return a factor near 1 that differs from repeat to repeat, so that ranges are not empty."""
    return (1.0, 0.99, 1.01)[repeat % 3]


def make_trials(
    backend: str, data: str, loader: float, fed: float | None = None, cold: float | None = None, **key: Any
) -> list[Trial]:
    """Return trials of a loader alone, and where their rates are given, feeding TRAINER and cold.

    Args:
        loader, fed, cold: images/s.
        key: further parts of the trials' keys.
    """
    trials = []
    for repeat in range(REPEATS):
        loader_key = {
            "backend": backend, "data": data, "workers": WORKERS, "batch_size": BATCH_SIZE,
            "repeat": repeat, **key,
        }  # fmt: skip
        for kind, rate in (("loader", loader), ("cold", cold), ("fed", fed)):
            if rate is not None:
                step_s = BATCH_SIZE / LIMIT if kind == "fed" else 0.0
                trial = make_trial({"kind": kind, **loader_key}, rate * jitter(repeat), step_s)
                if kind == "fed":
                    trial.key["trainer"] = TRAINER
                trials.append(trial)
    return trials


def make_trial(key: dict[str, Any], rate: float, step_s: float = 0.0, batches: int = 8) -> Trial:
    """Return a trial whose batches all take the same time, at `rate` images/s."""
    batch_size = key.get("batch_size", BATCH_SIZE)
    batch_s = batch_size / rate
    step_s = min(step_s, batch_s)
    return Trial(
        key=key,
        numbers={
            "images_per_s": rate,
            "wait_share": 1 - step_s / batch_s,
            "first_batch_s": 0.4,
            "first_step_s": 3.21,
            "images": float(batches * batch_size),
            "served_ids": 48.0,
            "served_images": 48.0,
            "page_cache_is_warm": 1.0,
            "other_cpu_share": 0.0,
        },
        series={"wait_s": (batch_s - step_s,) * batches, "step_s": (step_s,) * batches, "epoch_starts": ()},
    )


def make_shared_trials(batch_size: int = BATCH_SIZE) -> list[Trial]:
    """Return trials of the trainer alone, and of the transfer to the device."""
    trials = []
    for repeat in range(REPEATS):
        key = {"trainer": TRAINER, "batch_size": batch_size, "repeat": repeat}
        trials.append(make_trial({"kind": "trainer", **key}, LIMIT))
        trials.append(make_trial({"kind": "transfer", **key}, 88_000))
    return trials


def make_settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a result of `bench loaders`, with `changes`."""
    settings: dict[str, Any] = {
        "trainers": [TRAINER], "workers": [WORKERS], "batch_sizes": [BATCH_SIZE], "size": 224, "warmup": 4,
        "batches": 8, "repeats": REPEATS, "augment": "eval", "shuffle": "auto", "cold": True, "cache": None,
        "compiled": False, "launches": 0, "amp": "off", "device": "cuda", "cpus": 8,
        "data": {
            "photos": {"kind": "raw", "samples": SAMPLES, "digest": "0"},
            "data/shards": {
                "kind": "shards", "samples": SAMPLES, "digest": "1", "stored_bytes": 300e6, "convert_s": 24.2,
            },
            f"data/{HOSTILE}": {"kind": f"dali{HOSTILE}", "samples": SAMPLES, "digest": "2"},
        },
    }  # fmt: skip
    return {**settings, **changes}


def make_spiky_trial(key: dict[str, Any]) -> Trial:
    """Return a monitored trial of a loader of 4 workers that is too slow: it waits long every 4 batches.

    Two epochs begin in it.
    """
    rng = np.random.default_rng(5)
    step_s = BATCH_SIZE / LIMIT * rng.normal(1, 0.02, BATCHES)
    wait_s = rng.exponential(0.0006, BATCHES)
    spikes = [batch for batch in range(3, BATCHES, WORKERS) if batch % EPOCH]
    epoch_starts = [EPOCH, 2 * EPOCH]
    wait_s[spikes] += rng.normal(0.1, 0.01, len(spikes))
    wait_s[epoch_starts] += 0.18
    total_s = float(np.sum(wait_s + step_s))
    time_s = np.arange(0.1, 7.5, 0.1)
    busy = np.clip(0.9 + 0.08 * np.sin(time_s * 3) + rng.normal(0, 0.03, len(time_s)), 0, 1)
    series = {f"cpu_{core}_share": np.clip(busy + rng.normal(0, 0.1, len(busy)), 0, 1) for core in range(8)}
    series |= {
        "cpu_share": busy,
        "gpu_memory_share": np.full(len(time_s), 0.93),
        "gpu_share": np.clip(0.5 + 0.4 * np.sign(np.sin(time_s * 9)), 0, 1),
        "disk_read_bytes_per_s": np.abs(rng.normal(1.2e8, 3e7, len(time_s))),
        "network_receive_bytes_per_s": np.zeros(len(time_s)),
        "private_bytes": 3e9 + 1e8 * time_s,
        "gpu_power_w": 300 + 100 * np.sin(time_s * 9),
        "gpu_clock_mhz": np.full(len(time_s), 1755.0),
    }
    return Trial(
        key=key,
        numbers={
            "images_per_s": BATCHES * BATCH_SIZE / total_s,
            "wait_share": float(np.sum(wait_s)) / total_s,
            "first_batch_s": 0.4,
            "first_step_s": 3.21,
            "page_cache_is_warm": 1.0,
        },
        series={
            "wait_s": tuple(wait_s.tolist()),
            "step_s": tuple(step_s.tolist()),
            "epoch_starts": tuple(map(float, epoch_starts)),
        },
        activity=Activity(
            tuple(time_s.tolist()), {name: tuple(values.tolist()) for name, values in series.items()}
        ),
    )


def make_rich_trials() -> list[Trial]:
    """Return all kinds of trials of three backends, ImageFolder and the backend synthetic."""
    trials = make_shared_trials()
    trials += make_trials("pytorch", "photos", 1_150, 1_100, cold=640)
    spiky = next(
        trial for trial in trials if trial.key["kind"] == "fed" and trial.key["repeat"] == REPEATS - 1
    )
    trials[trials.index(spiky)] = make_spiky_trial(spiky.key)
    for repeat in range(REPEATS):
        key = {
            "kind": "stages", "backend": "pytorch", "data": "photos", "workers": WORKERS,
            "batch_size": BATCH_SIZE, "repeat": repeat,
        }  # fmt: skip
        trials.append(Trial(key, {"read_images_per_s": 9_400.0, "decode_images_per_s": 1_300.0}))
    trials += make_trials("imagefolder", "photos", 780, 769, cold=600)
    trials += make_trials("shards", "data/shards", 24_000, 2_455, cold=10_500)
    trials += make_trials("dali", f"data/{HOSTILE}", 2_300, 2_250)
    trials += make_trials("synthetic", "photos", 90_000, 2_470)
    return trials


def rich_result(gpu_price: float | None = None, other_cpu: float = 0.0) -> Result:
    """Return a result with all kinds of rows, values, findings and a skipped loader."""
    trials = make_rich_trials()
    for trial in trials:
        trial.numbers["other_cpu_share"] = other_cpu
    skipped = {f"webdataset on {HOSTILE}": "does not exist"}
    return loaders.make_result(MACHINE, make_settings(), trials, skipped, gpu_price)
