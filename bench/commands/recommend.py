"""`bench recommend`: what converting a tree would bring, predicted from a sample of it; and converting it.

    command                  parse -> `recommend` -> show
    convert_as_recommended   parse -> `recommend` -> ask -> convert -> compare -> show

`bench recommend --convert` and `precache auto` are the same call, `convert_as_recommended`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.commands.options import PLACE, make_settings, names_of, option
from bench.commands.output import Output, output_options
from bench.measure.candidates import choose_candidates
from bench.measure.comparison import Comparison, compare
from bench.measure.imagefolder import find_refused
from bench.measure.recommend import Question, look_at_sample, recommend
from bench.measure.sample import train_images
from bench.measure.settings import Settings
from bench.measure.storing import check_free, choose, find_begun, find_limit, free_folder
from bench.measure.trainers import EPILOG, emulated_images_per_s
from bench.measure.trials import read_document
from bench.report.forecast import PREDICTED, RISK, SAMPLE, stored_size, stored_words
from bench.report.gain import TODAY_BACKEND, source_name
from bench.report.loaders import other_cpu_share
from bench.report.recommendation import (
    USUAL_REJECTS,
    allowed_rejects,
    build_line,
    convert_line,
    describe_dtype,
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
# On 2 quiet cores the quick way ends within 25 s; a limit that begins no turn keeps it there on slow ones.
QUICK: dict[str, Any] = {"pictures": 100, "limit_s": 22.0}
QUICK_S, THOROUGH_S = 0.5, 2.0  # of each run
QUICK_FORMATS = ("shards", "webdataset")
_BATCHES = 20  # of each run that compares the tree and what was converted
MEASURING = {
    "trainer": option("trainer"),
    "trainer_rate": option("trainer_rate"),
    "size": option("size"),
    "batch_size": click.option(
        "--batch-size",
        type=int,
        help=f"Samples per batch.  [default: {_BATCH_SIZE}, or all of a smaller tree]",
    ),
}
"""Options that say what is measured."""
STORED_SIZE = click.option(
    "--stored-size", type=int, help="Most of the stored shorter side, pixels.  [default: twice --size]"
)
WHAT_IF = {
    "gpus": click.option("--gpus", type=int, help="What if there were so many GPUs?"),
    "accelerator": click.option(
        "--accelerator", metavar="NAME", help="What if it were this one, as h100, or of so many images/s?"
    ),
    "workers": click.option("--workers", type=int, help="What if there were so many CPUs, a worker each?"),
    "disk_mbps": click.option("--disk-mbps", type=float, help="What if the disk gave so many MB/s?"),
}
CONVERTING = {
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
"""Options of `precache convert`, handed on."""
FORMATS_HELP = f"all, or some of: {', '.join(FORMAT_NAMES)}.  [default: {', '.join(QUICK_FORMATS)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversions:
    """What may be converted to, and how.

    Attributes:
        dst: folder to convert into; None: data/FORMAT.
        max_bytes: what it may take, as in 20GB; None: what is free.
        formats: names to choose from.
        yes: convert without asking.
        splits, max_rejects, overwrite: see `precache convert`; None for `max_rejects`: what the sample needs.
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
            parse_bytes(self.max_bytes)  # an error now, not after minutes
        if self.max_rejects is not None:
            parse_share("max_rejects", self.max_rejects)
        parse_splits(self.splits)
        if not self.yes and not sys.stdin.isatty():
            raise SettingError(
                "there is no terminal to ask at before converting; give --yes to convert at once"
            )

    @property
    def places(self) -> dict[str, Path]:
        """Where each format would be converted to."""
        return {name: self.dst or DATA / name for name in self.formats}


def what_if(
    gpus: int | None, accelerator: str | None, workers: int | None, disk_mbps: float | None
) -> dict[str, Any]:
    """Options that were given, as fields of `Inputs`; SettingError for one that is not positive."""
    given = {"gpus": gpus, "workers": workers, "disk_mbps": disk_mbps}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise SettingError(f"{name} must be positive, got {value}")
    fields = {
        "gpus": gpus,
        "trainer_images_per_s": None if accelerator is None else emulated_images_per_s(accelerator),
        "cpus": workers,
        "disk_bytes_per_s": None if disk_mbps is None else disk_mbps * 1e6,
    }
    return {name: value for name, value in fields.items() if value is not None}


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
@combine_options("changes", what_if, WHAT_IF)
@combine_options("asked", dict, {**MEASURING, "stored_size": STORED_SIZE})
@output_options
def command(
    src: Location,
    thorough: bool,
    formats: str | None,
    dst: Location | None,
    changes: dict[str, Any],
    asked: dict[str, Any],
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
    stored = asked.pop("stored_size")
    if dst is not None:
        if thorough or changes or stored is not None:
            raise SettingError(
                "--convert measures this machine, and chooses how pictures are stored; leave out --thorough, "
                "--stored-size and what-if options"
            )
        place = resolve_place(on_disk("DST", dst))
        conversions = Conversions(dst=place, formats=chosen_formats(formats))
        return convert_as_recommended(src, conversions, asked, output)
    names = FORMAT_NAMES if thorough and formats is None else chosen_formats(formats)
    stored = stored or stored_size(asked["size"])
    if asked["size"] > stored:
        raise SettingError(f"size must be at most the stored size {stored}, got {asked['size']}")
    scan = ObjectTree(src).scan() if isinstance(src, Url) else scan_tree(src)
    question = Question(
        scan=scan,
        recipe=Recipe(format=names[0], size=stored),
        settings=measuring(asked, train_images(scan), THOROUGH_S if thorough else QUICK_S),
        formats=names,
        **({} if thorough else QUICK),
    )
    folders = {name: str(free_folder(scan, name, DATA)) for name in names}
    with output.measuring("recommend", "turn") as bar:
        result = recommend(question, output.json_path, bar, changes, folders)
    output.finish(result)
    if not thorough and not output.quiet and output.json_path != STDOUT:
        click.echo("A quick estimate: --thorough measures longer.")


def chosen_formats(asked: str | None) -> tuple[str, ...]:
    """Formats that were named; SettingError for an unknown one."""
    names = FORMAT_NAMES if asked == "all" else tuple(names_of(asked or "")) or QUICK_FORMATS
    for name in names:
        check_choice("format", name, FORMAT_NAMES)
    return names


def measuring(asked: Mapping[str, Any], most: int, seconds: float) -> Settings:
    """Settings by the options MEASURING; batches of at most `most` pictures, unless asked for."""
    given = {name: value for name, value in asked.items() if value is not None}
    return make_settings(**{"batch_size": max(1, min(_BATCH_SIZE, most)), "seconds": seconds, **given})


def convert_as_recommended(
    src: Location, conversions: Conversions, asked: Mapping[str, Any], output: Output
) -> None:
    """Choose what suits this machine, ask, convert, measure and say what that brought.

    Nothing is converted where another loader of the tree is as fast, or beside other busy processes. Killed,
    the same call goes on. It ends with exit code 1 where the trainer then gets less, or more bytes are taken
    than asked.

    Args:
        asked: values of the options MEASURING.
        output: its file keeps what was measured of the sample.
    """
    if output.json_path == STDOUT:
        raise SettingError("--json - prints a result alone, and converting has more to say; name a file")
    scan = scan_tree(on_disk("SRC", src))
    # a picture of the sample may be damaged, and left out by the conversion
    settings = measuring(asked, train_images(scan) // 2, QUICK_S)
    if conversions.splits != DEFAULT_SPLITS:
        plan_conversion(scan.samples, Recipe(format=FORMAT_NAMES[0], splits=conversions.splits))
    recipe = None if conversions.overwrite else _find_begun(scan, conversions, settings.size)
    predicted: Result | None = None
    if recipe is None:
        chosen = _choose(scan, conversions, settings, output)
        if chosen is None:
            return
        recipe, predicted, conversions = chosen
    elif conversions.max_rejects is None:
        conversions = _allow_rejects_again(scan, conversions, recipe, settings)
    place = conversions.places[recipe.format]
    done = _convert(scan, place, recipe, conversions)
    _prove(scan, place, settings, done, predicted, conversions, output)


def _find_begun(scan: Scan, conversions: Conversions, size: int) -> Recipe | None:
    """How an earlier call has stored the pictures, or has begun to; None where none did."""
    for name, place in conversions.places.items():
        recipe = find_begun(place, scan, name, size)
        if recipe is not None:
            if not is_converted(place):
                what = f"a conversion to {name}, {stored_words(recipe)}"
                note(f"{place}: {what}, is unfinished; continuing it")
            return recipe
    return None


def _choose(
    scan: Scan, conversions: Conversions, settings: Settings, output: Output
) -> tuple[Recipe, Result, Conversions] | None:
    """Measure the sample, show what it says, and ask; None where nothing is to be converted."""
    places = conversions.places
    if conversions.dst is not None:  # else it is not known yet which it will be
        check_free(scan, conversions.dst, conversions.overwrite)
    limit_bytes, limit = find_limit(next(iter(places.values())), conversions.max_bytes)
    recipe, fitting = choose(scan, settings.size, tuple(places), limit_bytes, limit)
    question = Question(scan=scan, recipe=recipe, settings=settings, formats=fitting, **QUICK)
    folders = {name: str(place) for name, place in places.items()}
    with output.measuring("recommend", "turn") as bar:
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
    replace(output, html_path=None).finish(result)  # the page is of what comes of it
    name = result.rows[result.best[0]].key["data"]
    recipe = replace(recipe, format=name, splits=conversions.splits)
    risk = "" if recipe.size == stored_size(settings.size) else f" {RISK}"
    note(f"Pictures are stored whole, their shorter side {stored_words(recipe)}, within {limit}.{risk}")
    check_free(scan, places[name], conversions.overwrite)
    conversions = _with_rejects(conversions, sample, len(scan.samples))
    if not conversions.yes and not click.confirm(f"Convert to {name}, into {places[name]}?", default=True):
        note("nothing was converted")
        return None
    return recipe, result, conversions


def _with_rejects(conversions: Conversions, sample: Trial, images: int) -> Conversions:
    """Allow as many damaged pictures as the sample needs, unless the user has said how many.

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
            f"tried may be intact, first {sample.facts['undecodable']}: this Pillow has no decoder for that "
            f"kind; install one, by the command that 'precache doctor' prints, or leave them out with "
            f"--max-rejects {share}"
        )
    note(f"Up to {share} of the pictures may be left out as damaged, by what the sample has: --max-rejects.")
    return replace(conversions, max_rejects=share)


def _allow_rejects_again(
    scan: Scan, conversions: Conversions, recipe: Recipe, settings: Settings
) -> Conversions:
    """Allow as many damaged pictures as an earlier call of the same command did."""
    place = conversions.places[recipe.format]
    if is_converted(place):
        rejected = len(open_dataset(place).manifest.rejected)
        return replace(conversions, max_rejects=f"{100 * rejected / len(scan.samples):.3f}%")
    question = Question(scan=scan, recipe=recipe, settings=settings, formats=(recipe.format,), **QUICK)
    return _with_rejects(conversions, look_at_sample(question), len(scan.samples))


def _convert(scan: Scan, place: Path, recipe: Recipe, conversions: Conversions) -> Conversion:
    """Convert as `precache convert` does, with all that it says."""
    done: Conversion = click.get_current_context().invoke(
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
    return done


def _prove(
    scan: Scan,
    place: Path,
    settings: Settings,
    done: Conversion,
    predicted: Result | None,
    conversions: Conversions,
    output: Output,
) -> None:
    """Feed the trainer from the tree and from the dataset, by turns, and say what converting brought.

    The result is kept beside the dataset, in AUTO_NAME, trial by trial.
    """
    manifest = done.manifest
    output = replace(output, json_path=place / AUTO_NAME)
    with output.measuring("measure", "run") as bar:
        result = _compare(scan, place, settings, done, bar)
    measured = {
        **result.settings,
        "batch_size": result.settings["batch_sizes"][-1],
        "trainer": result.settings["trainers"][-1],
    }
    steps = f"To train from it:\n    loader = {build_line(place, measured)}\n{describe_dtype(measured)}"
    paragraphs = [tuple(find_refused(scan, [each.path for each in manifest.rejected]).sentences())]
    if predicted is not None:
        off = _median_error(predicted, result)
        paragraphs.append((f"Predicted images/s were {off:.0%} off in the median.",))
    answer = (*result.answer, *(paragraph for paragraph in paragraphs if paragraph))
    output.finish(replace(result, answer=answer, next_step=steps))
    takes = manifest.stored_bytes
    if conversions.max_bytes is not None and takes > parse_bytes(conversions.max_bytes):
        said = f"{place}: takes {human_bytes(takes)}, more than --max-bytes {conversions.max_bytes}"
        click.echo(printable(f"{said}; make room, or remove it"), err=True)
        raise click.exceptions.Exit(1)
    line, converted = _row_of(result, RAW_TREE), _row_of(result, manifest.recipe.format)
    if line is None or converted is None or is_disturbed(other_cpu_share(result.trials)):
        return
    before, after = training_rate(line), training_rate(converted)
    if after.high < before.low:
        note(
            f"Converting lost: from {manifest.recipe.format} the trainer gets {after.median:,.0f} images/s, "
            f"by {source_name(line)} from the tree {before.median:,.0f}."
        )
        raise click.exceptions.Exit(1)


def _compare(scan: Scan, place: Path, settings: Settings, done: Conversion, on_progress: Progress) -> Result:
    """Compare loaders of the tree and of the dataset, as `bench loaders` does, and keep the trials there."""
    path = place / AUTO_NAME
    samples = len(open_split(place, "train"))
    backends = [TODAY_BACKEND, "pytorch", done.manifest.recipe.format]
    comparison = Comparison(
        candidates=choose_candidates((scan.folder, place), backends, DATA),
        settings=replace(
            settings,
            augment="train",
            seconds=0.0,
            batches=_BATCHES,
            batch_size=min(settings.batch_size, samples),
        ),
        convert_s=_find_convert_s(place, done),
    )
    if path.exists():
        try:
            return compare(comparison, path, on_progress)
        except SettingError:  # it is of another machine, or of other settings
            path.unlink()
    return compare(comparison, path, on_progress)


def _find_convert_s(place: Path, done: Conversion) -> dict[Location, float]:
    """Seconds that converting took, by the folder; nothing where several calls did it."""
    if done.converted == done.manifest.samples:
        return {place: done.elapsed_s}
    try:
        earlier = read_document(place / AUTO_NAME).settings["data"][str(place)]["convert_s"]
    except (SettingError, KeyError):
        return {}
    return {} if earlier is None else {place: earlier}


def _row_of(result: Result, data: str) -> Row | None:
    """The row of ours that reads this data, in a comparison."""
    for row in result.rows:
        if row.key["data"] == data and row.key["backend"] != TODAY_BACKEND:
            return row
    return None


def _median_error(predicted: Result, measured: Result) -> float:
    """How far off the predicted images/s are in the median, as a share of what was measured."""
    errors = []
    for after in measured.rows:
        for before in predicted.rows:
            same = all(before.key[name] == after.key[name] for name in ("backend", "data"))
            if same and before.key["trainer"] == PREDICTED:
                errors.append(abs(training_rate(before).median / training_rate(after).median - 1))
    return median(errors) if errors else 0.0


def on_disk(name: str, place: Location) -> Path:
    """The folder of that argument; SettingError for a URL."""
    if isinstance(place, Url):
        raise SettingError(
            f"{place}: precache auto measures on a disk, so {name} has to lie on one; 'bench recommend URL' "
            f"advises, 'precache convert' reads and writes URLs"
        )
    return place
