"""Command `bench recommend`: predicts from a sample of a tree what a conversion would bring; can convert it.

    command                  parse -> `recommend` -> show
    convert_as_recommended   parse -> `recommend` -> ask -> convert -> compare -> show

`bench recommend --convert` and `precache auto` are the same call, `convert_as_recommended`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from bench.commands.options import PLACE, make_settings, option, split_names
from bench.commands.output import Output, output_options
from bench.measure.candidates import choose_candidates
from bench.measure.comparison import Comparison, compare
from bench.measure.imagefolder import find_faults
from bench.measure.recommend import Question, describe_sample, recommend
from bench.measure.sample import train_images
from bench.measure.settings import Settings
from bench.measure.storing import check_free, choose_recipe, find_begun_recipe, find_limit, free_folder
from bench.measure.trainers import EPILOG, emulated_images_per_s
from bench.measure.trials import read_document
from bench.report.forecast import RISK, SAMPLE, stored_size, stored_words
from bench.report.gain import TODAY_BACKEND, source_name
from bench.report.loaders import other_cpu_share
from bench.report.recommendation import (
    USUAL_REJECTS,
    allowed_rejects,
    build_line,
    convert_line,
    describe_dtype,
    median_error,
)
from bench.report.result import Result, Row, Trial
from bench.report.stats import is_disturbed
from bench.report.verdict import RAW_TREE, training_rate
from loaders.dataset import open_split
from precache.cli import commandline
from precache.cli.commandline import STDOUT, combine_options, note, parse_bytes, parse_share
from precache.cli.main import DATA, convert
from precache.conversion.convert import Conversion
from precache.conversion.destination import AUTO_NAME
from precache.conversion.destination import resolve as resolve_place
from precache.dataset.converted import is_converted, open_dataset
from precache.errors import DatasetError, SettingError, check_choice, printable
from precache.plan import plan_conversion
from precache.recipe import DEFAULT_SPLITS, FORMAT_NAMES, Recipe, parse_splits
from precache.reporting import Progress, human_bytes
from precache.sources.base import Scan
from precache.sources.tree import ObjectTree, scan_tree
from precache.storage.urls import Location, Url

_BATCH_SIZE = 64
QUICK: dict[str, Any] = {"pictures": 100, "limit_s": 22.0}
"""Arguments of `Question` without --thorough.

On 2 quiet cores a quick estimate ends within 25 s; on slower ones `limit_s` keeps it near that, because no
turn begins after it.
"""
QUICK_S, THOROUGH_S = 0.5, 2.0  # seconds of each run
QUICK_FORMATS = ("shards", "webdataset")
_BATCHES = 20  # of each run that compares the tree and its converted folder
TRIAL_OPTIONS = {
    "trainer": option("trainer"),
    "trainer_rate": option("trainer_rate"),
    "size": option("size"),
    "batch_size": click.option(
        "--batch-size",
        type=int,
        help=f"Samples per batch.  [default: {_BATCH_SIZE}, or all of a smaller tree]",
    ),
}
"""Options of the trainer and of the batches that are measured."""
STORED_SIZE = click.option(
    "--stored-size", type=int, help="Most of the stored shorter side, pixels.  [default: twice --size]"
)
WHAT_IF_OPTIONS = {
    "gpus": click.option("--gpus", type=int, help="What if there were so many GPUs?"),
    "accelerator": click.option(
        "--accelerator", metavar="NAME", help="What if it were this one, as h100, or of so many images/s?"
    ),
    "workers": click.option("--workers", type=int, help="What if there were so many CPUs, a worker each?"),
    "disk_mbps": click.option("--disk-mbps", type=float, help="What if the disk gave so many MB/s?"),
}
CONVERSION_OPTIONS = {
    "splits": click.option(
        "--splits", default=DEFAULT_SPLITS, show_default=True, help="Shares, as in train=0.9,val=0.1."
    ),
    "max_rejects": click.option(
        "--max-rejects",
        help="How many pictures may be damaged: 1% or 0.01.  [default: 1%, or what the sample has]",
    ),
    "overwrite": click.option(
        "--overwrite", is_flag=True, help="Choose and convert again, and replace DST when all is done."
    ),
}
"""Options that are handed on to `precache convert`."""
FORMATS_HELP = f"all, or some of: {', '.join(FORMAT_NAMES)}.  [default: {', '.join(QUICK_FORMATS)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversions:
    """Conversions to choose from, and the options with which the chosen one is run.

    Attributes:
        dst: folder to convert into; None: data/FORMAT.
        max_bytes: most bytes that it may take, as in 20GB; None: the free space of the disk.
        formats: names of the formats to choose from.
        yes: whether to convert without asking.
        splits, max_rejects, overwrite: see `precache convert`; None for `max_rejects`: the share of damaged
            pictures in the sample.
    """

    dst: Path | None = None
    max_bytes: str | None = None
    formats: tuple[str, ...] = QUICK_FORMATS
    yes: bool = True
    splits: str = DEFAULT_SPLITS
    max_rejects: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes)  # raises now, not after minutes of measuring
        if self.max_rejects is not None:
            parse_share("max_rejects", self.max_rejects)
        parse_splits(self.splits)
        if not self.yes and not sys.stdin.isatty():
            raise SettingError(
                "there is no terminal to ask at before converting", remedy="give --yes to convert at once"
            )

    @property
    def places(self) -> dict[str, Path]:
        """Folder that each format would be converted into, by the format's name."""
        return {name: self.dst or DATA / name for name in self.formats}


def parse_what_if(
    gpus: int | None, accelerator: str | None, workers: int | None, disk_mbps: float | None
) -> dict[str, Any]:
    """Return the what-if options that were given, as fields of `bench.report.forecast.Inputs`.

    Raises:
        SettingError: a number is not positive, or the accelerator is unknown.
    """
    for name, value in (("gpus", gpus), ("workers", workers), ("disk_mbps", disk_mbps)):
        if value is not None and not 0 < value < float("inf"):
            raise SettingError(f"{name} must be positive, got {value}")
    changes: dict[str, Any] = {}
    if gpus is not None:
        changes["gpus"] = gpus
    if accelerator is not None:
        changes["trainer_images_per_s"] = emulated_images_per_s(accelerator)
    if workers is not None:
        changes["cpus"] = workers
    if disk_mbps is not None:
        changes["disk_bytes_per_s"] = disk_mbps * 1e6
    return changes


@click.command(
    name="recommend",
    cls=commandline.Command,
    first=("trainer", "trainer_rate", "size", "batch_size", "formats", "thorough", "dst"),
    short_help="What would converting a tree of pictures bring?",
    epilog=EPILOG,
)
@click.argument("src", type=PLACE)
@click.option("--thorough", is_flag=True, help="Measure longer, and every format.")
@click.option("--format", "formats", help=FORMATS_HELP)
@click.option(
    "--convert", "dst", type=PLACE, metavar="DST", help="Convert as recommended, into DST, and measure that."
)
@combine_options("changes", parse_what_if, WHAT_IF_OPTIONS)
@combine_options("trial_options", dict, {**TRIAL_OPTIONS, "stored_size": STORED_SIZE})
@output_options
def command(
    src: Location,
    thorough: bool,
    formats: str | None,
    dst: Location | None,
    changes: dict[str, Any],
    trial_options: dict[str, Any],
    output: Output,
) -> None:
    """Predict what converting would bring: what gains over ImageFolder and DataLoader for the tree SRC?

    \b
    bench recommend photos
    bench recommend photos --trainer-rate 2500
    bench recommend photos --convert data/auto

    A sample of the pictures is converted and loaded for real, in about half a minute; --thorough takes
    minutes. Sizes, times and rates of the whole tree are computed from that and from what the disk gives.
    --gpus, --accelerator, --workers and --disk-mbps change what they are computed for.
    """
    stored = trial_options.pop("stored_size")
    size = trial_options["size"]
    if dst is not None:
        if thorough or changes or stored is not None:
            raise SettingError(
                "--convert measures this machine, and chooses how pictures are stored",
                remedy="leave out --thorough, --stored-size and what-if options",
            )
        place = resolve_place(require_local("DST", dst))
        conversions = Conversions(dst=place, formats=choose_formats(formats))
        convert_as_recommended(src, conversions, trial_options, output)
        return
    names = FORMAT_NAMES if thorough and formats is None else choose_formats(formats)
    stored = stored or stored_size(size)
    if size > stored:
        raise SettingError(f"size must be at most the stored size {stored}, got {size}")
    scan = ObjectTree(src).scan() if isinstance(src, Url) else scan_tree(src)
    question = Question(
        scan=scan,
        recipe=Recipe(format=names[0], size=stored),
        settings=make_trial_settings(trial_options, train_images(scan), THOROUGH_S if thorough else QUICK_S),
        formats=names,
        **({} if thorough else QUICK),
    )
    folders = {name: str(free_folder(scan, name, DATA)) for name in names}
    with output.progress("recommend", "turn") as bar:
        result = recommend(question, output.json_path, bar, changes, folders)
    output.finish(result)
    if not thorough and not output.quiet and output.json_path != STDOUT:
        click.echo("A quick estimate: --thorough measures longer.")


def choose_formats(text: str | None) -> tuple[str, ...]:
    """Return the formats that `--format` names, 'all' for all of them; SettingError for an unknown one."""
    names = FORMAT_NAMES if text == "all" else tuple(split_names(text or "")) or QUICK_FORMATS
    for name in names:
        check_choice("format", name, FORMAT_NAMES)
    return names


def make_trial_settings(trial_options: Mapping[str, Any], max_batch_size: int, seconds: float) -> Settings:
    """Return the Settings of trials of at least `seconds` each, from the values of TRIAL_OPTIONS.

    Without `--batch-size` a batch has at most `max_batch_size` samples.
    """
    values: dict[str, Any] = {"batch_size": max(1, min(_BATCH_SIZE, max_batch_size)), "seconds": seconds}
    for name, value in trial_options.items():
        if value is not None:
            values[name] = value
    return make_settings(**values)


def convert_as_recommended(
    src: Location, conversions: Conversions, trial_options: Mapping[str, Any], output: Output
) -> None:
    """Choose what suits this machine, ask, convert, measure and say what that brought.

    Nothing is converted where another loader of the tree is as fast, or while other processes keep the CPUs
    busy. If it is killed, the same call goes on. It ends with exit code 1 where the trainer then gets fewer
    images/s, or the dataset takes more than `conversions.max_bytes`.

    Args:
        trial_options: values of TRIAL_OPTIONS.
        output: its file keeps what was measured of the sample.
    """
    if output.json_path == STDOUT:
        raise SettingError(
            "--json - prints a result alone, and converting has more to say", remedy="name a file"
        )
    scan = scan_tree(require_local("SRC", src))
    # half of them: a picture of the sample may be damaged, and left out by the conversion
    settings = make_trial_settings(trial_options, train_images(scan) // 2, QUICK_S)
    if conversions.splits != DEFAULT_SPLITS:
        plan_conversion(scan.samples, Recipe(format=FORMAT_NAMES[0], splits=conversions.splits))
    recipe = None if conversions.overwrite else _find_begun(scan, conversions, settings.size)
    predicted: Result | None = None
    if recipe is None:
        decision = _choose(scan, conversions, settings, output)
        if decision is None:
            return
        recipe, predicted, conversions = decision.recipe, decision.predicted, decision.conversions
    elif conversions.max_rejects is None:
        conversions = _allow_rejects_again(scan, conversions, recipe, settings)
    place = conversions.places[recipe.format]
    conversion = _convert(scan, place, recipe, conversions)
    _report_gain(scan, place, settings, conversion, predicted, conversions, output)


def _find_begun(scan: Scan, conversions: Conversions, size: int) -> Recipe | None:
    """Return the recipe of a conversion that an earlier call finished or began; None where there is none."""
    for name, place in conversions.places.items():
        recipe = find_begun_recipe(place, scan, name, size)
        if recipe is not None:
            if not is_converted(place):
                note(f"{place}: a conversion to {name}, {stored_words(recipe)}, is unfinished; continuing it")
            return recipe
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """The conversion that was chosen.

    Attributes:
        recipe: the format and the size of stored pictures.
        predicted: the result of the sample, which it was chosen by.
        conversions: the options of the call, with the share of damaged pictures that may be left out.
    """

    recipe: Recipe
    predicted: Result
    conversions: Conversions


def _choose(scan: Scan, conversions: Conversions, settings: Settings, output: Output) -> _Decision | None:
    """Measure the sample, show the result, and ask; None where nothing is to be converted."""
    places = conversions.places
    if conversions.dst is not None:  # without it the folder depends on the format that is chosen
        check_free(scan, conversions.dst, conversions.overwrite)
    limit_bytes, limit = find_limit(next(iter(places.values())), conversions.max_bytes)
    recipe, fitting = choose_recipe(scan, settings.size, tuple(places), limit_bytes, limit)
    question = Question(scan=scan, recipe=recipe, settings=settings, formats=fitting, **QUICK)
    folders = {name: str(place) for name, place in places.items()}
    with output.progress("recommend", "turn") as bar:
        result = recommend(question, output.json_path, bar, folders=folders)
    if all(row.key["data"] == RAW_TREE for row in result.rows):
        raise DatasetError(f"no format could be measured: {'; '.join(result.skipped.values())}")
    sample = next(trial for trial in result.trials if trial.key["what"] == SAMPLE)
    if not result.best:
        output.finish(result)
        note("Nothing is converted.")
        if is_disturbed(other_cpu_share(result.trials)):
            note("Run the same command on a quiet machine, or convert without knowing what that gains:")
            rejects = allowed_rejects(sample, len(scan.samples))
            line = convert_line(str(scan.root), places[recipe.format], recipe, rejects)
            click.echo(f"    {printable(line)}")
        return None
    replace(output, html_path=None).finish(result)  # the page shows the result after the conversion
    name = result.rows[result.best[0]].key["data"]
    recipe = replace(recipe, format=name, splits=conversions.splits)
    risk = "" if recipe.size == stored_size(settings.size) else f" {RISK}"
    note(f"Pictures are stored whole, their shorter side {stored_words(recipe)}, within {limit}.{risk}")
    check_free(scan, places[name], conversions.overwrite)
    conversions = _with_rejects(conversions, sample, len(scan.samples))
    if not conversions.yes and not click.confirm(f"Convert to {name}, into {places[name]}?", default=True):
        note("nothing was converted")
        return None
    return _Decision(recipe=recipe, predicted=result, conversions=conversions)


def _with_rejects(conversions: Conversions, sample: Trial, images: int) -> Conversions:
    """Return `conversions` with the share of damaged pictures that the sample has, unless it has a share.

    Raises:
        SettingError: many pictures lack a decoder, so that they may be intact.
    """
    rejects = allowed_rejects(sample, images)
    if conversions.max_rejects is not None or rejects is None:
        return conversions
    share = f"{rejects:.0%}"
    if sample.numbers["undecodable"] > USUAL_REJECTS * sample.numbers["taken"]:
        raise SettingError(
            f"{sample.numbers['undecodable']:,.0f} of {sample.numbers['taken']:,.0f} pictures that were "
            f"tried may be intact, for this Pillow has no decoder of their kind: first "
            f"{sample.facts['undecodable']}",
            remedy=f"or leave them out with --max-rejects {share}",
        )
    note(f"Up to {share} of the pictures may be left out as damaged, by what the sample has: --max-rejects.")
    return replace(conversions, max_rejects=share)


def _allow_rejects_again(
    scan: Scan, conversions: Conversions, recipe: Recipe, settings: Settings
) -> Conversions:
    """Return `conversions` with the share of damaged pictures that an earlier call of the command allowed."""
    place = conversions.places[recipe.format]
    if is_converted(place):
        rejected = len(open_dataset(place).manifest.rejected)
        return replace(conversions, max_rejects=f"{100 * rejected / len(scan.samples):.3f}%")
    question = Question(scan=scan, recipe=recipe, settings=settings, formats=(recipe.format,), **QUICK)
    return _with_rejects(conversions, describe_sample(question), len(scan.samples))


def _convert(scan: Scan, place: Path, recipe: Recipe, conversions: Conversions) -> Conversion:
    """Run `precache convert`, which prints its own progress and messages."""
    conversion: Conversion = click.get_current_context().invoke(
        convert,
        src=scan.folder,
        dst=place,
        format_name=recipe.format,
        size=str(recipe.size),
        quality=recipe.quality,
        splits=conversions.splits,
        max_rejects=conversions.max_rejects or "1%",
        overwrite=conversions.overwrite,
    )
    return conversion


def _report_gain(
    scan: Scan,
    place: Path,
    settings: Settings,
    conversion: Conversion,
    predicted: Result | None,
    conversions: Conversions,
    output: Output,
) -> None:
    """Feed the trainer from the tree and from the dataset, taking turns, and say what converting brought.

    The result is kept in the dataset's folder, in AUTO_NAME, trial by trial. The command ends with exit code
    1 where the dataset takes too many bytes, or the trainer gets fewer images/s from it than from the tree.
    """
    manifest = conversion.manifest
    output = replace(output, json_path=place / AUTO_NAME)
    with output.progress("measure", "run") as bar:
        result = _compare(scan, place, settings, conversion, bar)
    measured = {
        **result.settings,
        "batch_size": result.settings["batch_sizes"][-1],
        "trainer": result.settings["trainers"][-1],
    }
    steps = f"To train from it:\n    loader = {build_line(place, measured)}\n{describe_dtype(measured)}"
    answer = list(result.answer)
    if sentences := find_faults(scan, [reject.path for reject in manifest.rejected]).sentences():
        answer.append(tuple(sentences))
    if predicted is not None:
        error = median_error(predicted, result)
        answer.append((f"Predicted images/s were {error:.0%} off in the median.",))
    output.finish(replace(result, answer=tuple(answer), next_step=steps))
    stored_bytes = manifest.stored_bytes
    if conversions.max_bytes is not None and stored_bytes > parse_bytes(conversions.max_bytes):
        message = (
            f"{place}: takes {human_bytes(stored_bytes)}, more than --max-bytes {conversions.max_bytes}; "
            f"make room, or remove it"
        )
        click.echo(printable(message), err=True)
        raise click.exceptions.Exit(1)
    tree_row = _find_row(result, RAW_TREE)
    converted_row = _find_row(result, manifest.recipe.format)
    if tree_row is None or converted_row is None or is_disturbed(other_cpu_share(result.trials)):
        return
    before, after = training_rate(tree_row), training_rate(converted_row)
    if after.high < before.low:
        note(
            f"Converting lost: from {manifest.recipe.format} the trainer gets {after.median:,.0f} images/s, "
            f"by {source_name(tree_row)} from the tree {before.median:,.0f}."
        )
        raise click.exceptions.Exit(1)


def _compare(
    scan: Scan, place: Path, settings: Settings, conversion: Conversion, on_progress: Progress
) -> Result:
    """Compare loaders of the tree and of the dataset, as `bench loaders` does; keep trials in AUTO_NAME."""
    path = place / AUTO_NAME
    samples = len(open_split(place, "train"))
    backends = [TODAY_BACKEND, "pytorch", conversion.manifest.recipe.format]
    comparison = Comparison(
        candidates=choose_candidates((scan.folder, place), backends, DATA),
        settings=replace(
            settings,
            augment="train",
            seconds=0.0,
            batches=_BATCHES,
            batch_size=min(settings.batch_size, samples),
        ),
        convert_s=_find_convert_s(place, conversion),
    )
    if path.exists():
        try:
            return compare(comparison, path, on_progress)
        except SettingError:  # the file was measured on another machine, or with other settings
            path.unlink()
    return compare(comparison, path, on_progress)


def _find_convert_s(place: Path, conversion: Conversion) -> dict[Location, float]:
    """Return the seconds of converting into `place`, by that folder; empty where several calls did it."""
    if conversion.converted == conversion.manifest.samples:
        return {place: conversion.elapsed_s}
    try:
        earlier = read_document(place / AUTO_NAME).settings["data"][str(place)]["convert_s"]
    except (SettingError, KeyError):
        return {}
    return {} if earlier is None else {place: earlier}


def _find_row(result: Result, data: str) -> Row | None:
    """Return the row of this project's loader of that data; None where it was not measured."""
    for row in result.rows:
        if row.key["data"] == data and row.key["backend"] != TODAY_BACKEND:
            return row
    return None


def require_local(name: str, place: Location) -> Path:
    """Return the folder that the argument `name` names; SettingError for a URL."""
    if isinstance(place, Url):
        raise SettingError(
            f"precache auto measures on a disk, so {name} has to lie on one",
            path=place,
            remedy="'bench recommend URL' advises, 'precache convert' reads and writes URLs",
        )
    return place
