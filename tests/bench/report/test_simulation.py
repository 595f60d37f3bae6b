"""The model against closed forms."""

import pytest

from bench.report.simulation import DECODE, LINK, SLOWEST, STEP, STORAGE, Rates, simulate
from precache.errors import SettingError


def rates(**changed: object) -> Rates:
    """Every stage far faster than a trainer of 1,000 images/s, unless changed."""
    usual = {
        "decode_s": 1e-5, "image_bytes": 100_000, "storage_mbps": None, "node_mbps": None,
        "trainer_images_per_s": 1000.0, "batch_size": 32, "workers": 4, "prefetch": 8, "cpus": None,
        "noise": 0.0, "seed": 0,
    }  # fmt: skip
    return Rates(**{**usual, **changed})


@pytest.mark.parametrize("gpus", [1, 3, 8, 64])
@pytest.mark.parametrize(
    ("changed", "binds", "per_gpu", "together"),
    [
        ({}, STEP, 1000.0, None),
        ({"decode_s": 0.008}, DECODE, 4 / 0.008, None),
        ({"decode_s": 0.008, "workers": 1, "prefetch": 2}, DECODE, 1 / 0.008, None),
        ({"decode_s": 0.008, "cpus": 4}, DECODE, None, 4 / 0.008),
        ({"storage_mbps": 50.0}, STORAGE, None, 500.0),
        ({"node_mbps": 20.0, "storage_mbps": 1e6}, LINK, None, 200.0),
    ],
)
def test_where_one_stage_binds_its_rate_is_the_throughput(
    changed: dict[str, object], binds: str, per_gpu: float | None, together: float | None, gpus: int
) -> None:
    """On one node: its CPUs, its link and the storage are shared by all GPUs."""
    found = simulate(rates(**changed), gpus, nodes=1)
    expected = together if per_gpu is None else per_gpu * gpus
    assert found.images_per_s == pytest.approx(expected, rel=0.01)
    assert found.binds == binds
    assert found.wait_share == pytest.approx(1 - expected / (1000 * gpus), abs=0.01)
    assert found.busy[binds] == pytest.approx(1, abs=0.01)
    assert found.busy[STEP] == pytest.approx(1 - found.wait_share, abs=1e-9)
    assert found.needed_mbps == pytest.approx(100 * gpus)


def test_each_node_brings_its_own_link_and_cpus() -> None:
    for nodes in (1, 2, 8):
        assert simulate(rates(node_mbps=20.0), 8, nodes).images_per_s == pytest.approx(200 * nodes, rel=0.01)
        crowded = simulate(rates(decode_s=0.016, cpus=4), 8, nodes)
        assert crowded.images_per_s == pytest.approx(min(8 * 250, 250 * nodes), rel=0.01)


def test_a_worker_reads_and_decodes_one_after_the_other() -> None:
    """Reading takes as long as decoding: one worker does half of what two do, and those fill the storage."""
    halves = {"storage_mbps": 50.0, "decode_s": 0.002, "trainer_images_per_s": 5000.0}
    one, two = (simulate(rates(workers=n, prefetch=4, **halves), 1, 1) for n in (1, 2))
    assert one.images_per_s == pytest.approx(250, rel=0.01)
    assert two.images_per_s == pytest.approx(500, rel=0.01)


def test_one_batch_ahead_is_enough_where_loading_is_shorter_than_the_step() -> None:
    overlapped = simulate(rates(workers=1, prefetch=1, decode_s=0.0005), 1, 1)
    assert overlapped.images_per_s == pytest.approx(1000, rel=0.01)


def test_noise_makes_all_wait_for_the_slowest_and_more_so_with_more_gpus() -> None:
    shares = [simulate(rates(noise=0.1), gpus, 1).wait_share for gpus in (1, 8, 64)]
    assert shares[0] < 0.01 < shares[1] < shares[2]
    assert simulate(rates(noise=0.1), 64, 8).binds == SLOWEST
    assert simulate(rates(noise=0.1, storage_mbps=1000.0), 64, 8).binds == STORAGE


def test_the_same_seed_gives_the_same_prediction() -> None:
    one, again, other = (simulate(rates(noise=0.1, seed=seed), 8, 1) for seed in (1, 1, 2))
    assert one == again != other
    assert one.images_per_s == pytest.approx(other.images_per_s, rel=0.05)


def test_more_of_anything_never_slows_down() -> None:
    base = {"decode_s": 0.004, "storage_mbps": 300.0, "workers": 3, "prefetch": 6}
    slow = simulate(rates(**base), 4, 1).images_per_s
    for better in ({"decode_s": 0.002}, {"storage_mbps": 600.0}, {"workers": 6}, {"prefetch": 12}):
        assert simulate(rates(**{**base, **better}), 4, 1).images_per_s >= slow * 0.999


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"noise": -0.1}, "noise must be a share from 0 to 1, got -0.1"),
        ({"decode_s": -1.0}, "decode_s must be a number of at least 0, got -1.0"),
        ({"storage_mbps": 0.0}, "storage_mbps must be a number"),
        ({"trainer_images_per_s": float("nan")}, "trainer_images_per_s must be a number .*, got nan"),
    ],
)
def test_a_bad_rate_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        rates(**changed)
    with pytest.raises(SettingError, match="nodes must be an integer from 1 to 4, got 5"):
        simulate(rates(), 4, 5)
