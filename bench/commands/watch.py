"""`bench watch`: does somebody's own training wait, for what, and what would change that."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from bench.commands.options import option, price_option
from bench.machine.hardware import describe_machine
from bench.measure.watched import measure_replaced
from bench.report import waiting
from bench.report.waiting import Change, Stream
from bench.report.words import Table, counted, machine_line, number, say
from bench.watch import advice
from bench.watch.advice import Advice, Replacements
from bench.watch.run import Observed, command_line, watch
from precache.cli import commandline
from precache.cli.commandline import STDOUT, check_output, write_json
from precache.errors import PrecacheError, SettingError
from precache.reporting import warn

_SHARDS = "data/shards"
_VERSIONS = ("python", "torch", "pillow")


class _Command(commandline.Command):
    """Takes no option that stands behind `-m MODULE`: as with `python -m`, all that follows is the module's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the command line at the module, and leave the options before it to click."""
        with_value = {
            name
            for each in self.params
            if isinstance(each, click.Option) and not each.is_flag
            for name in each.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            is_module = args[place].startswith("-m")
            place += 2 if args[place] in with_value else 1
            if is_module:
                args = [*args[:place], "--", *args[place:]]
                break
        return super().parse_args(ctx, args)


@click.command(
    name="watch",
    cls=_Command,
    context_settings={"allow_interspersed_args": False},
    short_help="Does your own training, unchanged, wait for data?",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m.")
@click.option("--for", "length", default="60s", show_default=True, help="Steady time to watch: 60s, 2min.")
@click.option("--batches", type=click.IntRange(min=waiting.FEWEST), help="The same in batches.")
@click.option("--whole", is_flag=True, help="Let the script go on to its end.")
@price_option
@option("json_path")
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    module: str | None,
    length: str,
    batches: int | None,
    whole: bool,
    gpu_price: float | None,
    json_path: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run your training script as it is, and say how much it waits for its batches, and for what.

    \b
    bench watch train.py --epochs 3 photos        as python train.py --epochs 3 photos
    bench watch -m mytrainer --config c.yaml      as python -m
    bench watch torchrun --nproc-per-node 2 train.py

    Times every batch of torch's DataLoaders, those that libraries derive from them, and loaders.build. After
    a minute of steady batches it ends the script, with exit code 0. A script that ends before that keeps its
    exit code. Ctrl-C ends it, too, and says what was seen so far.
    """
    check_output(json_path)
    found = watch(
        command_line(words, module),
        seconds=_seconds(length),
        batches=batches,
        whole=whole,
        output=sys.stderr.fileno() if json_path == STDOUT else None,
    )
    streams = waiting.find_streams(found.processes)
    advised = Replacements()
    changes: list[Change] = []
    if streams and not found.failed:
        advised, changes = _find_changes(found, streams)
    if json_path != STDOUT:
        show(found, streams, advised, changes, gpu_price)
    if json_path is not None:
        write_json(json_path, _content(found, streams, changes))
    raise click.exceptions.Exit(130 if found.interrupted else found.code)


def _find_changes(found: Observed, streams: list[Stream]) -> tuple[Replacements, list[Change]]:
    """What may stand in for the data set of the first stream, and all changes that are worth naming."""
    first = streams[0]
    advised = Replacements()
    if not waiting.waits(first) or first.batches < waiting.FEWEST or first.ahead:
        return advised, []
    replaced: list[waiting.Replaced] = []
    if first.source and not found.interrupted:
        advised = advice.find_replacements(first.source, _SHARDS, remade=bool(first.info.get("remade")))
    if advised.advices:
        click.echo("measuring what would help, on a sample of the pictures ...", err=True)
        try:
            replaced = measure_replaced(advised.advices, first.info.get("batch_size"), first.parts)
        except PrecacheError as error:
            warn(f"what another data set would bring was not measured: {error}")
    return advised, waiting.find_changes(first, streams, found.machine, replaced)


def show(
    found: Observed,
    streams: list[Stream],
    advised: Replacements,
    changes: list[Change],
    gpu_price: float | None,
) -> None:
    """Print the answer, what would help, and what it comes from."""
    click.echo()
    if not streams or found.failed:
        _say_why_nothing(found)
    else:
        first = streams[0]
        for sentence in waiting.sentences(first, streams, found.machine, gpu_price):
            say(sentence)
        if changes:
            _show_changes(first, advised.advices, changes)
        elif why := waiting.why_no_change(first, found.machine):
            say(why)
        for sentence in advised.left_out:
            say(sentence)
    if not streams:
        return
    click.echo()
    rows = [[_relative(cell) for cell in waiting.row(stream)] for stream in streams]
    Table(waiting.TITLES, rows, words=("data", "made at")).show()
    of = "the device's idle time" if streams[0].on_device else "from asking for a batch to having it"
    say(
        f"waits: share of the time between batches, {of}; ranges over sections of what was watched, "
        f"without the first batches; {machine_line(describe_machine(torch.device('cpu')), _VERSIONS)}."
    )


def _show_changes(first: Stream, advised: Sequence[Advice], changes: Sequence[Change]) -> None:
    click.echo()
    lines = []
    for change in changes:
        rate = change.images_per_s
        times = rate.median / first.images_per_s
        spread = f"{number(rate.low)} to {number(rate.high)}"
        lines.append([change.name, number(rate.median), spread, f"{times:.2f}", change.cost])
    Table(("change", "images/s", "range", "times", "takes"), lines, words=("takes",)).show()
    by_name = {each.name: each for each in advised}
    for change in changes:
        click.echo()
        say(f"{change.name}:")
        if change.name == "pillow-simd":
            say(advice.put_simd())
            continue
        if change.name in by_name:
            told = by_name[change.name]
        else:
            told = advice.set_arguments(first.source, change.arguments)
        for line in told.lines(os.getcwd()):
            click.echo(line)


def _say_why_nothing(found: Observed) -> None:
    """The sentence for a script of which nothing can be concluded."""
    seen = len(found.all("batch"))
    if found.failed:
        when = f"after {counted(seen, 'batch', 'batches')}" if seen else "before it asked for a batch"
        rest = ": the figures below are of the time until then, and nothing follows from them" if seen else ""
        say(f"The script ended with exit code {found.code} {when}{rest}.")
    elif seen:
        few = f"{counted(seen, 'batch', 'batches')} and not {waiting.FEWEST} beyond the first ones"
        say(f"Too few batches to say whether it waits: {few}. Let the script train for longer.")
    elif faults := found.all("fault"):
        say(f"The batches could not be timed: {faults[0]['text']}")
    else:
        until = "until it was interrupted" if found.interrupted else "by the script"
        say(
            f"No batch was asked for {until} of a DataLoader of torch, nor of loaders.build: other loaders "
            f"cannot be timed."
        )


def _content(found: Observed, streams: list[Stream], changes: list[Change]) -> dict[str, Any]:
    return {
        "version": 1,
        "exit_code": found.code,
        "ended": found.ended,
        "interrupted": found.interrupted,
        **asdict(found.machine),
        "streams": [waiting.to_json(stream) for stream in streams],
        "changes": [asdict(change) for change in changes],
        "faults": [event["text"] for event in found.all("fault")],
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
