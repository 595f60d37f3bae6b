"""The sweep over workers: `bench sweep`, whose finished trials lie in SCRATCH until the step is done.

`python -m bench.evidence.workers DATA SCRATCH RESULT --device cuda --trainer resnet50 --workers 1,4,16`
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click

from bench.measure.fresh import environment
from bench.report.grid import recommend, sentence
from bench.report.sweep_file import SweepFile
from precache.console import commandline

_PATH = click.Path(path_type=Path)


@click.command(cls=commandline.Command, context_settings={"ignore_unknown_options": True})
@click.argument("data", type=_PATH)
@click.argument("scratch", type=_PATH)
@click.argument("result", type=_PATH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def workers(data: Path, scratch: Path, result: Path, options: tuple[str, ...]) -> None:
    """Sweep over photographs and over decoded shards of DATA; OPTIONS are those of 'bench sweep'."""
    trials = scratch / "trials.jsonl"
    folders = [str(data / "photos"), str(data / "shards")]
    command = [
        sys.executable,
        "-m",
        "bench",
        "sweep",
        *folders,
        *options,
        "--repeats=1",
        "--out",
        str(trials),
    ]
    ended = subprocess.run(command, env=environment(), check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    header = json.loads(trials.read_text(encoding="utf-8").splitlines()[0])
    file = SweepFile(trials, header)
    measured = file.measured()
    content = {
        "machine": header["machine"],
        "settings": header["settings"],
        "measured": [asdict(found) for found in measured],
        "left out": [
            {"point": asdict(point), "why": why} for point, why in {**file.pruned, **file.failed}.items()
        ],
        "advice": [sentence(found) for found in recommend(measured)],
    }
    result.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    workers()
