"""`bench accuracy`: the same model trained from several sources of the same pictures; is one worse?"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from bench.commands.options import PATH, option
from bench.machine.device import choose_device, resolve_amp
from bench.machine.hardware import describe_machine
from bench.measure import splits, validation
from bench.measure.settings import check_fills_batch
from bench.measure.training import MODELS, Recipe
from bench.measure.training_sources import find_pictures, opener, parse_arm
from bench.measure.trainings import Source, Task, check_opens, run
from bench.measure.trainings_file import Line, Trainings
from bench.report import accuracy as findings
from bench.report import accuracy_page as page
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, gathered, write_json
from precache.console.page import write as write_page
from precache.errors import SettingError
from precache.executors import worker_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The recipe, and what it runs on."""

    recipe: Recipe
    device: torch.device
    workers: int


def _settings(*, device: str, workers: int | None, amp: str, **recipe: Any) -> Settings:
    chosen = choose_device(device)
    return Settings(
        recipe=Recipe(amp=resolve_amp(amp, chosen), **recipe), device=chosen, workers=worker_count(workers)
    )


_RECIPE = {
    "model": click.option(
        "--model", default="resnet10", show_default=True, help=f"One of: {', '.join(MODELS)}."
    ),
    "size": option("size", {"default": 64}),
    "epochs": click.option("--epochs", default=40, show_default=True, help="Of each training."),
    "batch_size": option("batch_size"),
    "lr": click.option("--lr", default=0.2, show_default=True, help="Highest learning rate."),
    "amp": option("amp"),
    "workers": option("workers"),
    "device": option("device"),
}


@click.command(name="accuracy", cls=commandline.Command)
@click.argument("raw", type=PATH)
@click.argument("arms", nargs=-1, metavar="ARM...")
@click.option("--write-splits", type=PATH, help="Write a list for 'precache convert --splits' here, and end.")
@click.option("--per-class", default=30, show_default=True, help="Of that list: pictures that train.")
@click.option("--baseline", default="imagefolder", show_default=True, help="Candidate to compare with.")
@gathered("settings", _settings, _RECIPE)
@click.option(
    "--seeds", default="5", show_default=True, help="How many trainings of each arm; or 3-4, these."
)
@click.option("--margin", default=1.0, show_default=True, help="Points of top-1 that do not matter.")
@click.option(
    "--out", type=PATH, default=Path("accuracy"), show_default=True, help="Folder of finished trainings."
)
@option("json_path")
@option("html_path")
def command(
    raw: Path,
    arms: tuple[str, ...],
    write_splits: Path | None,
    per_class: int,
    baseline: str,
    settings: Settings,
    seeds: str,
    margin: float,
    out: Path,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Train the same model from RAW as torchvision does it, and from each ARM: is that worse?

    An ARM is a folder that was converted with --splits, or NAME=BACKEND:FOLDER, such as
    crop=shards:data/crop; or a backend that reads the pictures of RAW themselves, such as dali. With
    ,augment=cpu or ,augment=device behind it, pictures are cropped there. All train with the pictures of
    the split train, as many steps, from the same weights; all are tried on those of the split val in RAW.
    Finished trainings, and epochs of unfinished ones, are kept in --out: the same command goes on.
    """
    for path in (write_splits, json_path, html_path):
        check_output(path)
    if write_splits is not None:
        train, val = splits.write(write_splits, raw, per_class)
        click.echo(f"wrote {write_splits}: {train:,} pictures train, {val:,} validate")
        return
    if not arms:
        raise click.UsageError("name at least one ARM, such as crop=shards:data/shards")
    if not 0 < margin < math.inf:
        raise SettingError(f"margin must be positive, got {margin}")
    lines = _train(raw, [baseline, *arms], settings, parse_seeds(seeds), out)
    silent = json_path == STDOUT
    if not silent:
        page.show(lines, margin)
    if json_path is not None:
        compared = [_finite(asdict(found)) for found in findings.compare(lines, margin)]
        write_json(json_path, {"compared": compared, "margin": margin, "trainings": lines}, quiet=silent)
    if html_path is not None:
        write_page(html_path, page.html(lines, margin))
        if not silent:
            click.echo(f"the page: {html_path}")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in values.items()
    }


def parse_seeds(text: str) -> range:
    """`5` to the seeds 0 to 4, `3-4` to these; SettingError if it is something else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text.strip())
    if match:
        seeds = range(int(match[2])) if match[1] is None else range(int(match[1]), int(match[2]) + 1)
    if not match or not seeds:
        raise SettingError(f"seeds must be how many, as 5, or the first and the last, as 0-4; got {text!r}")
    return seeds


def _train(raw: Path, asked: Sequence[str], settings: Settings, seeds: range, out: Path) -> list[Line]:
    """What `--out` holds of these trainings once all are finished."""
    recipe, device, workers = settings.recipe, settings.device, settings.workers
    arms, pictures = find_pictures(raw, [parse_arm(text, raw) for text in asked])
    check_fills_batch(recipe.batch_size, len(pictures.train))
    how = {"batch_size": recipe.batch_size, "size": recipe.size, "workers": workers, "device": device}
    sources = [Source(arm.name, opener(arm, pictures, **how), arm.told) for arm in arms]  # type: ignore[arg-type]
    where = {"workers": workers, "device": str(device), "threads": torch.get_num_threads()}
    conditions = {**recipe.written, **where, "pictures": pictures.digest}
    machine = describe_machine(device)
    out.mkdir(parents=True, exist_ok=True)
    done = Trainings(out / "trainings.jsonl")
    for source in sources:
        done.check(source.name, {"conditions": conditions, "source": source.told, "machine": machine})
    check_opens(sources, seeds, done)
    task = Task(
        recipe=recipe,
        classes=len(pictures.tree.classes),
        images=validation.load(pictures.files(pictures.val), recipe.size, out, workers),
        labels=pictures.labels(pictures.val),
        batches=len(pictures.train) // recipe.batch_size,
        device=device,
        conditions=conditions,
        machine=machine,
        folder=out,
    )
    with ProgressBar("accuracy", "epoch") as bar:
        run(task, sources, seeds, done, bar)
    return [done.done[source.name, seed] for source in sources for seed in seeds]
