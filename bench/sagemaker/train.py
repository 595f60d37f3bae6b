"""Train with `loaders.examples.train` on Amazon SageMaker: torchrun on each host, as SageMaker's files say.

    python -m bench.sagemaker.train --epochs 90          # in a container that SageMaker has started

SageMaker describes a job in files below /opt/ml, in every image:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html

input/config/resourceconfig.json        the hosts; the first by name leads
input/config/hyperparameters.json       options of the training, as are those that are given here
input/data/CHANNEL                      what to train on and to validate on
checkpoints, model, output/data         what the training saves, its model and its events for TensorBoard

After SIGTERM the training has saved, and goes on when the same job is started again. The exit code is that of
the first rank that failed: 2 for bad input, 143 after SIGTERM.
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
    """Train on this host's share; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:  # SageMaker runs `docker run IMAGE train`
        del given[0]
    ml = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))  # as SageMaker's training toolkit calls it
    try:
        hosts = find_hosts(ml)
        command = [*hosts, "--module", "loaders.examples.train", *training_options(ml), *given]
        os.environ["PYTHONSAFEPATH"] = (
            "1"  # the ranks import this project, no loaders.py of the working folder
        )
        use_network(ml)
        # torchrun's own variable for --nproc-per-node
        os.environ.setdefault("PET_NPROC_PER_NODE", str(torch.cuda.device_count() or 1))
        torchrun.run(torchrun.parse_args(command))  # type: ignore[no-untyped-call]
        if "--node-rank=0" in hosts:
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
    """Options of torchrun: which of the hosts this is. Each host has their list in an order of its own."""
    path = ml / RESOURCES
    if not path.exists():
        raise SettingError(
            f"{path}: is not there; elsewhere than on SageMaker, run 'torchrun -m loaders.examples.train'"
        )
    resources = read_config(path)
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if not isinstance(hosts, list) or current not in hosts:
        raise SettingError(f"{path}: hosts must be a list with current_host {current!r} in it, got {hosts!r}")
    options = [f"--nnodes={len(hosts)}", f"--node-rank={sorted(hosts).index(current)}"]
    if len(hosts) > 1:
        options.append(f"--master-addr={min(hosts)}")
    return options


def use_network(ml: Path) -> None:
    """Tell NCCL and gloo, unless the user has, which network joins the hosts."""
    interface = read_config(ml / RESOURCES).get("network_interface_name")
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def training_options(ml: Path) -> list[str]:
    """Options of the training: channels are its folders, and batch_size: 64 is --batch-size=64."""
    channels = read_config(ml / "input/config/inputdataconfig.json").keys()
    train = channels - {CODE_CHANNEL, *VALIDATION_CHANNELS}
    if "train" in train:
        train = {"train"}
    if len(train) != 1:
        raise SettingError(
            f"which channel to train on? the job has {', '.join(sorted(channels)) or 'none'}; call it train"
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
    """Put the trained model, and what else the training wrote, where SageMaker takes it from."""
    checkpoints, model, output = ml / "checkpoints", ml / "model", ml / "output/data"
    for folder in (model, output):
        folder.mkdir(parents=True, exist_ok=True)
    trained: dict[str, Any] = torch.load(checkpoints / "checkpoint.pt", map_location="cpu", weights_only=True)
    torch.save({name: trained[name] for name in ("name", "classes", "model")}, model / "model.pt")
    for path in checkpoints.glob("events.*"):
        shutil.copyfile(path, output / path.name)


def read_config(path: Path) -> dict[str, Any]:
    """Read one of SageMaker's files, empty where it is not there; SettingError where it is no JSON object."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


if __name__ == "__main__":
    sys.exit(main())
