"""The command `precache convert`: its options, and the report of what it did."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import precache
from precache.cli.commandline import LocationType, combine_options, debug_option, parse_bytes, parse_share
from precache.cli.terminal import ProgressBar, note
from precache.conversion.convert import Conversion
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import Manifest
from precache.errors import SettingError, shell_command
from precache.formats import FORMATS
from precache.pictures.images import FITS, RESAMPLING, parse_size
from precache.pictures.kinds import decoder_remedy, kind_without_decoder, looks_like_picture
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import DEFAULT_QUALITY, DEFAULT_SIZE, DEFAULT_SPLITS, Recipe, flag_name
from precache.reporting import Progress, abridge, human_bytes, quantity
from precache.sources import SourceOptions
from precache.sources.options import LISTS, option_help
from precache.sources.splits import is_list_file
from precache.storage.urls import destination_path, source_path

DATA = Path("data")
RAW = DATA / "raw"
_MAX_NODE_LINES = 16

RUNNING_FLAGS = {
    "workers": click.option(
        "--workers",
        type=int,
        help="Worker processes; 0 converts in this one. With Ray, shards that are written at a time.  "
        "[default: one per CPU; with Ray two per CPU of the cluster]",
    ),
    "engine": click.option(
        "--engine",
        default="local",
        show_default=True,
        help="Where to convert: local, or ray for all nodes of a Ray cluster.",
    ),
    "address": click.option(
        "--address",
        help="Ray cluster, as HOST:PORT; auto is that of RAY_ADDRESS, else this machine's.  [default: auto]",
    ),
}
_REJECTS = {
    "max_rejects": click.option(
        "--max-rejects", help="Share of the pictures that may be damaged, as 1% or 0.01.  [default: 1%]"
    ),
    "strict": click.option("--strict", is_flag=True, help="Allow no damaged picture, as --max-rejects 0."),
}


_SOURCE_FLAGS = {
    name: click.option(
        flag_name(name),
        name,
        help=help_text,
        type=int if name == "class_depth" else str,
        multiple=name in LISTS,
    )
    for name, help_text in option_help().items()
}


def _most_rejects(max_rejects: str | None, strict: bool) -> float:
    """Return the share of pictures that may be damaged, from the values of _REJECTS."""
    if strict and max_rejects is not None:
        raise SettingError(f"--strict and --max-rejects {max_rejects} cannot be combined", remedy="give one")
    return 0.0 if strict else parse_share("max_rejects", max_rejects or "1%")


def _source_options(**options: Any) -> SourceOptions:
    """Return the source options from the values of _SOURCE_FLAGS; SettingError for a bad one."""
    return SourceOptions(**{**options, **{name: _names(options[name]) for name in LISTS}})


def _names(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the names in lines of CSV, which may quote a name with a comma in it."""
    cells = (cell.strip() for row in csv.reader(lines, skipinitialspace=True) for cell in row)
    return tuple(cell for cell in cells if cell)


@click.command(name="convert", short_help="Convert pictures into a dataset that loads fast.")
@click.argument("src", type=LocationType(source_path), default=RAW)
@click.argument("dst", type=LocationType(destination_path), required=False)
@click.option("--format", "format_name", help=f"What to write: {', '.join(FORMATS)}.")
@click.option(
    "--size",
    default=str(DEFAULT_SIZE),
    show_default=True,
    help="Maximum shorter side in pixels; with --fit crop, pad or stretch: side of a square or WIDTHxHEIGHT.",
)
@click.option(
    "--fit", default="keep", show_default=True, help=f"How pictures get that size: {', '.join(FITS)}."
)
@click.option(
    "--splits",
    default=DEFAULT_SPLITS,
    show_default=True,
    help="Share of each split, as train=0.8,val=0.2; or a file with lines path,split.",
)
@click.option("--overwrite", is_flag=True, help="Convert again, and replace DST once all is done.")
@combine_options("running", dict, RUNNING_FLAGS)
@combine_options("options", _source_options, _SOURCE_FLAGS)
@combine_options("most_rejects", _most_rejects, _REJECTS)
@click.option(
    "--quality", default=DEFAULT_QUALITY, show_default=True, help="JPEG quality, in webdataset and dali."
)
@click.option("--enlarge", is_flag=True, help="With --fit keep, enlarge smaller pictures to --size, too.")
@click.option(
    "--resample", default="lanczos", show_default=True, help=f"Filter that resizes: {', '.join(RESAMPLING)}."
)
@click.option(
    "--channels",
    default="rgb",
    show_default=True,
    help="Channels to store: rgb or grey.",
)
@click.option("--background", default="white", show_default=True, help="Colour behind transparent pixels.")
@click.option(
    "--decode",
    default="full",
    show_default=True,
    help="How JPEGs are decoded: full, or scaled, which is faster and less exact.",
)
@click.option(
    "--allow-truncated", is_flag=True, help="Convert truncated JPEGs, too; what is missing is grey."
)
@click.option(
    "--max-pixels", default=MAX_PIXELS, show_default=True, help="Reject pictures with more pixels than this."
)
@click.option(
    "--shard-bytes", default="64MiB", show_default=True, help="Size of a shard, counted as decoded pixels."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the order on disk and of the splits.")
@debug_option
def convert(
    src: Path,
    dst: Path | None,
    format_name: str | None,
    running: dict[str, Any],
    overwrite: bool,
    most_rejects: float,
    shard_bytes: str,
    splits: str,
    size: str,
    options: SourceOptions,
    **settings: Any,
) -> None:
    """\b
    precache convert photos data/shards --format shards --size 256

    Converts the pictures of SRC (default data/raw) into DST (default data/FORMAT).

    SRC is a folder of class folders, a table of pictures and labels (.csv, .tsv, .jsonl, .parquet, .feather),
    WebDataset tars, a converted dataset, or a folder that Hugging Face's save_to_disk wrote.
    If it stops, run the same command again to continue.
    """
    if format_name is None:
        formats = ", ".join(FORMATS)
        raise SettingError(f"choose a format: --format {formats}; 'bench recommend' advises")
    split_list = Path(splits) if splits != DEFAULT_SPLITS and is_list_file(splits) else None
    if split_list is not None:
        splits = DEFAULT_SPLITS
    settings |= {"size": parse_size(size), "shard_bytes": parse_bytes(shard_bytes), "splits": splits}
    recipe = Recipe(format=format_name, **settings)
    for name, reason in recipe.unused_settings.items():
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise SettingError(f"{flag_name(name)} {settings[name]} {reason}", remedy="leave it out")
    destination = DATA / format_name if dst is None else dst

    def show_size(needed: int, free: int) -> None:
        note(f"{destination}: will take about {human_bytes(needed)}; {human_bytes(free)} are free")

    with ProgressBar(f"convert to {format_name}", "image") as bar:
        result = precache.convert(
            src,
            destination,
            recipe,
            **running,
            overwrite=overwrite,
            max_rejects=most_rejects,
            split_list=split_list,
            options=options,
            on_start=show_size,
            on_progress=_announce_resume(destination, bar),
        )
    _print_conversion(result, destination)


def _announce_resume(destination: Path, on_progress: Progress) -> Progress:
    """Return `on_progress`, wrapped so that it first prints how much an earlier run has converted."""
    is_first = True

    def report(done: int, total: int) -> None:
        nonlocal is_first
        if done and is_first:
            are = "is" if done == 1 else "are"
            note(
                f"{destination}: {done:,} of {quantity(total, 'picture')} {are} already converted; "
                f"continuing with the rest"
            )
        is_first = False
        on_progress(done, total)

    return report


def _print_conversion(result: Conversion, destination: Path) -> None:
    manifest = result.manifest
    if not result.published:
        note(f"{destination}: already converted with these settings; nothing to do")
        return
    if decoder_warning := _missing_decoders(manifest):
        note(f"WARNING: {destination}: {decoder_warning}", err=True)
    note(
        f"{destination}: {quantity(manifest.samples, 'image')}, {len(manifest.rejected):,} rejected, "
        f"{len(manifest.ignored):,} ignored; {human_bytes(manifest.source_bytes)} in, "
        f"{human_bytes(manifest.stored_bytes)} out; {result.converted / result.elapsed_s:,.0f} images/s "
        f"({result.elapsed_s:.1f} s)"
    )
    if result.deeper:
        note(f"  {deeper_line(result.deeper)}")
    if result.duplicates is not None and result.duplicates.in_labels and not result.duplicates.in_splits:
        command = f"{shell_command('precache inspect', destination)} --duplicates duplicates.csv"
        note(f"{destination}: {result.duplicates}; list them: {command}")
    for line in node_lines(result.nodes):
        note(f"  {line}")
    damaged = [rejected for rejected in manifest.rejected if not kind_without_decoder(rejected.reason)]
    for rejected in damaged[:10]:
        note(f"  rejected {rejected.path}: {rejected.reason}", err=True)
    for line in ignored_lines(manifest, pictures_only=True):
        note(f"  {line}", err=True)
    count = len(manifest.rejected)
    if count:
        left_out = f"{quantity(count, 'picture')} {'is' if count == 1 else 'are'} left out"
        list_file = destination / REJECTED_NAME
        note(f"  WARNING: {left_out}; {list_file} says which and why", err=True)


def _missing_decoders(manifest: Manifest) -> str:
    """Return a warning of pictures for which only a decoder is missing here; empty if there are none."""
    kinds: Counter[str] = Counter()
    for rejected in manifest.rejected:
        kind = kind_without_decoder(rejected.reason)
        if kind:
            kinds[kind] += 1
    if not kinds:
        return ""
    remedies = "; ".join(dict.fromkeys(map(decoder_remedy, kinds)))
    return (
        f"{quantity(kinds.total(), 'picture')} left out only because this Pillow has no decoder for "
        f"{', '.join(kinds)}; {remedies}; then run the same command with --overwrite"
    )


def ignored_lines(manifest: Manifest, *, pictures_only: bool = False) -> Iterator[str]:
    """Yield a line for each reason why files were ignored; it names those that look like pictures.

    Args:
        pictures_only: leave out the reasons without such files.
    """
    paths_of: dict[str, list[str]] = {}
    for path, reason in manifest.ignored:
        paths_of.setdefault(reason, []).append(path)
    for reason, paths in sorted(paths_of.items(), key=lambda item: -len(item[1])):
        pictures = [path for path in paths if looks_like_picture(path)]
        if pictures or not pictures_only:
            names = f" ({abridge(pictures)})" if pictures else ""
            yield f"ignored {len(paths):,}: {reason}{names}"


def deeper_line(count: int) -> str:
    """Return the line on pictures that lie in a folder of their class folder."""
    if count == 1:
        return "1 picture lies deeper than its class folder, and belongs to it"
    return f"{count:,} pictures lie deeper than their class folders, and belong to them"


def node_lines(nodes: dict[str, float]) -> list[str]:
    """Return a line for each of the slowest nodes, and one for the others."""
    by_rate = sorted(nodes.items(), key=lambda node: node[1])
    lines = [f"{name}: {rate:,.0f} images/s" for name, rate in by_rate[:_MAX_NODE_LINES]]
    faster = [rate for _, rate in by_rate[_MAX_NODE_LINES:]]
    if faster:
        lines.append(f"{len(faster):,} other nodes: {faster[0]:,.0f} to {faster[-1]:,.0f} images/s")
    return lines
