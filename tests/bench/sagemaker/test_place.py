"""Which host this is, what a job of SageMaker says of itself, and the files that people copy to start one."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.sagemaker.train import Job, Place, find_place, parse
from loaders.examples import common
from precache.errors import SettingError
from tests.command import ROOT

TWO = {"NNODES": "2", "MASTER_ADDR": "head"}
FOLDER = ROOT / "bench" / "sagemaker"
SLURM = FOLDER / "slurm.sh"


def write_job(
    ml: Path, channels: Iterable[str] = (), hyperparameters: Mapping[str, str] | None = None, **resources: Any
) -> Path:
    """Write SageMaker's files of one host, or what `resources` says, into the folder `ml`; it is returned."""
    config = ml / "input/config"
    config.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "resourceconfig": {"hosts": ["algo-1"], "current_host": "algo-1", **resources},
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
        "hyperparameters": dict(hyperparameters or {}),
    }.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    return ml


def job(ml: Path, **changes: Any) -> Job:
    found = Job.find(write_job(ml, **changes))
    assert found is not None
    return found


def place_of(ml: Path) -> Place:
    found = Job.find(ml)
    assert found is not None
    return found.place()


def test_one_host_alone_needs_no_service(tmp_path: Path) -> None:
    assert Job.find(tmp_path) is None
    assert find_place({}) == Place() == job(tmp_path).place()
    assert find_place({"NNODES": "1", "SLURM_PROCID": "0"}) == Place()


def test_all_hosts_agree_who_leads_in_whatever_order_they_are_told(tmp_path: Path) -> None:
    names = ["algo-2", "algo-10", "algo-1"]
    found = [
        job(tmp_path, hosts=told, current_host=current, network_interface_name="eth0").place()
        for told, current in ((names, "algo-1"), (names[::-1], "algo-2"), (names, "algo-10"))
    ]
    assert sorted(place.number for place in found) == [0, 1, 2]
    assert {(at.master, at.hosts, at.port, at.interface) for at in found} == {("algo-1", 3, 29500, "eth0")}
    for rank in ("NODE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        assert find_place({**TWO, rank: "1"}) == Place(hosts=2, number=1, master="head", port=29500)
        assert find_place({**TWO, rank: "1", "MASTER_PORT": "1234"}).port == 1234


def test_channels_and_hyperparameters_are_options_of_the_training(tmp_path: Path) -> None:
    at = f"{tmp_path}/input/data"
    assert job(tmp_path, channels=()).data() == (None, None)
    assert job(tmp_path, channels=("shards", "code")).data() == (f"{at}/shards", None)
    several = job(tmp_path, channels=("shards", "train", "validation"))
    assert several.data() == (f"{at}/train", f"{at}/validation")
    with pytest.raises(SettingError, match="which of the channels one, two"):
        job(tmp_path, channels=("one", "two")).data()
    given = {"batch_size": "64", "bf16": "True", "resume": "false", "out": "my_runs", "sagemaker_region": "x"}
    options = ["--batch-size", "64", "--bf16", "--out", "my_runs"]
    assert job(tmp_path, hyperparameters=given).options() == options


def test_what_a_service_has_set_wrongly_and_damaged_files_are_named(tmp_path: Path) -> None:
    for environment, said in (
        ({**TWO, "SLURM_PROCID": "2"}, "number 2, but there are 2"),
        (TWO, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "two"}, "NNODES must be a number"),
    ):
        with pytest.raises(SettingError, match=said):
            find_place(environment)
    hosts = (("a", "a"), (["a"], "b"), (["a"], None), (None, None))
    damaged = [("resourceconfig", json.dumps({"hosts": all_, "current_host": one})) for all_, one in hosts]
    for name, text in (*damaged, ("hyperparameters", "{"), ("hyperparameters", "[]")):
        (write_job(tmp_path) / f"input/config/{name}.json").write_text(text)
        with pytest.raises(SettingError, match=f"{name}.json"):
            place_of(tmp_path)


def check_training(options: list[str]) -> None:
    """That `loaders.examples.train` takes them."""
    common.parser("train", "").parse_args(["data", *options])


def test_every_pod_of_the_job_finds_its_place_and_mounts_what_its_options_name() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    hosts = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == hosts
    places = [find_place({**environment, "JOB_COMPLETION_INDEX": str(index)}) for index in range(hosts)]
    # a pod of an Indexed Job is called JOB-INDEX, in the sub-domain that a service without an address gives
    name, _, domain = places[0].master.partition(".")
    assert places == [Place(hosts=2, number=index, master=f"{name}.{domain}", port=29500) for index in (0, 1)]
    assert name == f"{job['metadata']['name']}-0"
    assert domain == pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert container["command"] == ["python", "-m", "bench.sagemaker.train"]
    args, rest = parse(container["args"], None)
    check_training(rest)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert str(args.checkpoints).startswith("/data/")
    assert args.data.startswith("/data/")
    assert set(mounts.values()) == {volume["name"] for volume in pods["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pods["terminationGracePeriodSeconds"] >= 120
