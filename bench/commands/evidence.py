"""`bench evidence`: what has to be measured on a machine with a GPU, as a list of commands.

OUT/gpu-h200-16cpu-resnet50.json    what a step found, and what it printed: there whole, or not at all
OUT/gpu-evidence.html               the page: what each step says in a line, its tables, a link to its file
DATA/logs/resnet50.log              what went wrong in the last run of a step
DATA/steps/resnet50/                what an unfinished step left, to go on from
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import torch

import bench
from bench.machine.hardware import describe_machine
from bench.measure.fresh import run_fresh
from bench.report.words import Table, machine_line
from precache import page
from precache.cli import commandline
from precache.cli.commandline import note
from precache.engines import available_cpus
from precache.errors import SettingError, printable
from precache.imports import child_environment
from precache.storage import atomic_write

Content: TypeAlias = dict[str, Any]
LONGEST_S = 480
"""No step may take longer: machines are often lent for ten minutes at a time."""
FOUND_WRONG = 1
"""Exit code of a step that ran to its end, where a test failed. Others than this and 0 are no result."""
_ROOT = Path(bench.__file__).resolve().parent.parent
_RESULTS = Path("bench/results")
_PAGE = "gpu-evidence.html"
_JSON, _LINES = "found.json", "found.jsonl"
_WORDS = (  # of the programs below; in full, and in miniature on the CPU
    ("loaders", "bench loaders --json found.json {timing}", "bench loaders --json found.json {timing}"),
    (
        "timing",
        "--size=224 --batch-size=256 --batches=40 --warmup=20 --repeats=2 --device=cuda",
        "--size=32 --batch-size=8 --batches=3 --warmup=1 --repeats=1 --device=cpu",
    ),
    ("resnet50", "resnet50", "emulated:2000"),
    ("vit", "vit_s_16", "emulated:4000"),
    ("compile", "--compile", ""),
    ("tests", "{root}/tests", "{root}/tests/loaders/test_transfer.py"),
    ("hardware", "--seconds=0.5 --repeats=3", "--seconds=0.01 --repeats=1"),
    ("workers", "1,2,4,8,16", "1"),
    ("images", "5120", "64"),  # 20 batches
    ("side", "448", "64"),  # twice what is served
)
_PICTURES = {
    "photos": "precache sample {data}/photos --images {images} --classes 64",
    "shards": "precache convert {data}/photos {data}/shards --format shards --size {side}",
    "webdataset": "precache convert {data}/photos {data}/webdataset --format webdataset --size {side}",
    # cache="device" keeps pictures of one size
    "squares": "precache convert {data}/photos {data}/squares --format shards --fit crop --size {side}",
}
"""What makes each folder that the steps read, in this order."""
# fmt: off
_STEPS = (
    ("resnet50", 240, "Does ResNet-50 wait for decoded shards?",
     "{loaders} {data}/shards --backend shards,synthetic --trainer {resnet50}"),
    ("tests", 450, "Do the tests that need a GPU pass?",
     "pytest {tests} -m gpu -c {root}/pyproject.toml -q -p no:cacheprovider"),
    ("resnet50-device", 180, "Does ResNet-50 wait for pictures that are kept on the device?",
     "{loaders} {data}/squares --backend shards --trainer {resnet50} --cache device"),
    ("photos", 300, "Does ResNet-50 wait for photographs that are decoded as it goes?",
     "{loaders} {data}/photos --backend dali,nvjpeg,pytorch --trainer {resnet50}"),
    ("stored", 300, "Does ResNet-50 wait for JPEGs as `precache convert` stores them?",
     "{loaders} {data}/webdataset --backend dali,nvjpeg,webdataset --trainer {resnet50}"),
    ("compiled", 360, "Does the compiled ResNet-50 wait for decoded shards?",
     "{loaders} {data}/shards --backend shards,synthetic --trainer {resnet50} {compile}"),
    ("compiled-device", 240, "Does the compiled ResNet-50 wait for pictures that are kept on the device?",
     "{loaders} {data}/squares --backend shards --trainer {resnet50} {compile} --cache device"),
    ("compiled-photos", 300, "Does the compiled ResNet-50 wait for photographs?",
     "{loaders} {data}/photos --backend dali,nvjpeg --trainer {resnet50} {compile}"),
    ("vit", 240, "Does ViT-S/16 wait for decoded shards?",
     "{loaders} {data}/shards --backend shards,synthetic --trainer {vit}"),
    ("vit-device", 180, "Does ViT-S/16 wait for pictures that are kept on the device?",
     "{loaders} {data}/squares --backend shards --trainer {vit} --cache device"),
    ("vit-photos", 300, "Does ViT-S/16 wait for photographs that are decoded as it goes?",
     "{loaders} {data}/photos --backend dali,nvjpeg,pytorch --trainer {vit}"),
    ("hardware", 150, "What do memory, disk, bus and GPU give?",
     "bench hardware --data {data}/photos --scratch . {hardware} --json found.json"),
    ("workers", 300, "How many threads or processes must decode?",
     "bench sweep {data}/photos {data}/shards --trainer {resnet50} --workers {workers} {timing} "
     " --repeats=1 --out found.jsonl"),
    ("resnet50-ram", 180, "Does ResNet-50 wait for pictures that are kept in main memory?",
     "{loaders} {data}/shards --backend shards --trainer {resnet50} --cache ram"),
)
# fmt: on
"""The most important ones first: name, seconds at most, the question, the program."""
# Runs a step, as the leader of its process group. Its stdin is a pipe that this command holds open and never
# writes to: when the command is gone, however it went, the pipe ends, and so does the group. A step that
# nobody waits for would take the GPU from the next one.
_GUARD = """
import os, signal, subprocess, sys, threading
def watch():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = subprocess.call([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL)
sys.exit(code if code >= 0 else 128 - code)
"""


class Step(NamedTuple):
    """One thing to measure.

    Attributes:
        name: of its result, its log and its folder.
        limit_s: after so many seconds it is killed: three times what is planned for an H200 with 16 cores.
        question: that it answers, in plain words.
        program: arguments for Python, run in the step's folder, where it writes what it finds.
    """

    name: str
    limit_s: int
    question: str
    program: tuple[str, ...]


def make_steps(data: Path, smoke: bool) -> tuple[Step, ...]:
    """The steps, the most important ones first; `smoke`: the same in miniature on the CPU."""
    return tuple(
        Step(name, limit_s, question, _words(program, data, smoke))
        for name, limit_s, question, program in _STEPS
    )


def make_pictures(data: Path, smoke: bool) -> dict[Path, Step]:
    """What makes each folder that the steps read, in their order."""
    return {
        data / name: Step(f"make-{name}", 300, "", _words(program, data, smoke))
        for name, program in _PICTURES.items()
    }


def _words(program: str, data: Path, smoke: bool) -> tuple[str, ...]:
    for name, full, small in _WORDS:
        program = program.replace(f"{{{name}}}", small if smoke else full)
    words = ["-m", *program.split()]  # before the folders, whose names may have spaces
    return tuple(word.replace("{data}", str(data)).replace("{root}", str(_ROOT)) for word in words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """Where results, logs and unfinished steps lie, and the machine that they are of.

    Attributes:
        prefix: of the names of results: each machine has its own.
        machine: as `bench.machine.hardware.describe_machine` gives it.
        until_s: on the monotonic clock: no step goes on after that.
    """

    data: Path
    results: Path
    prefix: str
    machine: dict[str, str]
    until_s: float

    def result(self, step: Step) -> Path:
        """The file of what `step` found."""
        return self.results / f"{self.prefix}-{step.name}.json"

    def finished(self, step: Step) -> tuple[Content | None, str]:
        """What an earlier run found, where it holds for this machine; and that, or why not, in words."""
        path = self.result(step)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = dict(content["machine"])
        except FileNotFoundError:
            return None, "not measured yet"
        except (OSError, ValueError, TypeError, KeyError) as error:
            return None, f"{path}: cannot be used ({error!r})"
        for name, here in self.machine.items():
            if name != "date" and found.get(name) != here:
                return None, f"measured with {name} {found.get(name, 'unknown')}, here {here}"
        return content, f"measured on {found.get('date', 'an unknown day')}, kept"

    def measure(self, step: Step) -> tuple[Content | None, str]:
        """Run `step` and keep what it finds; None if it did not end well and in time, and why."""
        code, problem = self.run(step)
        folder = self.data / "steps" / step.name
        if code not in (0, FOUND_WRONG):
            return None, problem
        try:
            content: Content = {"printed": (folder / "printed").read_text("utf-8", errors="replace")}
            if _LINES in step.program:
                content["lines"] = [json.loads(line) for line in (folder / _LINES).read_text().splitlines()]
            elif _JSON in step.program:
                content |= json.loads((folder / _JSON).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return None, problem if code else f"failed: it left no result ({error})"
        if code and not content["printed"]:  # Python ended with 1, before the program began
            return None, problem
        content |= {"machine": self.machine, "exit_code": code}
        with atomic_write(self.result(step)) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
        shutil.rmtree(folder, ignore_errors=True)
        return content, "measured"

    def run(self, step: Step) -> tuple[int | None, str]:
        """Run the program of `step`; its exit code, None if it did not come to its end, and why that is.

        Its children end with it, and all of them with this process.
        """
        left_s, planned_s = self.until_s - time.monotonic(), step.limit_s / 3
        if left_s < planned_s:
            return None, f"no time left for it ({planned_s:.0f} s are planned); run the same command again"
        folder, log = self.data / "steps" / step.name, self.data / "logs" / f"{step.name}.log"
        for each in (folder, log.parent):
            each.mkdir(parents=True, exist_ok=True)
        (folder / _JSON).unlink(missing_ok=True)  # of a run that failed; lines are gone on with
        limit_s = min(step.limit_s, LONGEST_S, left_s)
        with open(folder / "printed", "wb") as printed, open(log, "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *step.program],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=errors,
                cwd=folder,
                env=child_environment(),
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None, f"killed after {limit_s:.0f} s, its limit; see {log}"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return code, f"failed: {printable(lines[-1]) if lines else f'exit code {code}'}; see {log}"


def publish(
    run: Campaign, steps: Sequence[Step], found: Mapping[str, Content | None], notes: Mapping[str, str]
) -> None:
    """Write the page of what there is: a line for each step, and below it what each printed."""
    said = [f"Measured on {machine_line(run.machine)}."]
    if run.prefix == "smoke":
        said.append("A trial run on a CPU with emulated trainers: no figure here says anything about a GPU.")
    rows, parts = [], []
    for step in steps:
        content = found[step.name]
        if content is None:
            rows.append((step.name, step.question, f"Not measured: {notes[step.name]}."))
            continue
        printed = re.sub(r"^wrote .*\n", "", content["printed"]).strip()
        paragraph = printed.splitlines()[-1:] if "pytest" in step.program else printed.split("\n\n")[:1]
        wrong = "Something is wrong: " if content["exit_code"] == FOUND_WRONG else ""
        rows.append((step.name, step.question, wrong + " ".join("".join(paragraph).split())))
        file = escape(run.result(step).name)
        parts.append(f'<h2>{escape(step.question)}</h2><p><a href="{file}">{file}</a></p>')
        parts.append(f"<pre>{escape(printed)}</pre>")
    table = Table(("step", "question", "answer"), rows, words=("question", "answer"))
    title = "Does the GPU wait for data?"
    content_html = "".join((f"<h1>{title}</h1>", page.paragraphs(said), table.html(), *parts))
    page.write(run.results / _PAGE, page.document(title, content_html, style="pre { overflow-x: auto; }"))


_PATH = click.Path(path_type=Path)


@click.command(name="evidence", cls=commandline.Command)
@click.option(
    "--out", type=_PATH, help=f"Folder of the results.  [default: {_RESULTS}, where that is a folder]"
)
@click.option(
    "--data", type=_PATH, default=Path("data/evidence"), show_default=True, help="For pictures and logs."
)
@click.option("--minutes", default=25.0, show_default=True, help="What is not done by then is left.")
@click.option("--smoke", is_flag=True, help="The same steps in miniature on the CPU, to try the command out.")
def command(out: Path | None, data: Path, minutes: float, smoke: bool) -> None:
    """Measure whether this machine's GPU waits for data, with every loader; needs no network.

    Each step is a process of its own with a time limit. One that has its result in --out is not measured
    again, unless that file is removed: killed, the same command goes on. It ends with exit code 1 where
    something is wrong that was checked, and 2 where a step has no result.
    """
    until_s = time.monotonic() + minutes * 60
    if not smoke and not torch.cuda.is_available():
        raise SettingError(
            "torch finds no GPU here, and this measures one; 'bench evidence --smoke' runs the same steps in "
            "miniature on the CPU"
        )
    if sys.platform == "win32":
        raise SettingError("bench evidence ends a step with its children, which needs Linux or macOS")
    if not minutes > 0:
        raise SettingError(f"minutes must be positive, got {minutes:g}")
    if smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the steps, too: their results are of this machine
        data = data.with_name(f"{data.name}-smoke")
    data = data.absolute()  # each step runs in a folder of its own
    out = (out or (_RESULTS if _RESULTS.is_dir() and not smoke else data / "results")).absolute()
    for folder in (out, data):  # now, not after minutes of measuring
        folder.mkdir(parents=True, exist_ok=True)
    # in a process of its own: this one would hold memory of the GPU
    machine = run_fresh(describe_machine, torch.device("cpu" if smoke else "cuda"))
    name = re.sub("[^a-z0-9]+", "-", machine["accelerator"].lower().removeprefix("nvidia")).strip("-")
    prefix = "smoke" if smoke else f"gpu-{name}-{available_cpus()}cpu"
    run = Campaign(data=data, results=out, prefix=prefix, machine=machine, until_s=until_s)
    steps = make_steps(data, smoke)
    found: dict[str, Content | None] = {}
    notes: dict[str, str] = {}
    for step in steps:
        found[step.name], notes[step.name] = run.finished(step)
    publish(run, steps, found, notes)  # now: it tells whether files can be written there
    missing = [step for step in steps if found[step.name] is None]
    for folder, made in make_pictures(data, smoke).items():
        if missing and not folder.exists():
            code, problem = run.run(made)
            if code != 0:
                note(f"{made.name}: {problem}")
    for step in missing:
        note(f"{step.name}: begun; at most {step.limit_s} s")
        found[step.name], notes[step.name] = run.measure(step)
        note(f"{step.name}: {notes[step.name]}")
        publish(run, steps, found, notes)
    wrong = [name for name, content in found.items() if content and content["exit_code"] == FOUND_WRONG]
    if wrong:
        click.echo(f"Something is wrong: see {', '.join(wrong)}.")
    measured = len(steps) - list(found.values()).count(None)
    click.echo(f"{measured} of {len(steps)} steps are measured; see {run.results / _PAGE}")
    click.get_current_context().exit(2 if measured < len(steps) else int(bool(wrong)))
