"""Command `bench convert`: times each stage of a conversion, and whole conversions beside other writers."""

import sys
import tempfile
from pathlib import Path

import click

from bench.commands.options import PATH, split_names
from bench.commands.output import Output, output_options
from bench.measure.conversion import ConversionSpec, measure
from bench.peers.libraries import WRITERS
from precache.cli import commandline
from precache.cli.commandline import combine_options
from precache.engines import worker_count
from precache.pictures.images import FITS
from precache.recipe import DEFAULT_QUALITY, DEFAULT_SIZE, FORMAT_NAMES, Recipe

DATA = Path("data")
_RECIPE_OPTIONS = {
    "format": click.option(
        "--format", default="shards", show_default=True, help=f"What to write: {', '.join(FORMAT_NAMES)}."
    ),
    "size": click.option(
        "--size",
        default=DEFAULT_SIZE,
        show_default=True,
        help="Maximum shorter side in pixels; with --fit crop, the side of a square.",
    ),
    "fit": click.option(
        "--fit", default="keep", show_default=True, help=f"How pictures get that size: {', '.join(FITS)}."
    ),
    "quality": click.option(
        "--quality", default=DEFAULT_QUALITY, show_default=True, help="JPEG quality, in webdataset and dali."
    ),
    "decode": click.option(
        "--decode",
        default="full",
        show_default=True,
        help="How JPEGs are decoded: full, or scaled, which is faster and less exact.",
    ),
}


@click.command(name="convert", cls=commandline.Command)
@click.argument("src", type=PATH, default=DATA / "raw")
@combine_options("recipe", Recipe, _RECIPE_OPTIONS)
@click.option("--workers", type=int, help="Processes of each writer.  [default: one per CPU]")
@click.option("--pictures", default=1000, show_default=True, help="Pictures that the stages are timed on.")
@click.option("--repeats", default=5, show_default=True, help="Repeats of each measurement, taking turns.")
@click.option("--against", default="", help=f"Compare with some of: {', '.join(WRITERS)}.")
@click.option(
    "--peer-python",
    default=sys.executable,
    help="Python that has the packages of --against.  [default: this one]",
)
@click.option(
    "--scratch",
    type=PATH,
    default=Path(tempfile.gettempdir()),
    help="Folder to convert into, for as long as it takes.  [default: the temporary folder]",
)
@output_options
def command(
    src: Path,
    recipe: Recipe,
    workers: int | None,
    pictures: int,
    repeats: int,
    against: str,
    peer_python: str,
    scratch: Path,
    output: Output,
) -> None:
    """Time each stage of converting the tree SRC (default: data/raw).

    \b
    bench convert photos
    bench convert photos --fit crop --against ffcv,litdata,mds

    The answer names the stage that takes most of a worker's time, and says how near whole conversions come
    to the limit that decoding sets. Other libraries' writers (--against) convert the same pictures, taking
    turns.
    """
    spec = ConversionSpec(
        source=src,
        recipe=recipe,
        processes=worker_count(workers, least=1),
        stage_images=pictures,
        repeats=repeats,
        against=split_names(against),
        peer_python=peer_python,
        scratch=scratch,
    )
    with output.progress("bench", "run") as on_progress:
        result = measure(spec, output.json_path, on_progress)
    output.finish(result)
