"""Train by `loaders.examples.train` where a service starts one process on each host.

    python -m bench.sagemaker.train --data data/shards --checkpoints runs/one --epochs 20

Started on every host, this finds out where it is, starts a rank for each GPU of the host, and waits for them:

SageMaker   hosts, channels and hyperparameters are in the files of /opt/ml/input/config, which it writes for
            every image. Checkpoints go to /opt/ml/checkpoints, the model to /opt/ml/model.
others      NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. A task of `srun` knows its rank as SLURM_PROCID
            (slurm.sh sets the others), a pod of an Indexed Job of Kubernetes as JOB_COMPLETION_INDEX.

All other options than those of --help go to `python -m loaders.examples.train`. Who is ended by SIGTERM has
saved, and goes on where it was when the same command is started again. The exit code is that of the training:
2 for bad input, 143 after SIGTERM.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precache.errors import PrecacheError, SettingError

TRAINING = "loaders.examples.train"
CHECKPOINT, MODEL = "checkpoint.pt", "model.pt"
PORT = 29500
"""torchrun's own."""
_BASE = "SAGEMAKER_BASE_DIR"  # as SageMaker's training toolkit calls it
_VAL, _NO_DATA = ("val", "validation"), ("code",)  # channels
_RANKS = ("NODE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
_PATIENCE_S = 20.0  # for ranks to end by themselves, after one has failed
_SAVING_S = 100.0  # after SIGTERM; SageMaker ends what is left after 120 s
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One host among those of a job.

    Attributes:
        hosts: how many there are.
        number: of this one, from 0 on.
        master: name or address of host 0.
        port: on which host 0 listens; None: it is alone, any free one will do.
        interface: of the network among the hosts; None: the libraries find it.
    """

    hosts: int = 1
    number: int = 0
    master: str = "127.0.0.1"
    port: int | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.hosts:
            raise SettingError(
                f"this host has number {self.number}, but there are {self.hosts}, counted from 0"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """What SageMaker says of a job, in its files.

    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html

    Attributes:
        ml: its folder.
        resources, channels, hyperparameters: what is in the files.
    """

    ml: Path
    resources: Mapping[str, Any]
    channels: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    @classmethod
    def find(cls, ml: Path) -> "Job | None":
        """None where this is not SageMaker; SettingError where a file is not what it should be."""
        names = ("resourceconfig", "inputdataconfig", "hyperparameters")
        paths = [ml / f"input/config/{name}.json" for name in names]
        return cls(ml, *map(_read, paths)) if paths[0].exists() else None

    def place(self) -> Place:
        """Of this host; all hosts have the same list, in an order of their own."""
        names, current = self.resources.get("hosts"), self.resources.get("current_host")
        if not isinstance(names, list) or current not in names:
            raise SettingError(
                f"{self.ml}/input/config/resourceconfig.json: hosts must be a list with current_host "
                f"{current!r} in it, got {names!r}"
            )
        if len(names) == 1:
            return Place()
        return Place(
            hosts=len(names),
            number=sorted(names).index(current),
            master=min(names),
            port=_number(os.environ, "MASTER_PORT", PORT),
            interface=self.resources.get("network_interface_name"),
        )

    def data(self) -> tuple[str | None, str | None]:
        """The folder to train on, of the channel `train` or the only one; that of `val` or `validation`."""
        folders = {name: str(self.ml / "input/data" / name) for name in self.channels}
        val = next((folders[name] for name in _VAL if name in folders), None)
        names = sorted(folders.keys() - {*_VAL, *_NO_DATA})
        if "train" not in names and len(names) > 1:
            raise SettingError(
                f"which of the channels {', '.join(names)} to train on? call it train, or give --data"
            )
        return folders["train" if "train" in names else names[0]] if names else None, val

    def options(self) -> list[str]:
        """Hyperparameters as options are spelled: batch_size is --batch-size, bf16: true has no value."""
        found = []
        for name, value in self.hyperparameters.items():
            if not name.startswith("sagemaker_") and str(value).lower() != "false":
                found.append(f"--{name.replace('_', '-')}")
                found += [] if str(value).lower() == "true" else [str(value)]
        return found

    def keep(self, checkpoints: Path) -> None:
        """Put the trained model, and what else the training wrote, where SageMaker takes it from."""
        model, output = self.ml / "model", self.ml / "output/data"
        for folder in (model, output):
            folder.mkdir(parents=True, exist_ok=True)
        trained: dict[str, Any] = torch.load(checkpoints / CHECKPOINT, map_location="cpu", weights_only=True)
        torch.save({name: trained[name] for name in ("name", "classes", "model")}, model / MODEL)
        for path in sorted(checkpoints.glob("events.*")):
            shutil.copyfile(path, output / path.name)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def find_place(environment: Mapping[str, str]) -> Place:
    """Where this is, as a service that sets NNODES says; without it one host alone.

    Raises:
        SettingError: what the service has set is not complete, or does not go together.
    """
    hosts = _number(environment, "NNODES", 1)
    if hosts == 1:
        return Place()
    rank = next((name for name in _RANKS if environment.get(name)), "NODE_RANK")
    if not environment.get("MASTER_ADDR"):
        raise SettingError("MASTER_ADDR is not set; it names the host that leads, for all of them")
    return Place(
        hosts=hosts,
        number=_number(environment, rank),
        master=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", PORT),
    )


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name)
    if not text and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal():
        raise SettingError(f"{name} must be a number that the service sets, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this host's share; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:  # SageMaker runs `docker run IMAGE train`
        del given[0]
    try:
        job = Job.find(Path(os.environ.get(_BASE, "/opt/ml")))
        args, rest = parse([*(job.options() if job else ()), *given], job)
        place = job.place() if job else find_place(os.environ)
        command = [sys.executable, "-m", TRAINING, args.data, "--out", str(args.checkpoints), "--resume"]
        command += [*(("--val", args.val) if args.val else ()), *rest]
        ended = run_ranks(command, place, args.processes or torch.cuda.device_count() or 1, os.environ)
        if ended == 0 and place.number == 0 and job is not None:
            job.keep(args.checkpoints)
    except (PrecacheError, OSError) as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    return ended


def parse(arguments: list[str], job: Job | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, with what `job` says where they are not given; and those of the training."""
    parser = argparse.ArgumentParser(
        "python -m bench.sagemaker.train",
        description="Train by loaders.examples.train on the hosts of SageMaker, Slurm or Kubernetes.",
        epilog="All other options are those of python -m loaders.examples.train.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", help="what to train on (SageMaker: the channel train, or the only one)")
    add("--val", help="what to validate on, if not the split val (SageMaker: the channel val)")
    add(
        "--checkpoints",
        type=Path,
        default=job.ml / "checkpoints" if job else None,
        help="folder that outlives the job (SageMaker: /opt/ml/checkpoints)",
    )
    add("--processes", type=int, help="ranks on each host (default: one for each GPU, or one)")
    args, rest = parser.parse_known_args(arguments)
    if args.data is None and job is not None:
        args.data, val = job.data()
        args.val = args.val or val
    if args.data is None:
        raise SettingError("there is no --data, and no channel of SageMaker to train on")
    if args.checkpoints is None:
        raise SettingError("there is no --checkpoints: give a folder that outlives this job")
    if args.processes is not None and args.processes < 1:
        raise SettingError(f"--processes must be positive, got {args.processes}")
    return args, rest


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
    while None in (codes := [rank.poll() for rank in ranks]):
        failed = failed or next((code for code in codes if code), 0)
        if came and not signalled:
            signalled, end_s = came[0], time.monotonic() + _SAVING_S
            for rank in ranks:
                rank.terminate()
        if failed and not signalled:
            end_s = min(end_s, time.monotonic() + _PATIENCE_S)
        if time.monotonic() > end_s:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_S)
    failed = failed or next((code for code in codes if code), 0)
    if failed and signalled:
        return 128 + signalled
    return 128 - failed if failed < 0 else failed


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
