"""Command `bench quickstart`: makes photographs, converts them, compares loaders and writes the report."""

import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click

from bench.commands.options import price_option, run_options
from bench.commands.output import Output
from bench.measure.candidates import choose_candidates
from bench.measure.comparison import Comparison, compare
from bench.measure.settings import Settings
from bench.measure.trainers import DEFAULT_PRESET, PRESETS
from bench.report.forecast import stored_size
from precache.cli.commandline import debug_option
from precache.cli.terminal import ProgressBar
from precache.conversion.convert import convert
from precache.errors import SettingError
from precache.example_data.sample_tree import make_sample
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from precache.storage import atomic_write
from precache.storage.stored_json import decode, encode
from precache.storage.urls import Location

QUICKSTART = Path("data/quickstart")
_LOADERS = ("imagefolder", "pytorch", "shards", "webdataset", "dali")
_FORMATS = ("shards", "webdataset", "dali")
_TIMES = "conversions.json"
"""File beside the data that keeps the seconds of each conversion for later calls, which find it done."""


@click.command(name="quickstart", short_help="Try the whole path on generated photographs.")
@click.option("--images", default=768, show_default=True, help="Photographs of the sample tree.")
@run_options(
    "trainer_rate", "launches", "batches", "repeats", batches={"default": 12}, repeats={"default": 2}
)
@price_option
@debug_option
def command(images: int, settings: Settings, gpu_price: float | None) -> None:
    """Try the whole path on generated photographs, in data/quickstart: sample, convert, compare, report.

    Ends with what people have today does, and what another loader and converting gain over it. Takes about
    two minutes on 2 CPUs.

    Without a GPU the trainer is emulated, at the rate that an H100 has in MLPerf Training with MXNet. PyTorch
    without that tuning is slower: --trainer-rate takes the images/s of your own training.
    """
    on_gpu = settings.device.type == "cuda"
    settings = replace(
        settings,
        trainer="emulated" if settings.trainer == "none" else settings.trainer,
        batch_size=min(settings.batch_size, images),
        augment="train",  # random crops, as trainings have them
        cold=hasattr(os, "posix_fadvise"),
    )
    _make_sample(QUICKSTART / "raw", images)
    has_dali = find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None
    missing = set() if has_dali else {"dali"}
    convert_s = _convert([name for name in _FORMATS if name not in missing], settings.size)
    backends = [name for name in _LOADERS if name not in missing]
    trainers = [settings.trainer]
    if on_gpu and settings.trainer == "emulated":
        trainers.append("resnet50")
    result_path = QUICKSTART / "result.json"
    result_path.unlink(missing_ok=True)  # each call measures anew
    output = Output(json_path=result_path, html_path=QUICKSTART / "report.html")
    with output.progress("bench", "run") as on_progress:
        comparison = Comparison(
            candidates=choose_candidates((), backends, QUICKSTART),
            settings=settings,
            trainers=trainers,
            convert_s=convert_s,
        )
        result = compare(comparison, result_path, on_progress, gpu_price)
    output.finish(result)
    if f"emulated:{DEFAULT_PRESET}" in result.settings["trainers"]:
        citation = PRESETS[DEFAULT_PRESET].citation
        click.echo(f"emulated:{DEFAULT_PRESET} is {citation}. PyTorch without that tuning is slower:")
        click.echo("'bench quickstart --trainer-rate IMAGES_PER_S' measures with that of your own training.")


def _make_sample(raw: Path, images: int) -> None:
    """Make the tree unless it is there; SettingError where it has another number of pictures."""
    if not raw.exists():
        with ProgressBar("sample", "image") as bar:
            make_sample(raw, images=images, on_progress=bar)
        return
    count = len(scan_tree(raw).samples)
    if count != images:
        raise SettingError(
            f"has {count:,} pictures, --images asks for {images:,}",
            path=raw,
            remedy=f"remove {QUICKSTART}",
        )


def _convert(formats: list[str], size: int) -> dict[Location, float]:
    """Convert to each format, for training at `size` pixels.

    Returns:
        Seconds that each conversion took, by its folder. The seconds of a conversion by an earlier call are
        read from the file `_TIMES`; a conversion that an earlier call began has none.
    """
    times = QUICKSTART / _TIMES
    seconds: dict[str, float] = {}
    if times.exists():
        seconds = decode(times.read_bytes(), dict[str, float], path=times, remedy="remove it")
    for name in formats:
        path = QUICKSTART / name
        is_new = not path.exists()
        if is_new:
            seconds.pop(name, None)
        start_s = time.perf_counter()
        with ProgressBar(f"convert to {name}", "image") as bar:
            convert(QUICKSTART / "raw", path, Recipe(format=name, size=stored_size(size)), on_progress=bar)
        if is_new:
            seconds[name] = time.perf_counter() - start_s
        with atomic_write(times) as file:
            file.write(encode(seconds))
    return {QUICKSTART / name: seconds[name] for name in formats if name in seconds}
