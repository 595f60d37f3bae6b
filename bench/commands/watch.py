"""`bench watch`: does somebody's own training wait, for what, and what would change that."""

import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.commands.options import PATH, option, price_option
from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.measure.watched import measure_replaced, recipe_for
from bench.report import waiting
from bench.report.table import Table
from bench.report.waiting import Cure, Stream
from bench.report.words import machine_line, say
from bench.watch.run import Observed, command_line, watch
from precache.cli import commandline
from precache.cli.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.conversion.convert import convert
from precache.conversion.destination import resolve
from precache.conversion.journal import check_empty
from precache.engines import available_cpus
from precache.errors import PrecacheError, SettingError, check_choice
from precache.reporting import warn

CURES = ("workers", "persistent_workers", "shards", "ram")
"""What can be done for the user, in memory: the script stays as it is."""
_DST = Path("data/shards")
_CONVERTED = ("shards", "ram")
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
@click.option("--cure", metavar="NAME", help=f"Do it and run again: {', '.join(CURES)}.")
@click.option("--dst", type=PATH, default=_DST, show_default=True, help="Where --cure shards converts to.")
@click.option("--yes", is_flag=True, help="Convert without asking.")
@price_option
@option("json_path")
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    module: str | None,
    length: str,
    batches: int | None,
    whole: bool,
    loader: str | None,
    cure: str | None,
    dst: Path,
    yes: bool,
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
    if cure is not None:
        check_choice("cure", cure, CURES)
    if cure in _CONVERTED:
        dst = resolve(dst)
        check_empty(dst)
    run = partial(
        watch,
        command_line(words, module),
        seconds=seconds,
        batches=batches,
        whole=whole,
        loader=loader,
        output=sys.stderr.fileno() if json_path == STDOUT else None,
    )
    found = run()
    streams = waiting.find_streams(found.processes)
    cures = _find_cures(found, streams, dst)
    after = None
    if json_path != STDOUT:
        show(found, streams, cures, gpu_price)
    if cure is not None and streams and waiting.waits(streams[0]):
        chosen = _chosen(cure, streams[0], cures)
        done = _prepare(cure, streams[0], chosen, dst, yes)
        again = run(cure=done)
        found = replace(found, code=again.code)
        after = waiting.find_streams(again.processes)
        if not after or not any(event[0] == "cured" for events in again.processes for event in events):
            raise SettingError(f"--cure {cure}: {_why_not_cured(again)}")
        if json_path != STDOUT:
            say(waiting.compared(chosen, streams[0], after[0]))
    if json_path is not None:
        write_json(json_path, _content(found, streams, cures, after))
    raise click.exceptions.Exit(found.code)


def _find_cures(found: Observed, streams: list[Stream], dst: Path) -> list[Cure]:
    """Those worth naming; what stands in for an ImageFolder is measured on a sample of it."""
    if not streams or not waiting.waits(streams[0]):
        return []
    first, replaced = streams[0], []
    if first.info.get("replaceable") and first.parts and first.info.get("side"):
        click.echo("measuring what would help, on a sample of the pictures ...", err=True)
        try:
            replaced = measure_replaced(first.info, first.parts, dst)
        except PrecacheError as error:
            warn(f"what converting would bring was not measured: {error}")
    return waiting.find_cures(first, cpus=available_cpus(), busy=found.busy, replaced=replaced)


def _chosen(name: str, stream: Stream, cures: list[Cure]) -> Cure:
    """The cure of that name; SettingError where it cannot be done here."""
    of = "shards" if name in _CONVERTED else name
    if name in _CONVERTED and not stream.info.get("replaceable"):
        raise SettingError(
            f"--cure {name} replaces the pictures of torchvision's ImageFolder, and this script reads "
            f"{stream.info['dataset']}; use loaders.ImageDataset in the script instead"
        )
    found = next((cure for cure in cures if cure.name == of), None)
    if found is None:
        useful = ", ".join(cure.name for cure in cures if cure.name in CURES)
        remedy = f"try {useful}" if useful else "leave it out"
        raise SettingError(f"--cure {name} would bring nothing here; {remedy}")
    return replace(found, name=name)


def _prepare(name: str, stream: Stream, cure: Cure, dst: Path, yes: bool) -> dict[str, Any]:
    """What the hook is to change; converts first where that takes it."""
    told = {"key": stream.info["key"], "keywords": dict(cure.keywords or {})}
    if name not in _CONVERTED:
        return told
    root = stream.info["root"]
    if not yes and not click.confirm(f"Convert {root} into {dst} ({cure.cost})?", default=True):
        raise click.Abort
    with ProgressBar("convert", "image") as bar:
        convert(root, dst, recipe_for(int(stream.info["side"])), on_progress=bar)
    if name == "ram" and not page_cache.warm(dst):
        raise SettingError(f"{dst}: is more than half of the free memory; use --cure shards")
    return {**told, "shards": str(dst.resolve())}


def _why_not_cured(found: Observed) -> str:
    faults = [event[1] for events in found.processes for event in events if event[0] == "fault"]
    return faults[0] if faults else "the second run of the script made no such DataLoader; change it by hand"


def show(found: Observed, streams: list[Stream], cures: list[Cure], gpu_price: float | None) -> None:
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


def _say_why_nothing(found: Observed) -> None:
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


def _content(
    found: Observed, streams: list[Stream], cures: list[Cure], after: list[Stream] | None
) -> dict[str, Any]:
    return {
        "version": 1,
        "exit_code": found.code,
        "ended": found.ended,
        "cpus": available_cpus(),
        "busy": found.busy,
        "streams": [waiting.to_json(stream) for stream in streams],
        "cures": [asdict(cure) for cure in cures],
        "cured": None if after is None else [waiting.to_json(stream) for stream in after],
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
