"""Command `bench recommend`: predicts from a sample of a tree what a conversion would bring."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.commands.options import make_settings, option, split_names
from bench.commands.output import Output, output_options
from bench.measure.recommend import Question, recommend
from bench.measure.sample import train_images
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG, emulated_images_per_s
from bench.report.forecast import stored_size as default_stored_size
from precache.cli.commandline import LocationType, combine_options, debug_option
from precache.cli.convert import DATA
from precache.errors import SettingError, check_choice
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage.urls import source_path

_BATCH_SIZE = 64
_QUICK: dict[str, Any] = {"pictures": 100, "limit_s": 22.0}
"""Arguments of `Question` without --thorough.

On 2 quiet cores a quick estimate ends within 25 s; on slower ones `limit_s` keeps it near that, because no
turn begins after it.
"""
_QUICK_S, _THOROUGH_S = 0.5, 2.0  # seconds of each run
_QUICK_FORMATS = ("shards", "webdataset")
_TRIAL_OPTIONS = {
    "trainer": option("trainer"),
    "trainer_rate": option("trainer_rate"),
    "launches": option("launches"),
    "size": option("size"),
    "batch_size": click.option(
        "--batch-size",
        type=int,
        help=f"Samples per batch.  [default: {_BATCH_SIZE}, or all of a smaller tree]",
    ),
}
"""Options of the trainer and of the batches that are measured."""
_WHAT_IF_OPTIONS = {
    "gpus": click.option("--gpus", type=int, help="What if there were so many GPUs?"),
    "accelerator": click.option(
        "--accelerator", metavar="NAME", help="What if it were this one, as h100, or of so many images/s?"
    ),
    "workers": click.option("--workers", type=int, help="What if there were so many CPUs, a worker each?"),
    "disk_mbps": click.option("--disk-mbps", type=float, help="What if the disk gave so many MB/s?"),
}


def _parse_what_if(
    gpus: int | None, accelerator: str | None, workers: int | None, disk_mbps: float | None
) -> dict[str, Any]:
    """Return the what-if options that were given, as fields of `bench.report.forecast.Inputs`.

    Raises:
        SettingError: a number is not positive, or the accelerator is unknown.
    """
    for name, value in (("gpus", gpus), ("workers", workers), ("disk_mbps", disk_mbps)):
        if value is not None and not 0 < value < float("inf"):
            raise SettingError(f"{name} must be positive, got {value}")
    changes: dict[str, Any] = {}
    if gpus is not None:
        changes["gpus"] = gpus
    if accelerator is not None:
        changes["trainer_images_per_s"] = emulated_images_per_s(accelerator)
    if workers is not None:
        changes["cpus"] = workers
    if disk_mbps is not None:
        changes["disk_bytes_per_s"] = disk_mbps * 1e6
    return changes


@click.command(
    name="recommend",
    short_help="What would converting a tree of pictures bring?",
    epilog=EPILOG,
)
@click.argument("src", type=LocationType(source_path))
@combine_options("trial_options", dict, _TRIAL_OPTIONS)
@click.option(
    "--format",
    "formats",
    help=f"all, or some of: {', '.join(FORMATS)}.  [default: {', '.join(_QUICK_FORMATS)}]",
)
@click.option("--thorough", is_flag=True, help="Measure longer, and every format.")
@click.option(
    "--stored-size", type=int, help="Most of the stored shorter side, pixels.  [default: twice --size]"
)
@combine_options("changes", _parse_what_if, _WHAT_IF_OPTIONS)
@output_options
@debug_option
def command(
    src: Path,
    thorough: bool,
    formats: str | None,
    stored_size: int | None,
    changes: dict[str, Any],
    trial_options: dict[str, Any],
    output: Output,
) -> None:
    """Predict what converting would bring: what gains over ImageFolder and DataLoader for the tree SRC?

    \b
    bench recommend photos
    bench recommend photos --trainer-rate 2500

    A sample of the pictures is converted and loaded for real, in about half a minute; --thorough takes
    minutes. Sizes, times and rates of the whole tree are computed from that and from what the disk gives.
    --gpus, --accelerator, --workers and --disk-mbps change what they are computed for. The answer ends with
    the commands that convert, and that measure what it brought.
    """
    size = trial_options["size"]
    names = tuple(FORMATS) if thorough and formats is None else _choose_formats(formats)
    stored_size = stored_size or default_stored_size(size)
    if size > stored_size:
        raise SettingError(f"size must be at most the stored size {stored_size}, got {size}")
    scan = scan_tree(src)
    question = Question(
        scan=scan,
        recipe=Recipe(format=names[0], size=stored_size),
        settings=_make_settings(trial_options, train_images(scan), _THOROUGH_S if thorough else _QUICK_S),
        formats=names,
        **({} if thorough else _QUICK),
    )
    folders = {name: str(_free_folder(scan, name)) for name in names}
    with output.progress("recommend", "turn") as bar:
        result = recommend(question, output.json_path, bar, changes, folders)
    if not thorough:
        longer = "A quick estimate: --thorough measures longer."
        result = replace(result, conditions=(*result.conditions, longer))
    output.finish(result)


def _choose_formats(text: str | None) -> tuple[str, ...]:
    """Return the formats that `--format` names, 'all' for all of them; SettingError for an unknown one."""
    names = tuple(FORMATS) if text == "all" else tuple(split_names(text or "")) or _QUICK_FORMATS
    for name in names:
        check_choice("format", name, FORMATS)
    return names


def _make_settings(trial_options: Mapping[str, Any], max_batch_size: int, seconds: float) -> Settings:
    """Return the Settings of trials of at least `seconds` each, from the values of _TRIAL_OPTIONS.

    Without `--batch-size` a batch has at most `max_batch_size` samples.
    """
    values: dict[str, Any] = {"batch_size": max(1, min(_BATCH_SIZE, max_batch_size)), "seconds": seconds}
    for name, value in trial_options.items():
        if value is not None:
            values[name] = value
    return make_settings(**values)


def _free_folder(scan: Scan, name: str) -> Path:
    """Return a folder that does not exist yet, for the tree converted to the format `name`."""
    for folder in (DATA / name, DATA / f"{name}-{scan.root.name}"):
        if not folder.exists():
            return folder
    return DATA / f"{name}-new"
