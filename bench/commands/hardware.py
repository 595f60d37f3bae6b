"""`bench hardware`: what each part of this machine gives, and how long that takes for a data set."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bench.commands.options import PATH, option
from bench.machine import measurements
from bench.machine.measurements import Hardware, HardwareSpec
from bench.report.trust import disturbance, is_disturbed
from bench.report.words import Table, counted, duration, machine_line, number, say
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, human_bytes, write_json
from precache.example_data.sample_tree import make_sample
from precache.sources.base import Scan
from precache.sources.tree import scan_tree

_LONGEST_HOW = 20
_GENERATED = 64  # pictures; making them takes longer than measuring
_WITHOUT_DATA = 1_000  # pictures that the times are for
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
    """Print the answer, the table, what goes with it, and the warnings."""
    say(answer(result))
    click.echo()
    table(result).show()
    click.echo()
    reasons = [found.how for found in result.measurements if found.value is None and _is_long(found.how)]
    for reason in dict.fromkeys(reasons):
        say(f"not measured: {reason}")
    say(conditions(result))
    for warning in result.warnings:
        say(f"WARNING: {warning}")
    if is_disturbed(result.other_cpu):
        say(f"WARNING: {disturbance(result.other_cpu, then='')}")


def answer(result: Hardware) -> str:
    """Which part of feeding an accelerator takes longest."""
    seconds = times(result)
    parts = {part: s for name, part in _FEEDING.items() if (s := seconds.get(name)) is not None}
    if not parts:
        return "No part that feeds an accelerator could be measured."
    slowest, *others = sorted(parts, key=lambda part: -parts[part])
    rest = " and ".join(f"{part} takes {duration(parts[part])}" for part in others)
    return (
        f"{slowest.capitalize()} is the slowest part of feeding an accelerator: {duration(parts[slowest])} "
        f"for {_pictures(result)}{f'; {rest}' if rest else ''}."
    )


def table(result: Hardware) -> Table:
    """A row for each measurement; none is wider than a terminal."""
    seconds = times(result)
    rows = []
    for found in result.measurements:
        value = found.value
        how = "see below" if value is None and _is_long(found.how) else found.how
        median = "-" if value is None else f"{number(value.median)} {found.unit}"
        spread = "-" if value is None else f"{number(value.low)}-{number(value.high)}"
        rows.append([found.name, median, spread, duration(seconds[found.name]), how])
    return Table(("measured", "median", "low-high", _pictures(result), "how"), rows, words=("how",))


def times(result: Hardware) -> dict[str, float | None]:
    """Seconds that each part alone takes for the data set, by its name; without one, for 1,000 pictures."""
    data = result.data or {
        "pictures": _WITHOUT_DATA,
        "file_bytes": int(_WITHOUT_DATA * result.mean_file_bytes),
    }
    return {m.name: m.seconds_for(data["pictures"], data["file_bytes"]) for m in result.measurements}


def conditions(result: Hardware) -> str:
    """What the figures mean, and under which conditions they hold."""
    data = result.data
    files = (
        "files of " + human_bytes(result.mean_file_bytes) if data is None else human_bytes(data["file_bytes"])
    )
    spinning = " (rotational, says the kernel)" if result.disk.rotational else ""
    return (
        f"Times are of this part alone, once over {_pictures(result)} ({files}): files through memory and "
        f"disk (random: one block at a time), pictures decoded, their pixels (224x224) to the device, "
        f"ResNet-50 training steps at the full matrix-multiply rate. "
        f"{machine_line(result.machine, _VERSIONS)}; disk {result.disk.device}{spinning}; median of "
        f"{counted(result.repeats, 'repeat')}."
    )


def _pictures(result: Hardware) -> str:
    return counted(_WITHOUT_DATA if result.data is None else result.data["pictures"], "picture")


@contextmanager
def _scan(data: Path | None, scratch: Path) -> Iterator[Scan]:
    """The tree `data`, or a generated one for the duration of the block."""
    if data is not None:
        yield scan_tree(data)
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-hardware-") as folder:
        make_sample(Path(folder) / "tree", images=_GENERATED, like="caltech", workers=0)
        yield scan_tree(Path(folder) / "tree")


def _is_long(how: str) -> bool:
    return len(how) > _LONGEST_HOW
