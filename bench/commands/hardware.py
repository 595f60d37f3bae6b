"""`bench hardware`: what each part of this machine gives, and how long that takes for a data set."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bench.commands.options import PATH, option
from bench.machine import measurements
from bench.machine.measurements import Hardware, HardwareSpec
from bench.report.stats import disturbance, is_disturbed
from bench.report.table import Table
from bench.report.words import counted, duration, machine_line, number, say
from precache.cli import commandline
from precache.cli.commandline import STDOUT, ProgressBar, check_output, human_bytes, write_json
from precache.example_data.sample_tree import make_sample
from precache.sources.base import Scan
from precache.sources.tree import scan_tree

_GENERATED = 64  # pictures; making them takes longer than measuring
_VERSIONS = ("python", "torch", "numpy", "simplejpeg")
_FEEDING = {
    "disk, sequential read": "reading from the disk",
    "JPEG decode, all cores": "decoding on all cores",
    "host to device, pinned": "copying to the device",
}


@click.command(name="hardware", cls=commandline.Command)
@click.option("--data", type=PATH, help="A tree of pictures: decode these, and give the time for all.")
@click.option(
    "--scratch", type=PATH, default=Path(tempfile.gettempdir()), help="A folder on the disk to measure."
)
@click.option("--repeats", default=5, show_default=True, help="Of each measurement, taking turns.")
@click.option("--seconds", default=0.5, show_default=True, help="Of each repeat.")
@option("json_path")
def command(data: Path | None, scratch: Path, repeats: int, seconds: float, json_path: Path | None) -> None:
    """Measure how fast this machine copies, reads, decodes and multiplies, each alone.

    The slowest part of feeding an accelerator comes first. Each line has the median, the lowest and the
    highest repeat, and how long this part alone takes for the pictures of --data, else for 1,000.
    """
    spec = HardwareSpec(scratch=scratch, repeats=repeats, seconds=seconds)
    check_output(json_path)
    with _scan(data, scratch) as scan, ProgressBar("hardware", "run") as bar:
        jpegs = measurements.sample_jpegs(scan)
        found = {"pictures": len(scan.samples), "file_bytes": int(scan.samples.file_bytes.sum())}
        result = measurements.measure(spec, jpegs, None if data is None else found, bar)
    if json_path is not None:
        write_json(json_path, result.to_json())
    if json_path != STDOUT:
        show(result)
        if data is not None and data.stat().st_dev != scratch.stat().st_dev:
            say(f"{data} lies on another disk than {scratch}: name a folder on it with --scratch")


def show(result: Hardware) -> None:
    """Print the answer, the table, and what goes with it."""
    say(answer(result))
    rows = []
    for found in result.measurements:
        value, time = found.value, duration(result.times[found.name])
        if value is None:
            rows.append([found.name, "-", "-", time, "see below"])
        else:
            spread = f"{number(value.low)}-{number(value.high)}"
            rows.append([found.name, f"{number(value.median)} {found.unit}", spread, time, found.how])
    pictures = counted(result.pictures, "picture")
    click.echo()
    Table(("measured", "median", "low-high", pictures, "how"), rows, words=("how",)).show()
    click.echo()
    for reason in dict.fromkeys(found.how for found in result.measurements if found.value is None):
        say(f"not measured: {reason}")
    say(
        f"Times are of this part alone, once over {pictures} ({human_bytes(result.file_bytes)}): files "
        f"through memory and disk (random: one block at a time), pictures decoded, their pixels (224x224) to "
        f"the device, ResNet-50 training steps at the full matrix-multiply rate. "
        f"{machine_line(result.machine, _VERSIONS)}; median of {counted(result.repeats, 'repeat')}."
    )
    if is_disturbed(result.other_cpu):
        say(f"WARNING: {disturbance(result.other_cpu, then='')}")


def answer(result: Hardware) -> str:
    """Which part of feeding an accelerator takes longest."""
    seconds = result.times
    parts = {part: s for name, part in _FEEDING.items() if (s := seconds.get(name)) is not None}
    if not parts:
        return "No part that feeds an accelerator could be measured."
    slowest, *others = sorted(parts, key=lambda part: -parts[part])
    rest = " and ".join(f"{part} takes {duration(parts[part])}" for part in others)
    return (
        f"{slowest.capitalize()} is the slowest part of feeding an accelerator: {duration(parts[slowest])} "
        f"for {counted(result.pictures, 'picture')}{f'; {rest}' if rest else ''}."
    )


@contextmanager
def _scan(data: Path | None, scratch: Path) -> Iterator[Scan]:
    """The tree `data`, or a generated one for the duration of the block."""
    if data is not None:
        yield scan_tree(data)
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-hardware-") as folder:
        make_sample(Path(folder) / "tree", images=_GENERATED, like="caltech", workers=0)
        yield scan_tree(Path(folder) / "tree")
