"""The command `bench recommend`: what converting a tree would bring, predicted from a sample of it."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bench.commands.hardware import TABLE_WIDTH, duration, number
from bench.findings import forecast as model
from bench.findings.forecast import RAW_NAME, Inputs, Prediction
from bench.machine.hardware import accelerator_of
from bench.trial.presets import EPILOG
from bench.trial.recommendation import Recommendation, recommend
from bench.trial.sampling import RecommendSpec
from bench.trial.trainers import CHOICES
from precache import commandline
from precache.commandline import STDOUT, ProgressBar, check_output, human_bytes, write_json
from precache.errors import SettingError
from precache.executors import available_cpus
from precache.packages import DALI
from precache.recipe import FORMAT_NAMES
from precache.tables import new_console

_BUSY = 0.1  # share of the CPUs
_PATH = click.Path(path_type=Path)
_VERSIONS = ("python", "torch", "pillow", "simplejpeg", "webdataset", *DALI)


@click.command(name="recommend", cls=commandline.Command, epilog=EPILOG)
@click.argument("src", type=_PATH)
@click.option("--format", "formats", default="all", show_default=True, help=f"Of: {', '.join(FORMAT_NAMES)}.")
@click.option("--check", is_flag=True, help="Convert and load the whole tree, too, and compare.")
@click.option("--gpus", type=int, help="What if there were so many GPUs?")
@click.option("--cpus", type=int, help="What if there were so many CPUs?")
@click.option("--trainer-rate", type=float, help="What if one GPU took so many images/s?")
@click.option("--disk-mbps", type=float, help="What if the disk gave so many MB/s?")
@click.option("--trainer", default="auto", show_default=True, help=f"One of: {CHOICES}.")
@click.option("--stored-size", default=256, show_default=True, help="Side of the stored square, pixels.")
@click.option("--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali).")
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--pictures", default=200, show_default=True, help="Pictures of the sample.")
@click.option("--repeats", default=3, show_default=True, help="Of each measurement, taking turns.")
@click.option("--seconds", default=2.0, show_default=True, help="Of each measurement.")
@click.option("--scratch", type=_PATH, default=Path(tempfile.gettempdir()), help="Folder to convert into.")
@click.option("--json", "json_path", type=_PATH, help="Write the result here; '-' prints it alone.")
def command(
    src: Path,
    formats: str,
    check: bool,
    gpus: int | None,
    cpus: int | None,
    trainer_rate: float | None,
    disk_mbps: float | None,
    json_path: Path | None,
    **settings: Any,
) -> None:
    """Predict what converting the tree SRC to each format would bring.

    A sample of its pictures is converted and loaded for real; sizes, times and rates of the whole are
    computed from that and from what the disk gives. --gpus, --cpus, --trainer-rate and --disk-mbps
    change what they are computed for.
    """
    changes = what_if(gpus=gpus, cpus=cpus, trainer_rate=trainer_rate, disk_mbps=disk_mbps)
    check_output(json_path)
    spec = RecommendSpec(workers=available_cpus(), **settings)
    with ProgressBar("recommend", "run") as bar:
        names = FORMAT_NAMES if formats == "all" else tuple(name.strip() for name in formats.split(","))
        result = recommend(src, spec, formats=names, check=check, on_progress=bar)
    other = result.what_if(replace(result.inputs, **changes)) if changes else None
    if json_path is not None:
        content = result.to_json()
        content["what_if"] = other.to_json() if other is not None else None
        write_json(json_path, content)
    if json_path != STDOUT:
        show(result, other)


def what_if(**options: float | None) -> dict[str, Any]:
    """Options that were given, as fields of `Inputs`.

    Raises:
        SettingError: one of them is not positive.
    """
    fields = {
        "gpus": ("gpus", 1),
        "cpus": ("cpus", 1),
        "trainer_rate": ("trainer_images_per_s", 1),
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


def show(result: Recommendation, other: Recommendation | None) -> None:
    """Print the predictions, those of the what-if, the check, and what to do."""
    console = new_console(width=TABLE_WIDTH)
    for found in (result, other):
        if found is not None:
            console.print(("" if found is result else "\nWhat if: ") + given(found.inputs))
            console.print(prediction_table(found.predictions))
            console.print(advice(found.predictions, found.inputs))
            for sentence in crossover(found):
                console.print(sentence)
    for name, reason in result.skipped.items():
        console.print(f"skipped {name}: {reason}")
    if result.checks:
        console.print("\nPredicted from the sample, and measured on the whole tree:")
        console.print(check_table(result))
        worst = max(result.checks, key=lambda check: abs(check.error))
        console.print(
            f"Farthest off: {worst.quantity} of {worst.name}, {worst.error:+.0%}. error: the prediction from "
            f"each repeat's sample against the same repeat's whole tree; median, and range."
        )
    console.print(legend(result))
    if result.settings["others"] > _BUSY:
        console.print(
            f"WARNING: other processes took {result.settings['others']:.0%} of the CPUs meanwhile; rates "
            f"and times are those of a busy machine, and scatter"
        )
    for warning in result.hardware.warnings:
        console.print(f"WARNING: {warning}")


def given(inputs: Inputs) -> str:
    """What a prediction is for, on one line."""
    gpus = "" if inputs.gpus == 1 else f"{inputs.gpus} x "
    return (
        f"{inputs.images:,} pictures, {inputs.cpus} CPUs, trainer {gpus}"
        f"{number(inputs.trainer_images_per_s)} images/s, disk {number(inputs.disk_bytes_per_s / 1e6)} MB/s"
    )


def prediction_table(predictions: list[Prediction]) -> Table:
    """A rich table of at most 100 columns; the advised line has a star."""
    table = Table(box=None, pad_edge=False)
    for title in ("format", "size", "convert", "loader", "cold", "trained", "pays after"):
        table.add_column(title, justify="left" if title == "format" else "right", no_wrap=True)
    advised = model.best(predictions)
    for found in predictions:
        raw = found.name == RAW_NAME
        table.add_row(
            found.name + (" *" if found is advised else ""),
            human_bytes(found.bytes),
            "-" if raw else duration(found.conversion_s),
            f"{found.warm_images_per_s:,.0f}",
            f"{found.cold_images_per_s:,.0f}",
            f"{found.trained_images_per_s:,.0f}" + ("" if found.cached else " (cold)"),
            "-" if raw else epochs(found.epochs_to_pay),
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
        errors = f"{check.ratio.low - 1:+.0%} to {check.ratio.high - 1:+.0%}"
        table.add_row(check.name, check.quantity, *texts, ends, f"{check.error:+.1%}", errors)
    return table


def advice(predictions: list[Prediction], inputs: Inputs) -> str:
    """What to do, in one sentence."""
    advised = model.best(predictions)
    (raw,) = (found for found in predictions if found.name == RAW_NAME)
    if advised is raw:
        return "Leave the tree as it is: no format is predicted to train faster by more than 2%."
    limit = inputs.trainer_images_per_s * inputs.gpus
    return (
        f"Convert to {advised.name}: predicted {advised.trained_images_per_s:,.0f} images/s instead of "
        f"{raw.trained_images_per_s:,.0f}, of {limit:,.0f} that the trainer takes; converting takes "
        f"{duration(advised.conversion_s)} and {human_bytes(advised.bytes)}, and pays after "
        f"{epochs(advised.epochs_to_pay)}."
    )


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
    """What the figures mean, and under which conditions they hold."""
    settings, machine = result.settings, result.hardware.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if name in machine)
    return (
        "loader, cold, trained: images/s of the loader alone, page cache warm; of the same, cache cold; and "
        "of the trainer fed by it from the second epoch on, from a warm cache where the data is less than "
        "half of the memory. pays after: epochs until converting has saved the time that it took.\n"
        f"Sample: {settings['pictures']} pictures at most, repeated to {settings['sample_images']:,}; stored "
        f"{settings['stored_size']} px, quality {settings['quality']}; batch {settings['batch_size']} of "
        f"{settings['size']}x{settings['size']}, {settings['workers']} workers; trainer "
        f"{settings['trainer']}; median of {settings['repeats']} repeats, each in a process of its own.\n"
        f"{machine['cpu']}, {machine['memory']}, accelerator: {accelerator_of(machine)}; disk "
        f"{result.hardware.disk.device}; {versions}; {machine['date']}."
    )


def epochs(count: int | None) -> str:
    """`3 epochs`, or `never`."""
    return "never" if count is None else f"{count:,} epoch{'s' if count != 1 else ''}"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return human_bytes(value)
    return f"{number(value)} {unit}" if unit == "s" else f"{value:,.0f}"
