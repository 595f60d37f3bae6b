"""Command `bench hardware`: measures each part of this machine alone, and how long a data set takes it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from bench.commands.output import Output, output_options
from bench.machine.hardware import describe_machine
from bench.machine.measurements import HardwareSpec, Probe, describe_pictures, prepare_probes, sample_jpegs
from bench.machine.monitor import OtherProcesses
from bench.measure.trials import Trials
from bench.report.hardware import PARTS, make_result
from bench.report.result import Trial
from loaders.device import find_device
from precache.cli.commandline import PATH, debug_option
from precache.example_data.sample_tree import make_sample
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage.staging import temporary_folder

_GENERATED_PICTURES = 64  # where no tree is given; making more takes longer than measuring


@click.command(name="hardware", short_help="Measure how fast each part of this machine is.")
@click.option("--data", type=PATH, help="Tree of pictures to decode, for all of which times are given.")
@click.option(
    "--scratch",
    type=PATH,
    default=Path(tempfile.gettempdir()),
    help="Folder on the disk to measure; takes 512 MiB for a minute.  [default: the temporary folder]",
)
@click.option("--repeats", default=5, show_default=True, help="Repeats of each measurement, taking turns.")
@click.option("--seconds", default=0.5, show_default=True, help="Seconds of each repeat.")
@output_options
@debug_option
def command(data: Path | None, scratch: Path, repeats: int, seconds: float, output: Output) -> None:
    """Measure how fast this machine copies, reads, decodes and multiplies, each alone.

    \b
    bench hardware --data photos

    The answer names the slowest part of feeding an accelerator. Each line has the median, the lowest and the
    highest run, and how long this part alone takes for the pictures of --data, else for 1,000.
    """
    spec = HardwareSpec(scratch=scratch, repeats=repeats, seconds=seconds)
    device = find_device("auto")
    with output.progress("hardware", "run") as on_progress, _scan(data, scratch) as scan:
        jpegs = sample_jpegs(scan)
        trials = Trials(
            output.json_path,
            "hardware",
            describe_machine(device),
            {
                **describe_pictures(data, scan, jpegs),
                "scratch": str(scratch),
                "on_scratch_disk": data is None or data.stat().st_dev == scratch.stat().st_dev,
                "seconds": seconds,
                "repeats": repeats,
            },
        )
        with prepare_probes(spec, jpegs, device) as probes:
            measurable = []
            for probe in probes:
                if probe.measure is None:
                    trials.skipped[probe.part] = probe.conditions
                else:
                    measurable.append(probe)
            done = 0
            for repeat in range(repeats):
                for probe in measurable:
                    trials.measure({"part": probe.part, "repeat": repeat}, partial(_run_probe, probe))
                    done += 1
                    on_progress(done, repeats * len(measurable))
    result = make_result(trials.machine, trials.settings, trials.all(), trials.skipped)
    trials.finish(result)
    output.finish(result)


def _run_probe(probe: Probe) -> Trial:
    """Measure once; note what other processes took of the CPUs meanwhile."""
    assert probe.measure is not None
    others = OtherProcesses()
    numbers = {PARTS[probe.part].number: probe.measure()}
    share = others.share()
    if share is not None:
        numbers["other_cpu_share"] = share
    return Trial(numbers=numbers, facts={"how": probe.conditions})


@contextmanager
def _scan(data: Path | None, scratch: Path) -> Iterator[Scan]:
    """Yield the scan of the tree `data`, or of a generated tree that is removed after the block."""
    if data is not None:
        yield scan_tree(data)
        return
    with temporary_folder(scratch) as folder:
        make_sample(folder / "tree", images=_GENERATED_PICTURES, like="caltech", workers=0)
        yield scan_tree(folder / "tree")
