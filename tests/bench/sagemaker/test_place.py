"""Which host this is, and what a job of SageMaker says of itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.sagemaker.train import Job, Place, find_place
from precache.errors import SettingError
from tests.bench.sagemaker.files import write_job

TWO = {"NNODES": "2", "MASTER_ADDR": "head"}


def job(ml: Path, **changes: Any) -> Job:
    found = Job.find(write_job(ml, **changes))
    assert found is not None
    return found


def find_place_of(ml: Path) -> Place:
    found = Job.find(ml)
    assert found is not None
    return found.place()


def test_one_host_alone_needs_no_service(tmp_path: Path) -> None:
    assert Job.find(tmp_path) is None
    assert find_place({}) == Place() == job(tmp_path).place()
    assert find_place({"NNODES": "1", "SLURM_PROCID": "0"}) == Place()


def test_all_hosts_of_sagemaker_agree_who_leads_in_whatever_order_they_are_told(tmp_path: Path) -> None:
    names = ["algo-2", "algo-10", "algo-1"]
    found = [
        job(tmp_path, hosts=told, current_host=current, network_interface_name="eth0").place()
        for told, current in ((names, "algo-1"), (names[::-1], "algo-2"), (names, "algo-10"))
    ]
    assert sorted(place.number for place in found) == [0, 1, 2]
    assert {(at.master, at.hosts, at.port, at.interface) for at in found} == {("algo-1", 3, 29500, "eth0")}


@pytest.mark.parametrize("rank", ["NODE_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"])
def test_each_service_tells_the_rank_of_a_host_by_a_name_of_its_own(rank: str) -> None:
    assert find_place({**TWO, rank: "1"}) == Place(hosts=2, number=1, master="head", port=29500)
    assert find_place({**TWO, rank: "1", "MASTER_PORT": "1234"}).port == 1234


def test_the_channel_to_train_on_is_train_or_the_only_one(tmp_path: Path) -> None:
    at = f"{tmp_path}/input/data"
    assert job(tmp_path, channels=()).data() == (None, None)
    assert job(tmp_path, channels=("shards", "code")).data() == (f"{at}/shards", None)
    several = job(tmp_path, channels=("shards", "train", "validation"))
    assert several.data() == (f"{at}/train", f"{at}/validation")
    with pytest.raises(SettingError, match="which of the channels one, two"):
        job(tmp_path, channels=("one", "two")).data()


def test_hyperparameters_are_options_of_the_training(tmp_path: Path) -> None:
    given = {"batch_size": "64", "bf16": "True", "resume": "false", "out": "my_runs", "sagemaker_region": "x"}
    assert job(tmp_path, hyperparameters=given).options() == [
        "--batch-size",
        "64",
        "--bf16",
        "--out",
        "my_runs",
    ]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**TWO, "SLURM_PROCID": "2"}, "number 2, but there are 2"),
        (TWO, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "two"}, "NNODES must be a number"),
    ],
)
def test_what_a_service_has_set_wrongly_is_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        find_place(environment)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("resourceconfig.json", json.dumps({"hosts": hosts, "current_host": current}))
            for hosts, current in (("a", "a"), (["a"], "b"), (["a"], None), (None, None))
        ),
        ("hyperparameters.json", "{"),
        ("hyperparameters.json", "[]"),
    ],
)
def test_a_damaged_file_of_sagemaker_is_named(tmp_path: Path, name: str, text: str) -> None:
    (write_job(tmp_path) / "input/config" / name).write_text(text)
    with pytest.raises(SettingError, match=name):
        find_place_of(tmp_path)
