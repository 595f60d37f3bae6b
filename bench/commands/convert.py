"""`bench convert`: what a conversion spends its time on."""

import sys
import tempfile
from pathlib import Path

import click

from bench.commands.options import PATH, names_of, option
from bench.measure.conversion import OURS, ConversionResult, measure
from bench.peers.writing import WRITERS
from bench.report.table import Table
from bench.report.words import counted, machine_line, say
from precache.cli import commandline
from precache.cli.commandline import STDOUT, ProgressBar, check_output, gathered, human_bytes, write_json
from precache.engines import worker_count
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
_REMEDIES = {
    "decode": ": for large photographs, --decode scaled decodes less",
    "encode": ": --format shards does not encode",
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
    with ProgressBar("bench", "run") as bar:
        result = measure(
            src,
            recipe,
            workers=worker_count(workers, least=1),
            pictures=pictures,
            repeats=repeats,
            against=names_of(against),
            peer_python=peer_python,
            scratch=scratch,
            on_progress=bar,
        )
    if json_path != STDOUT:
        show(result)
    if json_path is not None:
        write_json(json_path, result.to_json())


def show(result: ConversionResult) -> None:
    """Print what takes the time, the tables, and under which conditions the figures hold."""
    settings, shares, ours = result.settings, result.shares, result.wholes[0].images_per_s
    say(answer(result))
    rows = [[name, f"{stage:,.0f}", f"{shares[name]:.0%}"] for name, stage in result.stages.items()]
    click.echo()
    Table(("stage", "images/s per CPU", "share of the time"), rows).show()
    rows = [
        [whole.name, f"{whole.images_per_s:,.0f}", "-" if whole.name == OURS else f"{whole.ratio:.2f}"]
        for whole in result.wholes
    ]
    click.echo()
    Table(("whole conversion", "images/s", "precache: times as many"), rows).show()
    decoding, together = result.limit("decode"), result.limit(*result.stages)
    click.echo()
    say(
        f"That is {ours.median / decoding:.0%} of what decoding alone would reach on "
        f"{counted(settings['workers'], 'CPU')} ({decoding:,.0f}), and {ours.median / together:.0%} of what "
        f"the stages would reach with nothing else to do ({together:,.0f})."
    )
    parts = [
        f"{settings['source']}: {settings['images']:,} pictures, {human_bytes(settings['source_bytes'])}",
        f"{Recipe(**settings['recipe']).to_flags()}, {counted(settings['workers'], 'worker')}, page cache "
        f"{settings['page_cache']}",
        f"median of {counted(settings['repeats'], 'run')}, taking turns, and their range",
        *settings["peers"].values(),
        machine_line(result.machine, ("pillow", "simplejpeg", "python")),
    ]
    say(f"{'; '.join(parts)}.")


def answer(result: ConversionResult) -> str:
    """How fast it is, and what takes the time."""
    shares = result.shares
    stage = max(shares, key=lambda name: shares[name])
    remedy = _REMEDIES.get(stage, "")
    if stage == "resize" and result.machine["pillow_flavour"] == "pillow":
        remedy = ": Pillow-SIMD resizes faster ('precache doctor' prints how to install it)"
    return (
        f"Converting reaches {result.wholes[0].images_per_s.median:,.0f} images/s, start-up included. "
        f"{stage.capitalize()} takes {shares[stage]:.0%} of the stages' time{remedy}."
    )
