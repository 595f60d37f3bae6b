"""`bench convert`: what a conversion spends its time on."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from bench.options import names_of
from bench.pages import conversion as pages
from bench.peers.writing import WRITERS
from bench.trial import conversion
from precache import commandline
from precache.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.executors import worker_count
from precache.recipe import Recipe

DATA = Path("data")
_PATH = click.Path(path_type=Path)


@click.command(name="convert", cls=commandline.Command)
@click.argument("src", type=_PATH, default=DATA / "raw")
@click.option("--format", "format_name", default="shards", show_default=True, help="As of precache convert.")
@click.option("--size", default=256, show_default=True, help="Side of the stored square, pixels.")
@click.option("--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali).")
@click.option("--decode", default="full", show_default=True, help="full or scaled.")
@click.option("--passthrough", is_flag=True, help="Keep the bytes of JPEGs that have the size.")
@click.option("--workers", type=int, help="Processes of each writer.  [default: one per CPU]")
@click.option("--pictures", default=1000, show_default=True, help="Pictures that the stages are timed on.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each kind, taking turns.")
@click.option("--against", default="", help=f"Compare with some of: {', '.join(sorted(WRITERS))}.")
@click.option("--peer-python", default=sys.executable, help="The Python that has them.  [default: this one]")
@click.option("--scratch", type=_PATH, default=Path(tempfile.gettempdir()), help="Folder to convert into.")
@click.option("--json", "json_path", type=_PATH, help="Write the result here; '-' prints it alone.")
def command(
    src: Path,
    format_name: str,
    workers: int | None,
    pictures: int,
    repeats: int,
    against: str,
    peer_python: str,
    scratch: Path,
    json_path: Path | None,
    **settings: Any,
) -> None:
    """Say what takes the time when the tree SRC (default data/raw) is converted."""
    check_output(json_path)
    spec = conversion.ConversionSpec(
        recipe=Recipe(format=format_name, **settings),
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
        click.echo(pages.text(result))
    if json_path is not None:
        write_json(json_path, result.to_json())
