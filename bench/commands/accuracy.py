"""Command `bench accuracy`: trains one model from several sources of the same pictures, and compares them."""

import math
import re
from pathlib import Path
from typing import Any

import click

from bench.commands.options import PATH, option
from bench.commands.output import Output, output_options
from bench.machine.hardware import resolve_amp
from bench.measure.accuracy import (
    TrainingRecipe,
    compare_sources,
    find_pictures,
    open_source,
    write_splits,
)
from loaders.device import find_device
from loaders.examples.models import MODELS
from precache.cli import commandline
from precache.cli.commandline import check_output, combine_options
from precache.engines import worker_count
from precache.errors import SettingError, check_choice


def _make_recipe(
    *, model: str, lr: float | None, device: str, workers: int | None, amp: str, **others: Any
) -> TrainingRecipe:
    """Return the recipe that the options below mean; SettingError for a value that cannot be."""
    check_choice("model", model, MODELS)
    torch_device = find_device(device)
    return TrainingRecipe(
        model=model,
        lr=MODELS[model].lr if lr is None else lr,
        device=torch_device,
        workers=worker_count(workers),
        amp=resolve_amp(amp, torch_device),
        **others,
    )


_RECIPE_OPTIONS = {
    "model": click.option(
        "--model", default="resnet10", show_default=True, help=f"Model to train, one of: {', '.join(MODELS)}."
    ),
    "size": option("size", {"default": 64}),
    "epochs": click.option("--epochs", default=40, show_default=True, help="Epochs of each training."),
    "batch_size": option("batch_size"),
    "lr": click.option("--lr", type=float, help="Highest learning rate.  [default: the model's]"),
    "amp": option("amp"),
    "workers": option("workers"),
    "device": option("device"),
}


@click.command(name="accuracy", cls=commandline.Command)
@click.argument("raw", type=PATH)
@click.argument("others", nargs=-1, metavar="SOURCE...")
@click.option(
    "--write-splits", "split_list", type=PATH, help="Write a list for 'precache convert --splits' instead."
)
@click.option(
    "--per-class", default=30, show_default=True, help="Pictures of each class that train, in that list."
)
@click.option(
    "--baseline", default="imagefolder", show_default=True, help="Source that the others are compared with."
)
@combine_options("recipe", _make_recipe, _RECIPE_OPTIONS)
@click.option(
    "--seeds", default="5", show_default=True, help="Trainings of each source: how many, or which, as in 3-4."
)
@click.option(
    "--margin", default=1.0, show_default=True, help="Difference in points of top-1 that does not matter."
)
@output_options
def command(
    raw: Path,
    others: tuple[str, ...],
    split_list: Path | None,
    per_class: int,
    baseline: str,
    recipe: TrainingRecipe,
    seeds: str,
    margin: float,
    output: Output,
) -> None:
    """Train the same model from RAW as torchvision does it, and from each SOURCE: is that worse?

    \b
    bench accuracy photos data/shards --json accuracy.json --html accuracy.html
    bench accuracy photos dali crop=shards:data/crop --seeds 3

    A SOURCE is a folder that was converted with --splits, or NAME=BACKEND:FOLDER, such as
    crop=shards:data/crop; or a backend that reads the pictures of RAW themselves, such as dali. With
    ,augment=cpu or ,augment=device behind it, pictures are cropped there. All train with the pictures of
    the split train, as many steps, from the same weights; all are tried on those of the split val in RAW.
    Finished trainings are kept in --json FILE, and epochs of an unfinished one beside it: the same
    command goes on.
    """
    if split_list is not None:
        check_output(split_list)
        train, val = write_splits(split_list, raw, per_class)
        click.echo(f"wrote {split_list}: {train:,} pictures train, {val:,} validate")
        return
    if not others:
        raise click.UsageError("name at least one SOURCE, such as crop=shards:data/shards")
    if not 0 < margin < math.inf:
        raise SettingError(f"margin must be positive, got {margin}")
    chosen_seeds = parse_seeds(seeds)
    sources = [open_source(text, raw) for text in (baseline, *others)]
    pictures = find_pictures(raw, sources)
    with output.progress("accuracy", "epoch") as on_progress:
        result = compare_sources(
            sources, pictures, recipe, chosen_seeds, output.json_path, on_progress, margin
        )
    output.finish(result)


def parse_seeds(text: str) -> range:
    """Return the seeds 0 to 4 for `5`, the seeds 3 and 4 for `3-4`.

    Raises:
        SettingError: `text` has another form, or means no seed.
    """
    seeds = range(0)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text.strip())
    if match and match[1] is None:
        seeds = range(int(match[2]))
    elif match:
        seeds = range(int(match[1]), int(match[2]) + 1)
    if not seeds:
        raise SettingError(f"seeds must be how many, as 5, or the first and the last, as 0-4; got {text!r}")
    return seeds
