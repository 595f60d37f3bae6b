"""`bench loaders`: backends, and other libraries' loaders, fed to a trainer and against one another."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from bench.machine.precision import AMP_HELP
from bench.options import names_of
from bench.pages.terminal import Showing, all_or_nothing, show, showing_options, tensorboard_option, write
from bench.peers.serving import PEERS
from bench.trial.arm import CHOICES as BACKENDS
from bench.trial.arm import choose_arms
from bench.trial.comparison import BenchSpec, compare
from bench.trial.device import WARMUP_HELP, choose_device, choose_warmup
from bench.trial.peer_arm import choose_peers, limits
from bench.trial.presets import EPILOG
from bench.trial.trainers import CHOICES
from precache import commandline
from precache.commandline import STDOUT, ProgressBar, check_output
from precache.errors import SettingError
from precache.executors import worker_count
from precache.recipe import FORMAT_NAMES

DATA = Path("data")
_PATH = click.Path(path_type=Path)


@click.command(name="loaders", cls=commandline.Command, epilog=EPILOG)
@click.argument("data", type=_PATH, nargs=-1)
@click.option("--backend", default="all", show_default=True, help=f"all, or some of: {', '.join(BACKENDS)}.")
@click.option("--trainer", default="auto", show_default=True, help=f"One of: {CHOICES}.")
@click.option("--amp", default="auto", show_default=True, help=AMP_HELP)
@click.option("--compile", "compiled", is_flag=True, help="Compile the model with torch.compile.")
@click.option("--cache", default="none", show_default=True, help="none, ram or device, of loaders.build.")
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--workers", type=int, help="Processes or threads of each loader.  [default: one per CPU]")
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
@click.option("--batches", default=40, show_default=True, help="Timed batches of each run.")
@click.option("--warmup", type=int, help=WARMUP_HELP)
@click.option("--repeats", default=5, show_default=True, help="Runs of each kind, interleaved.")
@click.option("--cold", is_flag=True, help="Measure each loader with a cold page cache, too.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--augment", default="eval", show_default=True, help="eval, train or crop, of loaders.build.")
@click.option("--shuffle", default="auto", show_default=True, help="auto, full, window or none.")
@click.option("--against", default="", help=f"Compare with some of: {', '.join(PEERS)}.")
@click.option("--peer-python", default=sys.executable, help="The Python that has them.  [default: this one]")
@click.option("--peer-data", type=_PATH, default=DATA / "peers", show_default=True, help="Their data.")
@click.option("--json", "json_path", type=_PATH, help="Write the result here; '-' prints it alone.")
@click.option("--html", "html_path", type=_PATH, help="Write the report here.")
@tensorboard_option
@showing_options
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for --json FILE and --html FILE.")
def command(
    data: tuple[Path, ...],
    backend: str,
    trainer: str,
    workers: int | None,
    warmup: int | None,
    device: str,
    against: str,
    peer_python: str,
    peer_data: Path,
    json_path: Path | None,
    html_path: Path | None,
    **settings: Any,
) -> None:
    """Compare backends over the folders DATA (default: data/raw, data/shards, ...).

    For each: images/s of the loader alone, of the trainer alone on a batch that stays on the
    device, and of both together, each time in a process of its own; the bottleneck, and what
    would fix it. Other libraries' loaders (--against) run alone, each in a process
    of its own; what they read is written to --peer-data once.
    """
    showing = Showing(**{name: settings.pop(name) for name in ("markdown", "details", "gpu_price")})
    quiet = settings.pop("quiet")
    chosen = choose_device(device)
    spec = BenchSpec(
        trainers=(trainer,),
        workers=worker_count(workers),
        warmup=choose_warmup(warmup, chosen),
        device=chosen,
        **settings,
    )
    for path in (json_path, html_path):  # now, not after minutes of measuring
        check_output(path)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    arms = choose_arms(data, names_of(backend) or [backend], DATA)
    paths = list(data) or [path for name in ("raw", *FORMAT_NAMES) if (path := DATA / name).exists()]
    if against and spec.device.type != "cpu":
        raise SettingError("peers deliver to main memory; compare with --against on --device cpu")
    peers = choose_peers(names_of(against), paths, spec.size, peer_python, peer_data)
    peers += limits([arm.path for arm in arms if arm.backend == "shards"])
    peers = list({(peer.name, peer.path): peer for peer in peers}.values())
    with nullcontext() if quiet else ProgressBar("bench", "run") as bar, all_or_nothing(bar) as count:
        result = compare(arms, spec, count, peers)
    silent = quiet or json_path == STDOUT
    if not silent:
        show(result, showing, html_path)
    write(result, json_path, html_path, quiet=silent, gpu_price=showing.gpu_price)
