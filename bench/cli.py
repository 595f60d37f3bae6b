"""The command `bench`: parsing, messages, exit codes."""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

import precache
from bench.comparing.comparison import BenchSpec, choose_arms, compare
from bench.comparing.regression import compare_command
from bench.converting import conversion, photos
from bench.converting import report as conversion_report
from bench.evidence.command import evidence_command
from bench.machine.command import hardware
from bench.peers.arms import choose_peers, limits
from bench.peers.serving import PEERS
from bench.peers.writing import WRITERS
from bench.recommending.command import recommend_command
from bench.reporting import events, page, report
from bench.reporting.result import Result
from bench.reporting.result_file import read_result
from bench.running.device import WARMUP_HELP, choose_device, choose_warmup
from bench.running.presets import EPILOG
from bench.running.profiling import profile_command
from bench.running.trainers import AMP_HELP, CHOICES
from bench.scaling.ddp import ddp_command, refuse_several_processes
from bench.scaling.simulate import simulate_command
from bench.sweeping.command import sweep_command
from loaders import BACKENDS
from precache import commandline
from precache.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.convert import convert
from precache.errors import SettingError
from precache.executors import available_cpus, worker_count
from precache.recipe import FORMAT_NAMES, Recipe
from precache.sample import make_sample
from precache.source import scan_tree
from precache.tables import new_console

DATA = Path("data")
QUICKSTART = DATA / "quickstart"
_PATH = click.Path(path_type=Path)
_TABLE_WIDTH = 130  # more than any row


def _choose_events(context: click.Context, _: click.Parameter, folder: Path | None) -> None:
    if folder is not None:
        events.writer_class()  # its absence is an error now, not after minutes of measuring
        context.meta[events.__name__] = folder


_tensorboard_option = click.option(
    "--tensorboard",
    type=_PATH,
    metavar="DIR",
    callback=_choose_events,
    expose_value=False,
    help="Write events for TensorBoard here: batch times, and what ran meanwhile.",
)


@click.group(cls=commandline.Group, name="bench")
@click.version_option(precache.__version__, prog_name="bench")
def main() -> None:
    """Find out whether a training step waits for data, and what would mend it."""
    refuse_several_processes()


for _command in (
    compare_command,
    ddp_command,
    evidence_command,
    hardware,
    profile_command,
    recommend_command,
    simulate_command,
    sweep_command,
):
    main.add_command(_command)


@main.command(epilog=EPILOG)
@click.argument("data", type=_PATH, nargs=-1)
@click.option(
    "--backend", default="all", show_default=True, help=f"all, or some of: {', '.join(sorted(BACKENDS))}."
)
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
@_tensorboard_option
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; for --json FILE and --html FILE.")
def loaders(
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
    device, and of both together, each time in a process of its own; which stage binds, and what
    would mend it. Other libraries' loaders (--against) run alone, each in a process
    of its own; what they read is written to --peer-data once.
    """
    markdown, quiet = settings.pop("markdown"), settings.pop("quiet")
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
    arms = choose_arms(data, _names(backend) or [backend], DATA)
    paths = list(data) or [path for name in ("raw", *FORMAT_NAMES) if (path := DATA / name).exists()]
    if against and spec.device.type != "cpu":
        raise SettingError("peers deliver to main memory; compare with --against on --device cpu")
    peers = choose_peers(_names(against), paths, spec.size, peer_python, peer_data)
    peers += limits([arm.path for arm in arms if arm.backend == "shards"])
    peers = list({(peer.name, peer.path): peer for peer in peers}.values())
    if quiet:
        result = compare(arms, spec, peers=peers)
    else:
        with ProgressBar("bench", "run") as bar:
            result = compare(arms, spec, bar, peers)
    silent = quiet or json_path == STDOUT
    if not silent:
        _print(result, markdown)
    _write(result, json_path, html_path, quiet=silent)


@main.command()
@click.option("--images", default=2048, show_default=True, help="Pictures of the sample tree.")
@click.option("--batches", default=32, show_default=True, help="Timed batches of each run.")
@click.option("--repeats", default=2, show_default=True, help="Runs of each kind, interleaved.")
def quickstart(images: int, batches: int, repeats: int) -> None:
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
            make_sample(raw, images=images, on_progress=bar)
    for name in FORMAT_NAMES:
        with ProgressBar(f"convert to {name}", "image") as bar:
            convert(raw, QUICKSTART / name, Recipe(format=name), on_progress=bar)
    with ProgressBar("bench", "run") as bar:
        result = compare(choose_arms((), ["all"], QUICKSTART), spec, bar)
    _print(result, as_markdown=False)
    _write(result, QUICKSTART / "result.json", QUICKSTART / "report.html")


@main.command(name="convert")
@click.argument("src", type=_PATH, default=DATA / "raw")
@click.option("--format", "format_name", default="shards", show_default=True, help="As of precache convert.")
@click.option("--size", default=256, show_default=True, help="Side of the stored square, pixels.")
@click.option("--quality", default=95, show_default=True, help="JPEG quality (webdataset, dali).")
@click.option("--decode", default="full", show_default=True, help="full or scaled.")
@click.option("--passthrough", is_flag=True, help="Keep the bytes of JPEGs that have the size.")
@click.option("--workers", type=int, help="Processes of each writer.  [default: one per CPU]")
@click.option("--pictures", default=1000, show_default=True, help="Pictures that the stages are timed on.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each kind, interleaved.")
@click.option("--against", default="", help=f"Compare with some of: {', '.join(sorted(WRITERS))}.")
@click.option("--peer-python", default=sys.executable, help="The Python that has them.  [default: this one]")
@click.option("--scratch", type=_PATH, default=Path(tempfile.gettempdir()), help="Folder to convert into.")
@click.option("--json", "json_path", type=_PATH, help="Write the result here; '-' prints it alone.")
def convert_command(
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
    """Show what converting the tree SRC (default data/raw) spends its time on."""
    check_output(json_path)
    spec = conversion.ConversionSpec(
        recipe=Recipe(format=format_name, **settings),
        workers=worker_count(workers, least=1),
        pictures=pictures,
        repeats=repeats,
        against=tuple(_names(against)),
        peer_python=peer_python,
        scratch=scratch,
    )
    with ProgressBar("bench", "run") as bar:
        result = conversion.measure(src, spec, bar)
    if json_path != STDOUT:
        click.echo(conversion_report.text(result))
    if json_path is not None:
        write_json(json_path, result.to_json())


@main.command(name="photos")
@click.argument("src", type=_PATH)
@click.argument("dst", type=_PATH)
@click.option("--mean", default="500x400", show_default=True, help="Width and height in pixels.")
@click.option("--pictures", default=1000, show_default=True, help="How many to make.")
def photos_command(src: Path, dst: Path, mean: str, pictures: int) -> None:
    """Make larger photographs of the tree SRC in DST, to measure conversions on."""
    match = re.fullmatch(r"(\d+)x(\d+)", mean)
    if match is None:
        raise SettingError(f"mean must be a size in pixels as 500x400, got {mean!r}")
    with ProgressBar("photos", "image") as bar:
        photos.make_photos(src, dst, (int(match[1]), int(match[2])), pictures, bar)
    click.echo(f"{dst}: {pictures:,} pictures")


@main.command(name="report")
@click.argument("result_path", metavar="RESULT.json", type=_PATH)
@click.option("--html", "html_path", type=_PATH, help="Write the report here.")
@_tensorboard_option
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def report_command(result_path: Path, html_path: Path | None, markdown: bool) -> None:
    """Show a result that 'bench loaders --json' wrote."""
    result = read_result(result_path)
    _print(result, markdown)
    _write(result, None, html_path)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print(result: Result, as_markdown: bool) -> None:
    if as_markdown:
        click.echo(report.markdown(result))
        return
    new_console(width=_TABLE_WIDTH).print(report.terminal_table(result))
    for name, reason in result.skipped.items():
        click.echo(f"skipped {name}: {reason}")
    click.echo(f"{report.conditions(result)}.")
    click.echo(report.legend(result))
    for sentence in (*report.headline(result), *report.findings(result), *report.comparisons(result)):
        click.echo(sentence)


def _write(result: Result, json_path: Path | None, html_path: Path | None, quiet: bool = False) -> None:
    if json_path is not None:
        write_json(json_path, result.to_json(), quiet=quiet)
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(page.html(result), encoding="utf-8")
        if not quiet:
            click.echo(f"wrote {html_path}")
    folder = click.get_current_context().meta.get(events.__name__)
    if folder is not None:
        runs = events.write_events(result, folder)
        if not quiet:
            click.echo(f"wrote {folder}: {', '.join(runs) or 'nothing, no row has the times of its batches'}")


def entry_point() -> None:
    """Entry point of the console script."""
    sys.exit(commandline.run(main, "bench"))
