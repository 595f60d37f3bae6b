"""Train with `loaders.examples.train` on Amazon SageMaker: torchrun on each host that SageMaker's files name.

    python -m bench.sagemaker.train --epochs 90          # in a container that SageMaker has started

SageMaker describes a job in files below /opt/ml of every container:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html

input/config/resourceconfig.json        the hosts; the first by name leads
input/config/hyperparameters.json       options of the training; the command line may give more
input/data/CHANNEL                      data to train on and to validate on
checkpoints, model, output/data         checkpoints of the training, its model, its events for TensorBoard

After SIGTERM the training saves a checkpoint and ends; it goes on when the same job is started again. The
exit code is that of the first rank that failed: 2 for bad input, 143 after SIGTERM.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from precache.errors import PrecacheError, SettingError

RESOURCES = "input/config/resourceconfig.json"
VALIDATION_CHANNELS = ("val", "validation")
CODE_CHANNEL = "code"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the GPUs of this host, and return the exit code.

    Args:
        arguments: options of the training; None: those of the command line.
    """
    options = list(sys.argv[1:] if arguments is None else arguments)
    if options[:1] == ["train"]:  # SageMaker runs `docker run IMAGE train`
        del options[0]
    ml = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))  # the variable of SageMaker's training toolkit
    try:
        host_options = find_hosts(ml)
        command = [*host_options, "--module", "loaders.examples.train", *training_options(ml), *options]
        # ranks import this project, not a loaders.py of the working folder
        os.environ["PYTHONSAFEPATH"] = "1"
        choose_network(ml)
        # torchrun's own variable for --nproc-per-node
        os.environ.setdefault("PET_NPROC_PER_NODE", str(torch.cuda.device_count() or 1))
        torchrun.run(torchrun.parse_args(command))  # type: ignore[no-untyped-call]
        if "--node-rank=0" in host_options:
            save_model(ml)
    except (PrecacheError, OSError) as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def find_hosts(ml: Path) -> list[str]:
    """Return the options of torchrun that name the number of hosts, this host's rank and the leading host.

    Hosts are ranked by name, because each has the list of hosts in an order of its own.
    """
    path = ml / RESOURCES
    if not path.exists():
        raise SettingError(
            "is not there",
            path=path,
            remedy="elsewhere than on SageMaker, run 'torchrun -m loaders.examples.train'",
        )
    resources = read_config(path)
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if not isinstance(hosts, list) or current not in hosts:
        raise SettingError(
            f"hosts must be a list with current_host {current!r} in it, got {hosts!r}", path=path
        )
    options = [f"--nnodes={len(hosts)}", f"--node-rank={sorted(hosts).index(current)}"]
    if len(hosts) > 1:
        options.append(f"--master-addr={min(hosts)}")
    return options


def choose_network(ml: Path) -> None:
    """Set the network interface of NCCL and gloo to the one that joins the hosts, unless the user has."""
    interface = read_config(ml / RESOURCES).get("network_interface_name")
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def training_options(ml: Path) -> list[str]:
    """Return the options of the training: its folders are the job's channels, the others hyperparameters.

    A hyperparameter `batch_size: 64` becomes `--batch-size=64`, `bf16: true` becomes `--bf16`.

    Raises:
        SettingError: the job has not one channel to train on, or a file of SageMaker's is damaged.
    """
    channels = read_config(ml / "input/config/inputdataconfig.json").keys()
    train = channels - {CODE_CHANNEL, *VALIDATION_CHANNELS}
    if "train" in train:
        train = {"train"}
    if len(train) != 1:
        raise SettingError(
            f"which channel to train on? the job has {', '.join(sorted(channels)) or 'none'}",
            remedy="call it train",
        )
    data = ml / "input/data"
    options = [str(data / train.pop()), f"--out={ml / 'checkpoints'}", "--resume"]
    for name in VALIDATION_CHANNELS:
        if name in channels:
            options.append(f"--val={data / name}")
    for name, value in read_config(ml / "input/config/hyperparameters.json").items():
        option = f"--{name.replace('_', '-')}"
        if name.startswith("sagemaker_") or str(value).lower() == "false":
            continue
        options.append(option if str(value).lower() == "true" else f"{option}={value}")
    return options


def save_model(ml: Path) -> None:
    """Copy the trained model, and the events for TensorBoard, into the folders that SageMaker uploads."""
    checkpoints, model, output = ml / "checkpoints", ml / "model", ml / "output/data"
    for folder in (model, output):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint: dict[str, Any] = torch.load(
        checkpoints / "checkpoint.pt", map_location="cpu", weights_only=True
    )
    torch.save({name: checkpoint[name] for name in ("name", "classes", "model")}, model / "model.pt")
    for path in checkpoints.glob("events.*"):
        shutil.copyfile(path, output / path.name)


def read_config(path: Path) -> dict[str, Any]:
    """Read one of SageMaker's files; an empty dict if it is missing, SettingError if it is no JSON object."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(f"is not JSON: {error}", path=path) from error
    if not isinstance(content, dict):
        raise SettingError(f"expected a JSON object, got {type(content).__name__}", path=path)
    return content


if __name__ == "__main__":
    sys.exit(main())
