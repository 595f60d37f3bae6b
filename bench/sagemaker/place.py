"""Which of how many hosts this is, and who leads them, by what the service has put into the environment."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from precache.errors import SettingError

PORT = 29500
"""torchrun's own."""
_TRAIN = "SM_CHANNEL_TRAIN"
_VAL = ("SM_CHANNEL_VAL", "SM_CHANNEL_VALIDATION")
_NO_DATA = ("SM_CHANNEL_CODE",)
_PORTS = 20_000  # from here on, so many, by the number of the Slurm job: nodes may be shared with other jobs


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


def find_place(environment: Mapping[str, str]) -> Place:
    """Where this is: SageMaker, Slurm, another service that sets NNODES, or one host alone.

    Raises:
        SettingError: what the service has set is not complete, or does not go together.
    """
    if "SM_HOSTS" in environment:
        return _sagemaker(environment)
    if "SLURM_PROCID" in environment and "SLURM_JOB_NODELIST" in environment:
        return _slurm(environment)
    if "NNODES" in environment:
        hosts = _number(environment, "NNODES")
        rank = "NODE_RANK" if "NODE_RANK" in environment else "JOB_COMPLETION_INDEX"
        if hosts > 1:
            return Place(
                hosts=hosts,
                number=_number(environment, rank),
                master=_text(environment, "MASTER_ADDR"),
                port=_port(environment, PORT),
            )
    return Place()


def _sagemaker(environment: Mapping[str, str]) -> Place:
    hosts, current = environment["SM_HOSTS"], _text(environment, "SM_CURRENT_HOST")
    try:
        names = json.loads(hosts)
    except ValueError:
        names = None
    if not isinstance(names, list) or current not in names:
        raise SettingError(
            f"SM_HOSTS must be a JSON list with SM_CURRENT_HOST {current!r} in it, got {hosts!r}"
        )
    if len(names) == 1:
        return Place()
    names.sort()  # every host has the same list, in an order of its own
    return Place(
        hosts=len(names),
        number=names.index(current),
        master=names[0],
        port=_port(environment, PORT),
        interface=environment.get("SM_NETWORK_INTERFACE_NAME"),
    )


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


def find_channels(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Folders to train and to validate on: the channels `train`, or the only one, and `val` or `validation`.

    Raises:
        SettingError: there are several channels, none of which is called train.
    """
    val = next((environment[name] for name in _VAL if name in environment), None)
    if _TRAIN in environment:
        return environment[_TRAIN], val
    names = sorted(name for name in environment if name.startswith("SM_CHANNEL_"))
    names = [name for name in names if name not in (*_VAL, *_NO_DATA)]
    if len(names) > 1:
        shown = ", ".join(name.removeprefix("SM_CHANNEL_").lower() for name in names)
        raise SettingError(f"which of the channels {shown} to train on? call it train, or give --data")
    return (environment[names[0]] if names else None), val


def from_files(ml: Path) -> tuple[dict[str, str], list[str]]:
    """What SageMaker writes for every image, named as its training toolkit names it; and the hyperparameters.

    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html

    Raises:
        SettingError: a file is not what is written there.
    """
    config = ml / "input/config"
    resources = _read(config / "resourceconfig.json")
    hyperparameters = _read(config / "hyperparameters.json")
    channels = _read(config / "inputdataconfig.json")
    try:
        hosts, current = resources["hosts"], str(resources["current_host"])
    except KeyError as error:
        raise SettingError(f"{config / 'resourceconfig.json'}: it has no {error}") from error
    environment = {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": current,
        "SM_MODEL_DIR": str(ml / "model"),
        "SM_OUTPUT_DATA_DIR": str(ml / "output/data"),
        **{f"SM_CHANNEL_{name.upper()}": str(ml / "input/data" / name) for name in channels},
    }
    if resources.get("network_interface_name"):
        environment["SM_NETWORK_INTERFACE_NAME"] = str(resources["network_interface_name"])
    ours = {name: value for name, value in hyperparameters.items() if not name.startswith("sagemaker_")}
    return environment, [part for name, value in ours.items() for part in (f"--{name}", str(value))]


def spelled(arguments: list[str]) -> list[str]:
    """Hyperparameters as options are spelled: `--batch_size 64` has hyphens, `--bf16 True` no value."""
    found: list[str] = []
    for argument in arguments:
        if argument in ("True", "true") and found and found[-1].startswith("--"):
            continue
        if argument in ("False", "false") and found and found[-1].startswith("--"):
            found.pop()
            continue
        name, equals, value = argument.partition("=")
        found.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return found


def _read(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise SettingError(f"{path}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


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
