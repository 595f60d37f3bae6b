"""Train by `loaders.examples.train` where a service starts one process on each host.

    python -m bench.sagemaker.train --data data/shards --checkpoints runs/one --epochs 20

Started on every host, this finds out where it is, starts a rank for each GPU of the host, and waits for them:

SageMaker   hosts, channels and hyperparameters are in the files of /opt/ml/input/config, which it writes for
            every image. Checkpoints go to /opt/ml/checkpoints, the model to /opt/ml/model.
Slurm       `srun` starts one task a node: SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_NODELIST.
others      NNODES, NODE_RANK, MASTER_ADDR. In an Indexed Job of Kubernetes JOB_COMPLETION_INDEX is the rank.

All other options than those of --help go to `python -m loaders.examples.train`. Who is ended by SIGTERM has
saved, and goes on where it was when the same command is started again. The exit code is that of the training:
2 for bad input, 143 after SIGTERM.
"""

import argparse
import json
import os
import re
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

from precache.errors import PrecacheError, SettingError

TRAINING = "loaders.examples.train"
CHECKPOINT, MODEL = "checkpoint.pt", "model.pt"
PORT = 29500
"""torchrun's own."""
_BASE = "SAGEMAKER_BASE_DIR"  # as SageMaker's training toolkit calls it
_VAL, _NO_DATA = ("val", "validation"), ("code",)  # channels
_PORTS = 20_000  # from here on, so many, by the number of the Slurm job: nodes may be shared with other jobs
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
        config = ml / "input/config"
        if not (config / "resourceconfig.json").exists():
            return None
        names = ("resourceconfig", "inputdataconfig", "hyperparameters")
        return cls(ml, *(_read(config / f"{name}.json") for name in names))

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
            port=_port(os.environ, PORT),
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
        import torch

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
        raise SettingError(f"{path}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def find_place(environment: Mapping[str, str]) -> Place:
    """Where this is: Slurm, another service that sets NNODES, or one host alone.

    Raises:
        SettingError: what the service has set is not complete, or does not go together.
    """
    if "SLURM_PROCID" in environment and "SLURM_JOB_NODELIST" in environment:
        return _slurm(environment)
    if "NNODES" in environment and (hosts := _number(environment, "NNODES")) > 1:
        rank = "NODE_RANK" if "NODE_RANK" in environment else "JOB_COMPLETION_INDEX"
        return Place(
            hosts=hosts,
            number=_number(environment, rank),
            master=_text(environment, "MASTER_ADDR"),
            port=_port(environment, PORT),
        )
    return Place()


def _slurm(environment: Mapping[str, str]) -> Place:
    tasks = _number(environment, "SLURM_NTASKS")
    nodes = int(environment.get("SLURM_NNODES", tasks))
    if tasks != nodes:
        raise SettingError(
            f"srun has started {tasks} tasks on {nodes} nodes; start one a node (--ntasks-per-node=1): it "
            f"starts a rank for each GPU of its node"
        )
    if tasks == 1:
        return Place()
    job = environment.get("SLURM_JOB_ID", "")
    return Place(
        hosts=tasks,
        number=_number(environment, "SLURM_PROCID"),
        master=environment.get("MASTER_ADDR") or first_host(environment["SLURM_JOB_NODELIST"]),
        port=_port(environment, _PORTS + int(job) % _PORTS if job.isdecimal() else PORT),
    )


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: gpu[003-006,9],login1 -> gpu003."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name[0] if name else nodes)


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise SettingError(f"{name} is not set; the service that starts this sets it")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise SettingError(f"{name} must be a number, got {text!r}")
    return int(text)


def _port(environment: Mapping[str, str], otherwise: int) -> int:
    return _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else otherwise


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
        ended = run_ranks(command, place, args.processes or _gpus() or 1, os.environ)
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


def _gpus() -> int:
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


if __name__ == "__main__":
    sys.exit(main())
