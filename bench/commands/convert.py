"""`bench convert`: what a conversion spends its time on."""

import sys
import tempfile
from pathlib import Path

import click

from bench.commands.options import PATH, names_of, option
from bench.measure import conversion
from bench.peers.writing import WRITERS
from bench.report import conversion_table as pages
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, gathered, write_json
from precache.executors import worker_count
from precache.recipe import DEFAULT_SIZE, Recipe

DATA = Path("data")
_RECIPE = {
    "format": click.option("--format", default="shards", show_default=True, help="As of precache convert."),
    "size": option("size", {"default": DEFAULT_SIZE, "help": "As of precache convert."}),
    "fit": click.option("--fit", default="keep", show_default=True, help="As of precache convert."),
    "quality": click.option(
        "--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali)."
    ),
    "decode": click.option("--decode", default="full", show_default=True, help="full or scaled."),
}


@click.command(name="convert", cls=commandline.Command)
@click.argument("src", type=PATH, default=DATA / "raw")
@gathered("recipe", Recipe, _RECIPE)
@click.option("--workers", type=int, help="Processes of each writer.  [default: one per CPU]")
@click.option("--pictures", default=1000, show_default=True, help="Pictures that the stages are timed on.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each kind, taking turns.")
@click.option("--against", default="", help=f"Compare with some of: {', '.join(sorted(WRITERS))}.")
@click.option("--peer-python", default=sys.executable, help="The Python that has them.  [default: this one]")
@click.option("--scratch", type=PATH, default=Path(tempfile.gettempdir()), help="Folder to convert into.")
@option("json_path")
def command(
    src: Path,
    recipe: Recipe,
    workers: int | None,
    pictures: int,
    repeats: int,
    against: str,
    peer_python: str,
    scratch: Path,
    json_path: Path | None,
) -> None:
    """Say what takes the time when the tree SRC (default data/raw) is converted."""
    check_output(json_path)
    spec = conversion.ConversionSpec(
        recipe=recipe,
        workers=worker_count(workers, least=1),
        pictures=pictures,
        repeats=repeats,
        against=tuple(names_of(against)),
        peer_python=peer_python,
        scratch=scratch,
    )
    with ProgressBar("bench", "run") as bar:
        result = conversion.measure(src, spec, bar)
    if json_path != STDOUT:
        pages.show(result)
    if json_path is not None:
        write_json(json_path, result.to_json())
