"""The command `bench recommend`: what converting a tree would bring, predicted from a sample of it."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.commands.hardware import TABLE_WIDTH
from bench.commands.options import PATH, PLACE, chosen_trainer, option
from bench.machine.hardware import accelerator_of, versions_of
from bench.measure.recommendation import Recommendation, recommend, train_images
from bench.measure.sampling import RecommendSpec
from bench.measure.trainers import EPILOG
from bench.report import forecast as model
from bench.report.advice import PLAIN_RULE, answer, as_it_is, busy_share, rule
from bench.report.choice import RISK, stored_size
from bench.report.forecast import AS_IT_IS, Inputs, Prediction
from bench.report.trust import disturbance, is_disturbed, miss, other_cpu
from bench.report.words import counted, duration, epochs, number, percent
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, gathered, human_bytes, write_json
from precache.console.tables import new_console
from precache.errors import SettingError
from precache.executors import available_cpus
from precache.packages import DALI
from precache.recipe import FORMAT_NAMES
from precache.sources.objects import ObjectTree
from precache.sources.tree import scan_tree
from precache.sources.walk import Scanning
from precache.storage.urls import Location, Url

_VERSIONS = ("python", "torch", "pillow", "simplejpeg", "webdataset", *DALI)
_BATCH_SIZE = 64
# On 2 quiet cores the quick way ends within 25 s; a limit that begins no turn keeps it there on slow ones.
QUICK: dict[str, Any] = {"repeats": 3, "seconds": 0.5, "pictures": 100, "limit_s": 22.0}
THOROUGH: dict[str, Any] = {"repeats": 3, "seconds": 2.0, "pictures": 200}
QUICK_FORMATS = ("shards", "webdataset")
WHAT_IF = {
    "gpus": click.option("--gpus", type=int, help="What if there were so many GPUs?"),
    "cpus": click.option("--cpus", type=int, help="What if there were so many CPUs?"),
    "disk_mbps": click.option("--disk-mbps", type=float, help="What if the disk gave so many MB/s?"),
}
MEASURING = {
    "trainer": option("trainer"),
    "trainer_rate": option("trainer_rate"),
    "stored_size": click.option(
        "--stored-size", type=int, help="Most of the stored shorter side, pixels.  [default: twice --size]"
    ),
    "quality": click.option(
        "--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali)."
    ),
    "size": option("size"),
    "batch_size": click.option(
        "--batch-size",
        type=int,
        help=f"Samples per batch.  [default: {_BATCH_SIZE}, or all of a smaller tree]",
    ),
    "pictures": click.option(
        "--pictures", type=int, help="Pictures of the sample.  [default: 100; --thorough: 200]"
    ),
    "repeats": click.option(
        "--repeats", type=int, help="Of each measurement, taking turns.  [default: 3, or as many as fit]"
    ),
    "seconds": click.option(
        "--seconds", type=float, help="Of each measurement.  [default: 0.5; --thorough: 2]"
    ),
    "scratch": click.option(
        "--scratch", type=PATH, default=Path(tempfile.gettempdir()), help="Folder to convert into."
    ),
}
"""Fields of `RecommendSpec`; what is not given depends on --thorough."""


def what_if(**options: float | None) -> dict[str, Any]:
    """Options that were given, as fields of `Inputs`.

    Raises:
        SettingError: one of them is not positive.
    """
    fields = {
        "gpus": ("gpus", 1),
        "cpus": ("cpus", 1),
        "disk_mbps": ("disk_bytes_per_s", 1e6),
    }
    changes = {}
    for name, value in options.items():
        if value is not None:
            if not 0 < value < float("inf"):
                raise SettingError(f"{name} must be positive, got {value}")
            field, factor = fields[name]
            changes[field] = value * factor
    return changes


@click.command(name="recommend", cls=commandline.Command, epilog=EPILOG)
@click.argument("src", type=PLACE)
@click.option("--thorough", is_flag=True, help="Measure longer, and every format.")
@click.option(
    "--details", is_flag=True, help="Print what the columns mean, and which format suits which disk."
)
@click.option(
    "--format",
    "formats",
    help=f"all, or some of: {', '.join(FORMAT_NAMES)}.  [default: {', '.join(QUICK_FORMATS)}]",
)
@click.option("--check", is_flag=True, help="Convert and load the whole tree, too, and compare.")
@gathered("changes", what_if, WHAT_IF)
@gathered("asked", dict, MEASURING)
@option("json_path")
def command(
    src: Location,
    thorough: bool,
    details: bool,
    formats: str | None,
    check: bool,
    changes: dict[str, Any],
    asked: dict[str, Any],
    json_path: Path | None,
) -> None:
    """Say what gains over ImageFolder and DataLoader: another loader of the tree SRC, or converting it.

    A sample of the pictures is converted and loaded for real, in about half a minute; --thorough and
    --check take minutes. Sizes, times and rates of the whole tree are computed from that and from what the
    disk gives. --gpus, --cpus and --disk-mbps change what they are computed for.
    """
    check_output(json_path)
    thorough = thorough or check
    names = chosen_formats(formats, thorough)
    spec = make_spec(thorough, asked)
    if isinstance(src, Url) and check:
        raise SettingError(f"{src}: --check reads the whole tree from a disk; leave it out, or copy the tree")
    scan = ObjectTree(src).scan() if isinstance(src, Url) else scan_tree(src, how=Scanning(spec.workers))
    if asked["batch_size"] is None:
        spec = replace(spec, batch_size=max(1, min(_BATCH_SIZE, train_images(scan))))
    with ProgressBar("recommend", "run") as bar:
        result = recommend(scan, spec, formats=names, check=check, on_progress=bar)
    other = result.what_if(replace(result.inputs, **changes)) if changes else None
    if json_path is not None:
        content = result.to_json()
        content["what_if"] = other.to_json() if other is not None else None
        write_json(json_path, content)
    if json_path != STDOUT:
        show(result, other, details=details)
        if not thorough:
            click.echo("A quick estimate: --thorough measures longer, --check measures the whole tree, too.")


_NO_FORMAT = ", so no format is named"


def chosen_formats(asked: str | None, thorough: bool) -> tuple[str, ...]:
    """Those named, else those that the quick or the thorough way takes."""
    if asked is None:
        return FORMAT_NAMES if thorough else QUICK_FORMATS
    return FORMAT_NAMES if asked == "all" else tuple(name.strip() for name in asked.split(","))


def make_spec(thorough: bool, asked: dict[str, Any]) -> RecommendSpec:
    """What was asked for, else what the quick or the thorough way takes."""
    trainer = chosen_trainer(asked["trainer"], asked["trainer_rate"])
    asked = {**asked, "trainer": trainer, "trainer_rate": None}
    given = {name: value for name, value in asked.items() if value is not None}
    given.setdefault("stored_size", stored_size(given["size"]))
    usual = dict(THOROUGH if thorough else QUICK)
    if given.keys() & {"repeats", "seconds"}:
        usual.pop("limit_s", None)  # who says how long does not want to be cut short
    return RecommendSpec(**{"batch_size": _BATCH_SIZE, "workers": available_cpus(), **usual, **given})


def show(result: Recommendation, other: Recommendation | None, *, details: bool = False) -> None:
    """Print what to do, the predictions, those of the what-if, the check, and the conditions."""
    console = new_console(width=TABLE_WIDTH)
    share = other_cpu(result.settings)
    for found in (result, other):
        if found is not None:
            console.print("" if found is result else "\nWhat if: " + given(found.inputs), end="")
            _show_predictions(console, found, share, again=found is other)
    if result.checks:
        _show_checks(console, result)
    for name, reason in result.skipped.items():
        console.print(f"skipped {name}: {reason}")
    if details:
        for sentence in (*crossover(result), legend(result)):
            console.print(sentence)
    if result.settings["stored_size"] < stored_size(result.settings["size"]):
        console.print(RISK)
    console.print(conditions(result))
    for warning in result.hardware.warnings:
        console.print(f"WARNING: {warning}")


def _show_predictions(console: Console, found: Recommendation, share: float | None, *, again: bool) -> None:
    """The answer, the table, the rule; beside other busy processes no format is named, which is said once."""
    disturbed = is_disturbed(share)
    if disturbed and again:
        console.print(prediction_table(found.predictions, found.inputs, star=False))
        return
    if disturbed:
        console.print(f"{as_it_is(found.predictions, found.inputs)} {disturbance(share, _NO_FORMAT)}")
    else:
        console.print(answer(found.predictions, found.inputs, found.turns))
    console.print()
    console.print(prediction_table(found.predictions, found.inputs, star=not disturbed))
    console.print()
    crossovers = list(found.crossovers.values())
    figures = rule(found.predictions, found.inputs, crossovers[0] if crossovers else None)
    console.print(PLAIN_RULE if disturbed else figures)


def _show_checks(console: Console, result: Recommendation) -> None:
    console.print("\nPredicted from the sample, and measured on the whole tree:")
    console.print(check_table(result))
    worst = max(result.checks, key=lambda check: abs(check.error))
    console.print(
        f"Farthest off: {worst.quantity} of {worst.name}, {worst.error:+.0%}. error: the prediction from "
        f"each repeat's sample against the same repeat's whole tree; median, and range."
    )
    for check in result.checks:
        missed = miss(1 + check.error, 1.0, _why(check.quantity, other_cpu(result.settings)))
        if missed:
            console.print(f"{check.quantity} of {check.name}: {missed}")


def _why(quantity: str, share: float | None) -> str:
    """What may make a prediction of that quantity miss."""
    if is_disturbed(share):
        return "other processes were busy, and not evenly."
    if quantity == "conversion":
        return (
            "a small tree converts in the time that processes take to start, and a disk that buffers "
            "writes is fast until its buffer is full."
        )
    if quantity == "size":
        return "the sample's pictures are not like the others; --pictures takes more of them."
    return "a run this short swings; --seconds and --repeats measure longer, --pictures takes more pictures."


def given(inputs: Inputs) -> str:
    """What a prediction is for, on one line."""
    gpus = "" if inputs.gpus == 1 else f"{inputs.gpus} x "
    return (
        f"{counted(inputs.images, 'picture')}, {counted(inputs.cpus, 'CPU')}, trainer {gpus}"
        f"{number(inputs.trainer_images_per_s)} images/s, disk {number(inputs.disk_bytes_per_s / 1e6)} MB/s\n"
    )


def prediction_table(predictions: list[Prediction], inputs: Inputs, *, star: bool = True) -> Table:
    """A rich table of at most 100 columns; the advised line has a star where `star`."""
    table = Table(box=None, pad_edge=False)
    titles = (
        "format",
        "trainer busy",
        "images/s",
        "loader alone",
        "cold disk",
        "size",
        "convert",
        "pays after",
    )
    for title in titles:
        table.add_column(title, justify="left" if title == "format" else "right", no_wrap=True)
    advised = model.best(predictions) if star else None
    for found in predictions:
        free = found.name in AS_IT_IS
        table.add_row(
            found.name + (" *" if found is advised else ""),
            percent(busy_share(found, inputs)),
            f"{found.trained_images_per_s:,.0f}" + ("" if found.cached else " (cold)"),
            f"{found.warm_images_per_s:,.0f}",
            f"{found.cold_images_per_s:,.0f}",
            human_bytes(found.bytes),
            "-" if free else duration(found.conversion_s),
            "-" if free else epochs(found.epochs_to_pay),
        )
    return table


def check_table(result: Recommendation) -> Table:
    """Predicted against measured, with the error."""
    table = Table(box=None, pad_edge=False)
    for title in ("format", "quantity", "predicted", "measured", "low-high", "error", "low to high"):
        left = title in ("format", "quantity")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for check in result.checks:
        measured = check.measured
        texts = [_amount(value, check.unit) for value in (check.predicted.median, measured.median)]
        ends = "-".join(_amount(value, check.unit) for value in (measured.low, measured.high))
        errors = f"{_signed(check.ratio.low - 1)} to {_signed(check.ratio.high - 1)}"
        table.add_row(check.name, check.quantity, *texts, ends, _signed(check.error, 1), errors)
    return table


def crossover(result: Recommendation) -> list[str]:
    """Where raw pixels and JPEG files change places, one sentence for each JPEG format."""
    disk = result.inputs.disk_bytes_per_s
    sentences = []
    for name, rate in result.crossovers.items():
        if rate is None:
            sentences.append(f"From a cold cache {name} is at least as fast as raw pixels on any disk.")
        else:
            side = "below" if disk < rate else "above"
            sentences.append(
                f"From a cold cache {name} loads faster than raw pixels where the disk gives less than "
                f"{rate / 1e6:,.0f} MB/s; this one is {side} that."
            )
    return sentences


def legend(result: Recommendation) -> str:
    """What the columns mean."""
    return (
        "trainer busy, images/s: the share of the time that the trainer works, and its rate, from the "
        "second epoch on, fed from memory where the data is less than half of it, else from the disk (cold). "
        "loader alone, cold disk: its images/s, with the files in memory, and read from the disk. "
        "pays after: epochs until converting has saved, against imagefolder, the time that it took. "
        "imagefolder: torchvision's, in a DataLoader; raw tree: loaders.build on the same files."
    )


def conditions(result: Recommendation) -> str:
    """Under which conditions the figures hold."""
    settings, machine = result.settings, result.hardware.machine
    versions = ", ".join(versions_of(machine, _VERSIONS))
    inputs = result.inputs
    others = other_cpu(settings)
    check = ", checksums not compared" if settings["check"] == "never" else ""
    busy = "" if others is None or is_disturbed(others) else f", other processes {others:.0%} of the CPUs"
    return (
        f"{counted(inputs.images, 'picture')}; trainer {settings['trainer']}, "
        f"{number(inputs.trainer_images_per_s)} images/s; disk {result.hardware.disk.device}, "
        f"{number(inputs.disk_bytes_per_s / 1e6)} MB/s; batch {settings['batch_size']} of "
        f"{settings['size']}x{settings['size']}, augment {settings['augment']}, "
        f"{counted(settings['workers'], 'worker')}; stored at most {settings['stored_size']} px, "
        f"quality {settings['quality']}. Predicted from a sample of "
        f"{counted(settings['sample_pictures'], 'picture')}; median of "
        f"{counted(settings['repeats'], 'repeat')}, page cache warm{check}{busy}.\n"
        f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; {versions}; "
        f"{machine['date']}."
    )


def _signed(share: float, digits: int = 0) -> str:
    """`+12%`; nothing is `+0%`, from whichever side."""
    return f"{round(share, digits + 2) + 0.0:+.{digits}%}"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return human_bytes(value)
    return f"{number(value)} {unit}" if unit == "s" else f"{value:,.0f}"
