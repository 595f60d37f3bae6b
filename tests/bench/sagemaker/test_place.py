import json
from pathlib import Path

import pytest

from bench.sagemaker.place import Place, find_channels, find_place, first_host, from_files, spelled
from precache.errors import SettingError

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_NNODES": "2"}


def test_one_host_alone_needs_no_service() -> None:
    assert find_place({}) == Place() == find_place({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"})
    assert find_place({**SLURM, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}) == find_place({"NNODES": "1"})


def test_all_hosts_of_sagemaker_agree_who_leads_in_whatever_order_they_are_told() -> None:
    names = ["algo-2", "algo-10", "algo-1"]
    found = [
        find_place({"SM_HOSTS": json.dumps(told), "SM_CURRENT_HOST": current})
        for told, current in ((names, "algo-1"), (names[::-1], "algo-2"), (names, "algo-10"))
    ]
    assert sorted(place.number for place in found) == [0, 1, 2]
    assert {(place.master, place.hosts, place.port) for place in found} == {("algo-1", 3, 29500)}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("a1,b[1-2]", "a1"),
        ("rack[1-2]-n[05,7]-ib", "rack1-n05-ib"),
    ],
)
def test_the_first_node_of_a_list_leads_a_job_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
    assert find_place({**SLURM, "SLURM_JOB_NODELIST": nodes}).master == first


def test_jobs_of_slurm_that_share_a_node_have_ports_of_their_own() -> None:
    ports = {find_place({**SLURM, "SLURM_JOB_ID": job}).port for job in ("100", "101")}
    assert len(ports) == 2
    assert find_place({**SLURM, "MASTER_PORT": "1234", "MASTER_ADDR": "head"}) == Place(
        hosts=2, number=1, master="head", port=1234
    )


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**SLURM, "SLURM_NTASKS": "16"}, "16 tasks on 2 nodes; start one a node"),
        ({**SLURM, "SLURM_PROCID": "2"}, "number 2, but there are 2"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS must be a JSON list"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "'algo-2' in it"),
        ({"SM_HOSTS": '["algo-1"]'}, "SM_CURRENT_HOST is not set"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "JOB_COMPLETION_INDEX is not set"),
        ({"NNODES": "two"}, "NNODES must be a number, got 'two'"),
    ],
)
def test_what_a_service_has_set_wrongly_is_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("[", r"\[")):
        find_place(environment)


def test_the_channel_to_train_on_is_train_or_the_only_one() -> None:
    assert find_channels({}) == (None, None)
    assert find_channels({"SM_CHANNEL_SHARDS": "a", "SM_CHANNEL_CODE": "c"}) == ("a", None)
    several = {"SM_CHANNEL_SHARDS": "a", "SM_CHANNEL_TRAIN": "b", "SM_CHANNEL_VALIDATION": "v"}
    assert find_channels(several) == ("b", "v")
    with pytest.raises(SettingError, match="which of the channels one, two"):
        find_channels({"SM_CHANNEL_ONE": "a", "SM_CHANNEL_TWO": "b"})


def test_hyperparameters_are_options_of_the_training() -> None:
    given = ["--batch_size", "64", "--bf16", "True", "--compile=", "--resume", "false", "--out", "my_runs"]
    assert spelled(given) == ["--batch-size", "64", "--bf16", "--compile=", "--out", "my_runs"]


def test_an_image_without_the_toolkit_finds_everything_in_the_files_of_sagemaker(tmp_path: Path) -> None:
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    written = {
        "resourceconfig": {
            "current_host": "algo-2",
            "hosts": ["algo-1", "algo-2"],
            "network_interface_name": "eth0",
        },
        "hyperparameters": {"batch-size": "64", "bf16": "true", "sagemaker_region": "us-east-1"},
        "inputdataconfig": {"train": {"TrainingInputMode": "File"}, "code": {}},
    }
    for name, content in written.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    environment, options = from_files(tmp_path)
    assert spelled(options) == ["--batch-size", "64", "--bf16"]
    place = find_place(environment)
    assert place == Place(hosts=2, number=1, master="algo-1", port=29500, interface="eth0")
    assert find_channels(environment) == (str(tmp_path / "input/data/train"), None)
    assert environment["SM_MODEL_DIR"] == str(tmp_path / "model")
    (config / "hyperparameters.json").write_text("{")
    with pytest.raises(SettingError, match="is no JSON"):
        from_files(tmp_path)
