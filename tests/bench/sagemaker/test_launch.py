"""Notebook that starts a training on SageMaker, run with stand-ins of S3 and SageMaker."""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from loaders.examples.train import make_parser
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url, locate
from tests.bench.sagemaker.test_train import make_programs, sagemaker_variables
from tests.cloud.storages import serve_http
from tests.command import ROOT

NOTEBOOK = ROOT / "bench" / "sagemaker" / "launch.ipynb"
WHEEL = '"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir dist ../..'


class SageMaker(BaseHTTPRequestHandler):
    """Stand-in of SageMaker's API, which keeps the jobs that boto3 creates."""

    jobs: dict[str, Any]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = request["TrainingJobName"]
        if self.headers["x-amz-target"] == "SageMaker.CreateTrainingJob":
            self.jobs[name] = {
                **request,
                "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:1:job/{len(self.jobs)}",
                "TrainingJobStatus": "Completed",
                "ModelArtifacts": {"S3ModelArtifacts": "s3://m"},
            }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.jobs[name]).encode())


@pytest.fixture
def _sagemaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serve_http(SageMaker, jobs={}) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", endpoint)
        yield


@pytest.mark.usefixtures("_sagemaker")
def test_the_notebook_starts_a_training_with_a_role_and_a_bucket(
    bucket: Url, converted: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3 = pytest.importorskip("boto3")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "SAGEMAKER_ROLE": "arn:aws:iam::123456789012:role/train",
        "SAGEMAKER_BUCKET": bucket.name,
        "SAGEMAKER_DATA": str(converted["shards"]),
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
    }.items():
        monkeypatch.setenv(name, value)
    namespace: dict[str, Any] = {}
    # building a wheel needs the network; tests/test_packaging.py builds it
    replacements = {
        WHEEL: f"cp {NOTEBOOK.parent}/train.sh .; mkdir dist; touch dist/precache-0-py3-none-any.whl",
        "precache push": '"$PYTHON" -m precache push',
    }
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if text.startswith("%%bash\n"):
            for command, replacement in replacements.items():
                text = text.replace(command, replacement)
            ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
        else:
            exec(compile(text, str(NOTEBOOK), "exec"), namespace)
    job = boto3.client("sagemaker").describe_training_job(TrainingJobName=namespace["JOB"])
    assert job["CheckpointConfig"]["LocalPath"] == "/opt/ml/checkpoints"
    (channel,) = job["InputDataConfig"]
    assert channel["ChannelName"] == "train"
    assert "dataset.json" in list_names(channel["DataSource"]["S3DataSource"]["S3Uri"])
    check_code(job["HyperParameters"], bucket.name, tmp_path / "code")


def check_code(hyperparameters: dict[str, str], bucket: str, folder: Path) -> None:
    """Run the program of a job, as the training toolkit does, with stand-ins of pip and torchrun."""
    import boto3

    archive = hyperparameters.pop("sagemaker_submit_directory").removeprefix(f"s3://{bucket}/")
    program, _ = (hyperparameters.pop(f"sagemaker_{name}") for name in ("program", "region"))
    body = boto3.client("s3").get_object(Bucket=bucket, Key=archive)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as opened:
        opened.extractall(folder, filter="data")
    print_words = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"
    environment = make_programs(folder, pip=print_words, torchrun=print_words)
    environment |= sagemaker_variables(folder, "algo-1", ["algo-1"], folder / "data")
    words = [word for name, value in hyperparameters.items() for word in (f"--{name}", value)]
    printed = subprocess.run(
        [folder / program, *words], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[:3] == ["install", "--quiet", "./precache-0-py3-none-any.whl[loaders]"]
    launched = torchrun.parse_args(printed[3:])
    assert (launched.nnodes, launched.node_rank, launched.nproc_per_node) == ("1", 0, "1")
    args = make_parser("train", "").parse_args(launched.training_script_args)
    assert (args.path, args.out, args.resume) == (f"{folder}/data", folder / "checkpoints", True)
    assert (args.batch_size, args.bf16) == (256, True)


def list_names(url: str) -> list[str]:
    """Return the names of the objects below a URL."""
    place = locate(url.rstrip("/"))
    assert isinstance(place, Url)
    return [listed.name for listed in ObjectStore(place).list()]
