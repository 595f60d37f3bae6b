"""`bench watch`: does somebody's own training wait, for what, and what would change that."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from bench.commands.options import option, price_option
from bench.machine.hardware import describe_machine
from bench.report import waiting
from bench.report.waiting import Cure, Stream
from bench.report.words import Table, machine_line, say
from bench.watch.run import Watched, command_line, watch
from precache.cli import commandline
from precache.cli.commandline import STDOUT, check_output, write_json
from precache.engines import available_cpus
from precache.errors import SettingError

_VERSIONS = ("python", "torch", "pillow")


@click.command(
    name="watch",
    cls=commandline.Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Does your own training, unchanged, wait for data?",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m.")
@click.option("--for", "length", default="60s", show_default=True, help="Steady time to watch: 60s, 2min.")
@click.option("--batches", type=click.IntRange(min=1), help="The same in batches.")
@click.option("--whole", is_flag=True, help="Let the script go on to its end.")
@click.option("--loader", metavar="MODULE:FUNCTION", help="Time what this function, or class, iterates, too.")
@price_option
@option("json_path")
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    module: str | None,
    length: str,
    batches: int | None,
    whole: bool,
    loader: str | None,
    gpu_price: float | None,
    json_path: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run your training script as it is, and say how much it waits for its batches, and for what.

    \b
    bench watch train.py --epochs 3 photos        as python train.py --epochs 3 photos
    bench watch -m mytrainer --config c.yaml      as python -m
    bench watch torchrun --nproc-per-node 2 train.py

    Times every batch of every DataLoader of torch and of loaders.build. After a minute of steady batches it
    ends the script, with exit code 0. A script that ends before that keeps its exit code.
    """
    check_output(json_path)
    seconds = _seconds(length)
    if loader is not None and (":" not in loader.strip(":") or loader.startswith("__main__:")):
        raise SettingError(
            "--loader takes MODULE:FUNCTION, of a module that the script imports, as mydata:batches; "
            f"got {loader!r}"
        )
    line = command_line(words, module)
    output = sys.stderr.fileno() if json_path == STDOUT else None
    found = watch(line, seconds=seconds, batches=batches, whole=whole, loader=loader, output=output)
    streams = waiting.find_streams(found.processes)
    cures = []
    if streams:
        cures = waiting.find_cures(streams[0], cpus=available_cpus(), busy=found.busy)
    if json_path is not None:
        write_json(json_path, _content(found, streams, cures))
    if json_path != STDOUT:
        show(found, streams, cures, gpu_price)
    raise click.exceptions.Exit(found.code)


def show(found: Watched, streams: list[Stream], cures: list[Cure], gpu_price: float | None) -> None:
    """Print the answer, what would help, and what it comes from."""
    click.echo()
    if not streams:
        _say_why_nothing(found)
        return
    for sentence in waiting.sentences(streams[0], streams, gpu_price):
        say(sentence)
    if cures:
        click.echo()
        lines = [
            [
                cure.name,
                f"{cure.images_per_s:,.0f}",
                f"{cure.images_per_s.median / streams[0].images_per_s:.2f}",
                cure.cost,
            ]
            for cure in cures
        ]
        Table(("change", "images/s", "times", "takes"), lines, words=("takes",)).show()
        for cure in cures:
            say(f"{cure.name}: {_relative(cure.write)}")
    click.echo()
    rows = [[_relative(cell) for cell in waiting.row(stream)] for stream in streams]
    Table(waiting.TITLES, rows, words=("data", "made at")).show()
    of = "the device's idle time" if streams[0].on_device else "from asking for a batch to having it"
    say(
        f"waits: share of the time between batches, {of}; ranges over sections of what was watched, "
        f"without the first batches; {machine_line(describe_machine(torch.device('cpu')), _VERSIONS)}."
    )


def _say_why_nothing(found: Watched) -> None:
    events = [event for events in found.processes for event in events]
    if faults := [event[1] for event in events if event[0] == "fault"]:
        say(f"The batches could not be timed: {faults[0]}")
    elif any(event[0] == "batch" for event in events):
        say("Too few batches to say something: let the script train for longer.")
    else:
        say(
            "No batch was asked for of a DataLoader of torch or of loaders.build. If the training has "
            "another iterator, name it: --loader MODULE:FUNCTION."
        )


def _content(found: Watched, streams: list[Stream], cures: list[Cure]) -> dict[str, Any]:
    return {
        "version": 1,
        "exit_code": found.code,
        "ended": found.ended,
        "cpus": available_cpus(),
        "busy": found.busy,
        "streams": [waiting.to_json(stream) for stream in streams],
        "cures": [asdict(cure) for cure in cures],
        "machine": describe_machine(torch.device("cpu")),
    }


def _relative(text: str) -> str:
    """Paths below the working folder, as one types them."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")


def _seconds(text: str) -> float:
    units = {"s": 1.0, "min": 60.0, "h": 3600.0}
    value = text.strip()
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if value.endswith(unit)), "")
    try:
        seconds = float(value.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingError(f"--for must be a time as 60s or 2min, got {text!r}")
    return seconds
