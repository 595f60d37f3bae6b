"""`bench watch`: does somebody's own training wait, for what, and what would change that."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import click
import torch

from bench.commands.options import price_option
from bench.commands.output import Output, output_options
from bench.machine.hardware import describe_machine
from bench.measure.watched import measure_replaced
from bench.report import waiting
from bench.report.result import Result, format_document, make_document, parse_document
from bench.report.stats import is_disturbed
from bench.report.waiting import Change, MeasuredReplacement, Stream
from bench.report.watch import make_result, paste_to_trial, replacement_to_trial, stream_to_trial
from bench.watch import advice
from bench.watch.advice import Advice
from bench.watch.replacements import Replacements, find_replacements
from bench.watch.run import WatchedRun, command_line, watch
from precache.cli import commandline
from precache.cli.commandline import STDOUT, check_output, note
from precache.errors import PrecacheError, SettingError

_SHARDS = "data/shards"


class _Command(commandline.Command):
    """Leaves what stands behind `-m MODULE` to the module, as `python -m` does."""

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
@output_options
@click.argument("words", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    module: str | None,
    length: str,
    batches: int | None,
    whole: bool,
    gpu_price: float | None,
    output: Output,
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
    seconds = _seconds(length)
    for path in (output.json_path, output.html_path):
        check_output(path)
    alone = output.quiet or output.json_path == STDOUT
    found = watch(
        command_line(words, module),
        seconds=seconds,
        batches=batches,
        whole=whole,
        output=sys.stderr.fileno() if alone else None,
    )
    if not alone:
        click.echo()
    result = _make_result(found, [*(["-m", module] if module else []), *words], gpu_price)
    if output.json_path is not None and output.json_path.is_file():
        output.json_path.unlink()  # a script that is watched again is another one
    output.finish(result)
    raise click.exceptions.Exit(130 if found.interrupted else found.code)


def _make_result(found: WatchedRun, script: list[str], gpu_price: float | None) -> Result:
    """Measure what would help, and work out what all of it says."""
    streams = waiting.find_streams(found.processes)
    faults = found.events("fault")
    settings: dict[str, Any] = {
        "script": script,
        "exit_code": found.code,
        "ended": found.ended,
        "interrupted": found.interrupted,
        "batches": len(found.events("batch")),
        "fault": faults[0]["text"] if faults else "",
        "left_out": [],
        "cpus": found.machine.cpus,
        "ours": found.machine.script_share,
        "others": found.machine.other_share,
    }
    trials = [stream_to_trial(position, stream) for position, stream in enumerate(streams)]
    skipped: dict[str, str] = {}
    first = streams[0] if streams else None
    if first is not None and not found.failed and waiting.can_change(first):
        advised = Replacements()
        replaced: list[MeasuredReplacement] = []
        if first.record and not found.interrupted:
            remade = bool(first.info.get("remade"))
            advised = find_replacements(first.record, _SHARDS, remade=remade)
        if advised.advices and not is_disturbed(found.machine.other_share):
            note("measuring what would help, on a sample of the pictures ...")
            try:
                replaced = measure_replaced(advised.advices, first.info.get("batch_size"), first.parts)
            except PrecacheError as error:
                skipped["another data set"] = str(error)
        settings["left_out"] = advised.left_out
        trials += [replacement_to_trial(each) for each in replaced]
        by_name = {each.name: each for each in advised.advices}
        for change in waiting.find_changes(first, streams, found.machine, replaced):
            trials.append(paste_to_trial(change, _lines(first, change, by_name)))
    machine = describe_machine(torch.device("cpu"))
    # read back as from a file: what it says when it is shown again is the same
    document = parse_document(
        format_document(make_document("watch", machine, settings, tuple(trials), skipped)), "watch"
    )
    return make_result(document.machine, document.settings, document.trials, document.skipped, gpu_price)


def _lines(first: Stream, change: Change, advised: Mapping[str, Advice]) -> list[str]:
    """What to write into the script, or to run; nothing where the script cannot have the change."""
    if change.name == "pillow-simd":
        return advice.put_simd(first.record).lines(os.getcwd())
    told = advised.get(change.name)
    if told is None:
        told = advice.set_arguments(first.record, change.arguments, remade=bool(first.info.get("remade")))
    return [] if told is None else told.lines(os.getcwd())


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
