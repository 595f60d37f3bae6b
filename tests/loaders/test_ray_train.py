"""`loaders.build` in a worker of Ray Train."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import loaders

KILLED_AT, BATCH = 3, 8  # batches of rank 1; samples
pytestmark = pytest.mark.slow


def train(settings: dict[str, str]) -> None:
    """An epoch; the first life of rank 1 ends in the midst of it."""
    import tempfile

    from ray import train

    rank, life = train.get_context().get_world_rank(), 0
    folder = Path(settings["folder"])
    workers = 1 if settings["engine"] == "ray" else 0
    reading = loaders.Reading(engine=settings["engine"], workers=workers, threads=1)
    with loaders.build(settings["path"], batch_size=BATCH, size=32, reading=reading) as loader:
        if (checkpoint := train.get_checkpoint()) is not None:
            life = 1
            with checkpoint.as_directory() as at:
                loader.load_state_dict(json.loads((Path(at) / "loader.json").read_text()))
        for batch in loader:
            served = loader.state_dict()["served_batches"]
            place = f"{life}-{rank}-{served:02d}"
            (folder / place).write_text(json.dumps([len(loader), batch.ids.tolist()]))
            if (life, rank, served) == (0, 1, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as written:
                (Path(written) / "loader.json").write_text(json.dumps(loader.state_dict()))
                of_rank_0 = train.Checkpoint.from_directory(written) if rank == 0 else None
                train.report({}, checkpoint=of_rank_0)


def run_trainer(trainer: Any, engine: str, folder: Path, path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    trainer(
        train,
        train_loop_config={"path": str(path), "folder": str(folder), "engine": engine},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=1)),
    ).fit()


@pytest.mark.parametrize(("kind", "engine"), [("torch", "ray"), ("plain", "local")])
@pytest.mark.timeout(600)
def test_every_sample_is_served_once_over_both_lives_of_a_trainer(
    kind: str, engine: str, raw_tree: Path, tmp_path: Path, ray_cluster: Any
) -> None:
    """`plain`: where nobody has initialised torch.distributed."""
    pytest.importorskip(
        "ray.train", exc_type=ImportError, reason="Ray Train is not installed: pip install 'ray[train]'"
    )
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    run_trainer(TorchTrainer if kind == "torch" else DataParallelTrainer, engine, tmp_path, raw_tree)
    lives: list[dict[tuple[int, int], list[int]]] = [{}, {}]
    for file in tmp_path.glob("?-?-??"):
        life, rank, served = map(int, file.name.split("-"))
        batches, ids = json.loads(file.read_text())
        assert batches == -(-70 // (2 * BATCH))
        lives[life][rank, served] = ids
    first = min(served for _, served in lives[1])
    assert 1 < first <= KILLED_AT
    kept = [ids for (_, served), ids in lives[0].items() if served < first]
    assert sorted(i for ids in [*kept, *lives[1].values()] for i in ids) == list(range(70))
