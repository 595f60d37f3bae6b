"""`bench loaders`: backends, and other libraries' loaders, fed to a trainer and against one another."""

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from bench.commands.options import PATH, PLACE, names_of, option, run_options, showing_options
from bench.measure.candidates import CHOICES as BACKENDS
from bench.measure.candidates import choose_candidates
from bench.measure.comparison import compare
from bench.measure.peers import choose_peers, limits
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG
from bench.peers.libraries import PEERS
from bench.report import loaders_page
from bench.report.result import Showing, show
from bench.report.row import Result
from precache.cli import commandline
from precache.cli.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.errors import SettingError
from precache.page import write as write_page
from precache.recipe import FORMAT_NAMES
from precache.reporting import tells, unseen
from precache.storage.urls import Location

DATA = Path("data")


@click.command(
    name="loaders",
    cls=commandline.Command,
    first=("backend", "trainer", "trainer_rate", "batch_size", "workers", "augment", "cold", "html_path"),
    short_help="Does the GPU wait, and with which loader?",
    epilog=EPILOG,
)
@click.argument("data", type=PLACE, nargs=-1)
@click.option("--backend", default="all", show_default=True, help=f"all, or some of: {', '.join(BACKENDS)}.")
@run_options(
    *("trainer", "trainer_rate", "batch_size", "workers", "size", "augment", "cold", "repeats", "batches"),
    *("warmup", "device", "amp", "compiled", "cache", "shuffle"),
    workers={"help": "Processes or threads of each loader.  [default: one per CPU]"},
    repeats={"default": 5},
)
@click.option("--against", default="", help=f"Compare with some of: {', '.join(PEERS)}.")
@click.option("--peer-python", default=sys.executable, help="The Python that has them.  [default: this one]")
@click.option("--peer-data", type=PATH, default=DATA / "peers", show_default=True, help="Their data.")
@option("json_path")
@option("html_path")
@showing_options
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for --json FILE and --html FILE.")
def command(
    data: tuple[Location, ...],
    backend: str,
    settings: Settings,
    against: str,
    peer_python: str,
    peer_data: Path,
    json_path: Path | None,
    html_path: Path | None,
    showing: Showing,
    quiet: bool,
) -> None:
    """Does the GPU wait? Compare loaders over the folders DATA (default: data/raw, data/shards, ...).

    \b
    bench loaders photos --backend imagefolder,pytorch
    bench loaders photos data/shards --augment train --html report.html

    For each: images/s of the loader alone, of the trainer alone on a batch that stays on the
    device, and of both together, each time in a process of its own; the bottleneck, and what
    would fix it. Other libraries' loaders (--against) run alone, each in a process
    of its own; what they read is written to --peer-data once.
    """
    for path in (json_path, html_path):  # now, not after minutes of measuring
        check_output(path)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    candidates = choose_candidates(data, names_of(backend) or [backend], DATA)
    paths = list(data) or [path for name in ("raw", *FORMAT_NAMES) if (path := DATA / name).exists()]
    if against and settings.device.type != "cpu":
        raise SettingError("peers deliver to main memory; compare with --against on --device cpu")
    folders = [path for path in paths if isinstance(path, Path)]  # peers read no URL of ours
    peers = choose_peers(names_of(against), folders, settings.size, peer_python, peer_data)
    of_shards = (one.path for one in candidates if one.backend == "shards")
    peers += limits([path for path in of_shards if isinstance(path, Path)])
    peers = list({(peer.name, peer.path): peer for peer in peers}.values())
    with tells(nothing_written), nullcontext() if quiet else ProgressBar("bench", "run") as bar:
        result = compare(candidates, settings, bar or unseen, peers)
    silent = quiet or json_path == STDOUT
    if not silent:
        show(result, showing, asked=names_of(backend), has_page=html_path is not None)
    if json_path is not None:
        write_json(json_path, result.to_json(), quiet=silent)
    write_report(result, showing, html_path, quiet=silent)


def nothing_written() -> str:
    """For `tells`: a result needs all runs."""
    return " before all runs were done; nothing was written: a result needs all of them"


def write_report(
    result: Result,
    showing: Showing,
    html_path: Path | None,
    *,
    quiet: bool = False,
) -> None:
    """Write the page that was asked for; unless `quiet`, say so."""
    if html_path is not None:
        write_page(html_path, loaders_page.html(result, showing.gpu_price))
        if not quiet:
            click.echo(f"the page: {html_path}")
