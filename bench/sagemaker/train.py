"""Train by `loaders.examples.train` where a service starts one process on each host.

    python -m bench.sagemaker.train --data data/shards --checkpoints runs/one --epochs 20

Started on every host, this finds out where it is, starts a rank for each GPU of the host, and waits for them:

SageMaker   hosts, channels and folders are those of SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS, SM_CHANNEL_*,
            SM_MODEL_DIR and SM_OUTPUT_DATA_DIR; in an image that does not set them, of the files in
            /opt/ml/input/config. Checkpoints go to /opt/ml/checkpoints.
Slurm       `srun` starts one task a node: SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_NODELIST.
others      NNODES, NODE_RANK, MASTER_ADDR. In an Indexed Job of Kubernetes JOB_COMPLETION_INDEX is the rank.

All other options than those of --help go to `python -m loaders.examples.train`. Who is ended by SIGTERM has
saved, and goes on where it was when the same command is started again. The exit code is that of the training:
2 for bad input, 143 after SIGTERM.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sagemaker.place import Place, find_channels, find_place, from_files, spelled
from precache.errors import PrecacheError, SettingError

TRAINING = "loaders.examples.train"
CHECKPOINT = "checkpoint.pt"
MODEL = "model.pt"
_ML = Path("/opt/ml")
_PATIENCE_S = 20.0  # for ranks to end by themselves, after one has failed
_SAVING_S = 100.0  # after SIGTERM; SageMaker ends what is left after 120 s
_POLL_S = 0.1


def main(arguments: Sequence[str] | None = None, ml: Path = _ML) -> int:
    """Train on this host's share; the exit code. `ml` is SageMaker's folder."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        environment = dict(os.environ)
        if given[:1] == ["train"]:  # SageMaker runs `docker run IMAGE train`
            del given[0]
        if "SM_HOSTS" not in environment and (ml / "input/config/resourceconfig.json").exists():
            found, hyperparameters = from_files(ml)
            environment |= found
            given = hyperparameters + given
        args, rest = parse(spelled(given), environment, ml)
        place = find_place(environment)
        command = [sys.executable, "-m", TRAINING, args.data, "--out", str(args.checkpoints), "--resume"]
        command += [*(("--val", args.val) if args.val else ()), *rest]
        ended = run_ranks(command, place, args.processes or gpus(environment) or 1, environment)
        if ended == 0 and place.number == 0:
            keep(args.checkpoints, environment)
    except (PrecacheError, OSError) as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    return ended


def parse(
    arguments: list[str], environment: Mapping[str, str], ml: Path
) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and those of the training."""
    parser = argparse.ArgumentParser(
        "python -m bench.sagemaker.train",
        description="Train by loaders.examples.train on the hosts of SageMaker, Slurm or Kubernetes.",
        epilog="All other options are those of python -m loaders.examples.train.",
        allow_abbrev=False,
    )
    managed = "SM_HOSTS" in environment
    add = parser.add_argument
    add("--data", help="what to train on (SageMaker: the channel train, or the only one)")
    add("--val", help="what to validate on, if not the split val (SageMaker: the channel val)")
    add(
        "--checkpoints",
        type=Path,
        default=ml / "checkpoints" if managed else None,
        help="folder that outlives the job (SageMaker: /opt/ml/checkpoints)",
    )
    add("--processes", type=int, help="ranks on each host (default: one for each GPU, or one)")
    args, rest = parser.parse_known_args(arguments)
    if args.data is None:
        args.data, val = find_channels(environment)
        args.val = args.val or val
    if args.data is None:
        raise SettingError("there is no --data, and no channel: SM_CHANNEL_TRAIN is not set")
    if args.checkpoints is None:
        raise SettingError("there is no --checkpoints: give a folder that outlives this job")
    if args.processes is not None and args.processes < 1:
        raise SettingError(f"--processes must be positive, got {args.processes}")
    return args, rest


def gpus(environment: Mapping[str, str]) -> int:
    """Of this host."""
    if "SM_NUM_GPUS" in environment:
        return int(environment["SM_NUM_GPUS"])
    import torch

    return torch.cuda.device_count()


def run_ranks(command: Sequence[str], place: Place, processes: int, environment: Mapping[str, str]) -> int:
    """Run a rank for each process, told what torchrun would tell it; the exit code of the first that failed.

    They are no children of torchrun's, because it makes every exit code 1. SIGTERM and SIGINT are handed on,
    once: the ranks save, and end.
    """
    shared = {
        **environment,
        "WORLD_SIZE": str(place.hosts * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        # so that each host reads shards of its own: see `loaders.settings.find_nodes`
        "GROUP_WORLD_SIZE": str(place.hosts),
        "GROUP_RANK": str(place.number),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port or _free_port()),
    }
    if place.interface is not None:
        shared = {"NCCL_SOCKET_IFNAME": place.interface, "GLOO_SOCKET_IFNAME": place.interface, **shared}
    ranks: list[subprocess.Popen[bytes]] = []
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda got, _: came.append(got))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for local in range(processes):
            own = {"RANK": str(place.number * processes + local), "LOCAL_RANK": str(local)}
            # a session of its own: Ctrl-C and Slurm would signal the ranks, too, a second time
            ranks.append(subprocess.Popen(command, env={**shared, **own}, start_new_session=True))
        return _wait(ranks, came)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], came: Sequence[int]) -> int:
    """Until all have ended. Where one fails, or a signal came, the others have a while to end themselves."""
    failed, signalled, end_s = 0, 0, float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = failed or next((code for code in codes if code), 0)
        if None not in codes:
            break
        if came and not signalled:
            signalled, end_s = came[0], time.monotonic() + _SAVING_S
            _signal(ranks, signal.SIGTERM)
        if failed and not signalled:
            end_s = min(end_s, time.monotonic() + _PATIENCE_S)
        if time.monotonic() > end_s:
            _signal(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    if failed and signalled:
        return 128 + signalled
    return 128 - failed if failed < 0 else failed


def _signal(ranks: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def keep(checkpoints: Path, environment: Mapping[str, str]) -> None:
    """Put the trained model, and what else the training wrote, where SageMaker takes it from."""
    import torch

    if "SM_MODEL_DIR" in environment:
        trained: dict[str, Any] = torch.load(checkpoints / CHECKPOINT, map_location="cpu", weights_only=True)
        folder = Path(environment["SM_MODEL_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: trained[name] for name in ("name", "classes", "model")}, folder / MODEL)
    if "SM_OUTPUT_DATA_DIR" in environment:
        for path in sorted(checkpoints.glob("events.*")):
            folder = Path(environment["SM_OUTPUT_DATA_DIR"])
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    sys.exit(main())
