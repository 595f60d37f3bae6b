"""What one could do about a loader, of measurements made by hand."""

from bench.report.changes import Means, Pipeline

from bench.report import changes
from bench.report.stats import Estimate
from bench.report.verdict import Change, Measured

STAGES = {
    "read": 1_000.0, "decode": 100.0, "copy": 5_000.0, "decoded_bytes": 400_000.0, "shards_bytes": 200_000.0,
}  # fmt: skip
GB = 10**9
MEANS = Means(workers=2, cpus=2, free_bytes=0)


def pipeline(backend: str, kind: str, rate: float, *, apart: bool = False, samples: int = 70) -> Pipeline:
    return Pipeline(
        backend=backend, folder=f"data/{kind}", kind=kind, samples=samples, file_bytes=samples * 200_000,
        measured=Measured(loader=Estimate(rate, rate, rate)), stages=[STAGES] if apart else (),
    )  # fmt: skip


RAW = pipeline("pytorch", "raw", 90, apart=True)
SHARDS = pipeline("shards", "shards", 4_000)


def named(found: list[Change], what: str) -> Change:
    (change,) = (change for change in found if change.what == what)
    return change


def test_converting_takes_the_disk_that_it_took() -> None:
    converting = named(changes.known(RAW, [SHARDS], MEANS), "Converting to shards")
    assert converting.measured
    assert converting.images_per_s.median == 4_000
    assert converting.size_bytes == 70 * 200_000


def test_another_backend_on_the_same_folder_costs_nothing() -> None:
    other = pipeline("dali", "raw", 300)
    change = named(changes.known(RAW, [other], MEANS), "Backend dali on data/raw")
    assert (change.size_bytes, change.measured) == (0, True)


def test_noise_is_no_change() -> None:
    noise = pipeline("synthetic", "shards", 9_000)
    assert not any(
        "shards" in change.what and change.measured for change in changes.known(RAW, [noise], MEANS)
    )


def test_a_cache_in_memory_needs_twice_the_room_and_more_workers_need_cpus() -> None:
    roomy = Means(workers=2, cpus=8, free_bytes=GB)
    assert {change.what for change in changes.known(RAW, [SHARDS], roomy)} == {
        "Converting to shards", "From the second epoch on, cache='ram'", "8 workers, one per CPU,",
    }  # fmt: skip
    large = pipeline("pytorch", "raw", 90, apart=True, samples=2_000)
    assert not any("cache" in change.what for change in changes.known(large, [], roomy))
    # in shards pictures are no larger than twice the side that is served, a cache keeps them as they are
    assert named(changes.known(large, [], roomy), "Converting to shards").size_bytes == 2_000 * 200_000


def test_more_workers_are_no_change_where_all_cores_were_busy() -> None:
    busy = Means(workers=2, cpus=8, free_bytes=0, cpu_share=0.97)
    assert not any("workers" in change.what for change in changes.known(RAW, [SHARDS], busy))
    idle = Means(workers=2, cpus=8, free_bytes=0, cpu_share=0.4)
    assert any("workers" in change.what for change in changes.known(RAW, [SHARDS], idle))
