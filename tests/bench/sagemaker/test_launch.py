"""The notebook that starts a training on SageMaker, against stand-ins for S3 and SageMaker."""

import json
import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from bench.sagemaker.train import training_options
from loaders.examples import common
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url, locate
from tests.bench.sagemaker.test_train import write_job
from tests.cloud.storages import serve_http
from tests.command import ROOT

NOTEBOOK = ROOT / "bench" / "sagemaker" / "launch.ipynb"
WHEEL = '"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir dist ../..'


class SageMaker(BaseHTTPRequestHandler):
    """Keeps the jobs that it is asked to create; boto3 looks at what they are asked with."""

    jobs: dict[str, Any]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["x-amz-target"] == "SageMaker.CreateTrainingJob":
            arn, model = f"arn:aws:sagemaker:us-east-1:1:job/{len(self.jobs)}", {"S3ModelArtifacts": "s3://m"}
            done = {"TrainingJobArn": arn, "TrainingJobStatus": "Completed", "ModelArtifacts": model}
            self.jobs[asked["TrainingJobName"]] = {**asked, **done}
        said = self.jobs[asked["TrainingJobName"]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())


@pytest.fixture
def _sagemaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serve_http(SageMaker, jobs={}) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", endpoint)
        yield


@pytest.mark.usefixtures("_sagemaker")
def test_the_launcher_needs_a_role_and_a_bucket_and_starts_a_training(
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
    names: dict[str, Any] = {}
    # what building a wheel needs comes from the network; tests/test_packaging.py builds it
    quick = {
        WHEEL: "mkdir dist; touch dist/precache-0-py3-none-any.whl",
        "precache push": '"$PYTHON" -m precache push',
    }
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if text.startswith("%%bash\n"):
            for asked, instead in quick.items():
                text = text.replace(asked, instead)
            ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
        else:
            exec(compile(text, str(NOTEBOOK), "exec"), names)
    job = boto3.client("sagemaker").describe_training_job(TrainingJobName=names["JOB"])
    assert job["CheckpointConfig"]["LocalPath"] == "/opt/ml/checkpoints"
    sources = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in job["InputDataConfig"]
    }
    assert "dataset.json" in names_at(sources["train"])
    assert names_at(sources["code"]) == ["precache-0-py3-none-any.whl"]
    ml = write_job(tmp_path / "ml", channels=sources, hyperparameters=job["HyperParameters"])
    args = common.parser("train", "").parse_args(training_options(ml))
    assert (args.path, args.out) == (f"{ml}/input/data/train", ml / "checkpoints")


def names_at(url: str) -> list[str]:
    place = locate(url.rstrip("/"))
    assert isinstance(place, Url)
    return [found.name for found in ObjectStore(place).list()]
