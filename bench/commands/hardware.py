"""The command `bench hardware`: what each part of the machine gives, and its time for a data set."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.table import Table

from bench.commands.options import PATH, option
from bench.machine import measurements
from bench.machine.hardware import accelerator_of
from bench.machine.measurements import PETABYTE, Hardware, HardwareSpec, Measurement
from bench.report.stats import Estimate
from bench.report.trust import disturbance, is_disturbed
from bench.report.words import counted, duration, number
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, human_bytes, write_json
from precache.console.tables import new_console
from precache.example_data.sample_tree import make_sample
from precache.sources.base import Scan
from precache.sources.tree import scan_tree

TABLE_WIDTH = 100
_LONGEST_HOW = 20
_GENERATED = 64  # pictures; making them takes longer than measuring
_VERSIONS = ("python", "torch", "numpy", "simplejpeg")
_FEEDING = {
    "disk, sequential read": "reading them from the disk",
    "JPEG decode, all cores": "decoding them on all cores",
    "host to device, pinned": "copying them to the device",
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

    Each line has the median, the lowest and the highest repeat, and how long this part alone takes for
    the pictures of --data and for 1 PB of such files.
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
            click.echo(f"{data} lies on another disk than {scratch}: name a folder on it with --scratch")


def show(result: Hardware) -> None:
    """Print the table, what goes with it, and the warnings."""
    console = new_console(width=TABLE_WIDTH)
    console.print(answer(result))
    console.print()
    console.print(table(result))
    reasons = dict.fromkeys(m.how for m in result.measurements if m.value is None and _is_long(m.how))
    for reason in reasons:
        console.print(f"not measured: {reason}")
    console.print(legend(result))
    for warning in result.warnings:
        console.print(f"WARNING: {warning}")
    if is_disturbed(result.other_cpu):
        console.print(f"WARNING: {disturbance(result.other_cpu, then='')}")


def answer(result: Hardware) -> str:
    """Which part of feeding an accelerator takes longest, first of all that is printed."""
    data = result.data or {"pictures": 1_000, "file_bytes": int(1_000 * result.mean_file_bytes)}
    found = {m.name: m.seconds_for(data["pictures"], data["file_bytes"]) for m in result.measurements}
    seconds = {title: s for name, title in _FEEDING.items() if (s := found.get(name)) is not None}
    parts = sorted(seconds, key=lambda part: -seconds[part])
    if not parts:
        return "No part that feeds an accelerator could be measured."
    first, *others = (f"{part}, {duration(seconds[part])}" for part in parts)
    rest = f" (the other{'s' * (len(others) > 1)}: {'; '.join(others)})" if others else ""
    return f"Of feeding {counted(data['pictures'], 'picture')} this takes longest: {first}{rest}."


def table(result: Hardware) -> Table:
    """A rich table of at most 100 columns."""
    shown = Table(box=None, pad_edge=False)
    titles = ["measured", "median", "low-high", "data set", "1 PB", "how"]
    if result.data is None:
        titles.remove("data set")
    for title in titles:
        left = title in ("measured", "how")
        shown.add_column(title, justify="left" if left else "right", no_wrap=True)
    for measurement in result.measurements:
        shown.add_row(*cells(measurement, result))
    return shown


def cells(measurement: Measurement, result: Hardware) -> list[str]:
    """One row."""
    value, data = measurement.value, result.data
    how = "see below" if value is None and _is_long(measurement.how) else measurement.how
    figures = ["-", "-"]
    if value is not None:
        figures = [f"{number(value.median)} {measurement.unit}", spread(value)]
    seconds = []
    if data is not None:
        seconds.append(measurement.seconds_for(data["pictures"], data["file_bytes"]))
    pictures = PETABYTE / result.mean_file_bytes if result.mean_file_bytes else 0.0
    seconds.append(measurement.seconds_for(pictures, PETABYTE) if pictures else None)
    return [measurement.name, *figures, *map(duration, seconds), how]


def legend(result: Hardware) -> str:
    """What the figures mean, and under which conditions they hold."""
    machine, data = result.machine, result.data
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if name in machine)
    of_data = "" if data is None else (
        f"Data set: {data['pictures']:,} pictures, {human_bytes(data['file_bytes'])}. "
    )  # fmt: skip
    return (
        f"{of_data}Times are of this part alone, once over all pictures: files through memory and disk "
        f"(random: one block at a time), pictures decoded, their pixels (224x224) to the device, ResNet-50 "
        f"training steps at the full matrix-multiply rate. 1 PB is of files of "
        f"{human_bytes(result.mean_file_bytes)}, the mean of those decoded here.\n"
        f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; disk "
        f"{result.disk.device}{_spinning(result)}; {versions}; median of "
        f"{counted(result.repeats, 'repeat')}; {machine['date']}."
    )


def spread(value: Estimate) -> str:
    """The lowest and the highest measurement."""
    return f"{number(value.low)}-{number(value.high)}"


@contextmanager
def _scan(data: Path | None, scratch: Path) -> Iterator[Scan]:
    """The tree `data`, or a generated one for the duration of the block."""
    if data is not None:
        yield scan_tree(data)
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-hardware-") as folder:
        make_sample(Path(folder) / "tree", images=_GENERATED, like="caltech", workers=0)
        yield scan_tree(Path(folder) / "tree")


def _spinning(result: Hardware) -> str:
    return " (rotational, says the kernel)" if result.disk.rotational else ""


def _is_long(how: str) -> bool:
    return len(how) > _LONGEST_HOW
