"""`bench quickstart`: the whole path on generated pictures."""

from pathlib import Path

import click

from bench.pages.terminal import show, write
from bench.trial.comparison import BenchSpec, choose_arms, compare
from bench.trial.device import choose_device, choose_warmup
from precache import commandline
from precache.commandline import ProgressBar
from precache.convert import convert
from precache.errors import SettingError
from precache.executors import available_cpus
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sample_tree import make_sample
from precache.source import scan_tree

QUICKSTART = Path("data/quickstart")


@click.command(name="quickstart", cls=commandline.Command)
@click.option("--images", default=2048, show_default=True, help="Pictures of the sample tree.")
@click.option("--batches", default=32, show_default=True, help="Timed batches of each run.")
@click.option("--repeats", default=2, show_default=True, help="Runs of each kind, interleaved.")
def command(images: int, batches: int, repeats: int) -> None:
    """The whole path on a generated tree, in data/quickstart: sample, convert, compare, report."""
    device = choose_device("auto")
    spec = BenchSpec(
        trainers=("emulated", "resnet50") if device.type == "cuda" else ("emulated",),
        batch_size=min(64, images),
        workers=available_cpus(),
        size=224,
        warmup=choose_warmup(None, device),
        batches=batches,
        repeats=repeats,
        device=device,
    )
    raw = QUICKSTART / "raw"
    if raw.exists():
        found = len(scan_tree(raw).samples)
        if found != images:
            raise SettingError(
                f"{raw}: has {found:,} pictures, --images asks for {images:,}; remove {QUICKSTART}"
            )
    else:
        with ProgressBar("sample", "image") as bar:
            make_sample(raw, images=images, like="caltech", on_progress=bar)
    for name in FORMAT_NAMES:
        with ProgressBar(f"convert to {name}", "image") as bar:
            convert(raw, QUICKSTART / name, Recipe(format=name), on_progress=bar)
    with ProgressBar("bench", "run") as bar:
        result = compare(choose_arms((), ["all"], QUICKSTART), spec, bar)
    show(result, as_markdown=False)
    write(result, QUICKSTART / "result.json", QUICKSTART / "report.html")
