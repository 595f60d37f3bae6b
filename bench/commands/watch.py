"""Command `bench watch`: runs a user's own training script; says how much it waits for data, and for what."""

import sys
from typing import Any

import click
import torch

from bench.commands.options import price_option
from bench.commands.output import Output, output_options
from bench.machine.hardware import describe_machine
from bench.report import waiting
from bench.report.result import Result, make_document
from bench.report.watch import make_result, stream_to_trial
from bench.watch.build_line import describe_build
from bench.watch.run import WatchedRun, command_line, watch
from precache.cli.commandline import STDOUT, check_output, debug_option
from precache.engines.cpus import cpu_quota
from precache.errors import SettingError


class _Command(click.Command):
    """Command that leaves the options behind `-m MODULE` to the module, as `python -m` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the command line at the module, and leave the options before it to click."""
        flags_with_value = {
            flag
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for flag in param.opts
        }
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "--":
            is_module = args[index].startswith("-m")
            index += 2 if args[index] in flags_with_value else 1
            if is_module:
                args = [*args[:index], "--", *args[index:]]
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
@debug_option
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
    seconds = _parse_seconds(length)
    for path in (output.json_path, output.html_path):
        check_output(path)
    is_stdout_free = output.quiet or output.json_path == STDOUT  # the script's output goes to stderr
    observed = watch(
        command_line(words, module),
        seconds=seconds,
        batches=batches,
        whole=whole,
        output=sys.stderr.fileno() if is_stdout_free else None,
    )
    if not is_stdout_free:
        click.echo()
    script = [*words] if module is None else ["-m", module, *words]
    result = _make_result(observed, script, gpu_price)
    if output.json_path is not None and output.json_path.is_file():
        output.json_path.unlink()  # a second run of the script is a new result, which keeps nothing of it
    output.finish(result)
    raise click.exceptions.Exit(130 if observed.interrupted else observed.code)


def _make_result(observed: WatchedRun, script: list[str], gpu_price: float | None) -> Result:
    """Make the result of the watched script.

    Args:
        script: the words of the command line behind the options of `bench watch`.
        gpu_price: dollars per hour of an accelerator; None: waiting has no cost.
    """
    streams = waiting.find_streams(observed.processes)
    faults = observed.events("fault")
    settings: dict[str, Any] = {
        "script": script,
        "exit_code": observed.code,
        "ended": observed.ended,
        "interrupted": observed.interrupted,
        "batches": len(observed.events("batch")),
        "fault": faults[0]["text"] if faults else "",
        "build": "",
        "cpus": observed.machine.cpus,
        "script_cpu_share": observed.machine.script_cpu_share,
        "other_cpu_share": observed.machine.other_cpu_share,
        "quota_cpus": cpu_quota(),
        "throttled_share": observed.throttled_share,
    }
    trials = [stream_to_trial(position, stream) for position, stream in enumerate(streams)]
    if streams and not observed.failed and waiting.can_change(streams[0]):
        settings["build"] = describe_build(streams[0])
    machine = describe_machine(torch.device("cpu"))
    document = make_document("watch", machine, settings, tuple(trials), {})  # as 'bench report' reads it
    return make_result(document.machine, document.settings, document.trials, gpu_price)


def _parse_seconds(text: str) -> float:
    """Return the seconds of a time such as `60s`, `2min` or `90`; SettingError for anything else."""
    value, factor = text.strip(), 1.0
    for unit, unit_s in (("min", 60.0), ("s", 1.0), ("h", 3600.0)):
        if value.endswith(unit):
            value, factor = value.removesuffix(unit), unit_s
            break
    try:
        seconds = float(value) * factor
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingError(f"--for must be a time as 60s or 2min, got {text!r}")
    return seconds
