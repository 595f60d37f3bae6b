"""`bench recommend`: what converting a tree would bring, predicted from a sample of it; and converting it.

`precache auto` and `bench recommend --convert` are the same call, `convert_what_pays`.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.commands.options import PLACE, make_settings, names_of, option
from bench.measure.recommend import (
    Recommendation,
    choose,
    find_begun,
    prove,
    recommend,
    train_images,
)
from bench.measure.settings import Settings
from bench.measure.trainers import EPILOG, emulated_images_per_s
from bench.report.forecast import RISK, Inputs, advised, fits_memory, stored_size, stored_words
from bench.report.row import RAW_TREE, Row
from bench.report.stats import disturbance, is_disturbed, other_cpu
from bench.report.verdict import answer, way
from bench.report.words import Table, counted, duration, machine_line, number, percent, say
from precache.cli import commandline
from precache.cli.commandline import (
    STDOUT,
    ProgressBar,
    check_output,
    gathered,
    human_bytes,
    note,
    parse_bytes,
    parse_share,
    printable,
    write_json,
)
from precache.cli.main import DATA, convert
from precache.conversion.convert import Conversion
from precache.conversion.destination import AUTO_NAME, is_untouched
from precache.conversion.destination import resolve as resolve_place
from precache.conversion.journal import check_empty
from precache.dataset.converted import is_converted
from precache.errors import DatasetError, SettingError, check_choice
from precache.packages import DALI
from precache.plan import plan_conversion
from precache.recipe import DEFAULT_SPLITS, FORMAT_NAMES, Recipe, parse_splits
from precache.reporting import warn
from precache.sources.base import Scan, check_apart
from precache.sources.objects import ObjectTree
from precache.sources.tree import scan_tree
from precache.storage.urls import Location, Url

_VERSIONS = ("python", "torch", "pillow", "simplejpeg", "webdataset", *DALI)
_BATCH_SIZE = 64
# On 2 quiet cores the quick way ends within 25 s; a limit that begins no turn keeps it there on slow ones.
QUICK: dict[str, Any] = {"pictures": 100, "limit_s": 22.0}
QUICK_S, THOROUGH_S = 0.5, 2.0  # of each run
QUICK_FORMATS = ("shards", "webdataset")
RULE = (
    "Rule: plenty of disk: shards; slow or small disk: webdataset; "
    "loaders.build keeps up on the tree: convert nothing."
)
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
"""What is measured."""
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
        "--max-rejects", default="1%", show_default=True, help="How many pictures may be damaged: 1% or 0.01."
    ),
    "overwrite": click.option(
        "--overwrite", is_flag=True, help="Choose and convert again, and replace DST when all is done."
    ),
}
"""Options of `precache convert`, handed on."""
FORMATS_HELP = f"all, or some of: {', '.join(FORMAT_NAMES)}.  [default: {', '.join(QUICK_FORMATS)}]"


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
    "--convert", "dst", type=PLACE, metavar="DST", help="Convert, too, and measure what came: precache auto."
)
@gathered("changes", what_if, WHAT_IF)
@gathered("asked", dict, {**MEASURING, "stored_size": STORED_SIZE})
@option("json_path")
def command(
    src: Location,
    thorough: bool,
    formats: str | None,
    dst: Location | None,
    changes: dict[str, Any],
    asked: dict[str, Any],
    json_path: Path | None,
) -> None:
    """What would converting bring? Says what gains over ImageFolder and DataLoader for the tree SRC.

    \b
    bench recommend photos
    bench recommend photos --trainer-rate 2500

    A sample of the pictures is converted and loaded for real, in about half a minute; --thorough takes
    minutes. Sizes, times and rates of the whole tree are computed from that and from what the disk gives.
    --gpus, --accelerator, --workers and --disk-mbps change what they are computed for.
    """
    check_output(json_path)
    if dst is not None:
        if thorough or json_path is not None or changes or asked.pop("stored_size") is not None:
            raise SettingError(
                "--convert measures this machine, and chooses how pictures are stored; DST has its figures; "
                "leave out --thorough, --json, --stored-size and what-if options"
            )
        usual = {"splits": DEFAULT_SPLITS, "max_rejects": "1%", "overwrite": False}
        return convert_what_pays(src, dst, None, formats, True, usual, asked)
    names = FORMAT_NAMES if thorough and formats is None else chosen_formats(formats)
    stored = asked.pop("stored_size") or stored_size(asked["size"])
    if asked["size"] > stored:
        raise SettingError(f"size must be at most the stored size {stored}, got {asked['size']}")
    scan = ObjectTree(src).scan() if isinstance(src, Url) else scan_tree(src)
    settings = measuring(asked, train_images(scan), THOROUGH_S if thorough else QUICK_S)
    limits = {} if thorough else QUICK
    with ProgressBar("recommend", "run") as bar:
        recipe = Recipe(format=names[0], size=stored)
        result = recommend(scan, recipe, settings, formats=names, on_progress=bar, **limits)
    other = result.what_if(replace(result.inputs, **changes)) if changes else None
    if json_path is not None:
        content = result.to_json()
        content["what_if"] = other.to_json() if other is not None else None
        write_json(json_path, content)
    if json_path == STDOUT:
        return
    show(result)
    if other is not None:
        click.echo(f"\nWhat if: {_given(other.inputs)}")
        show_rows(other, told=is_disturbed(other_cpu(result.settings)))
    for line in conditions(result):
        say(line)
    if not thorough:
        click.echo("A quick estimate: --thorough measures longer.")


def chosen_formats(asked: str | None) -> tuple[str, ...]:
    """Those named; SettingError for an unknown one."""
    names = FORMAT_NAMES if asked == "all" else tuple(names_of(asked or "")) or QUICK_FORMATS
    for name in names:
        check_choice("format", name, FORMAT_NAMES)
    return names


def measuring(asked: dict[str, Any], most: int, seconds: float) -> Settings:
    """What was asked for by the options MEASURING; batches of at most `most` pictures, unless asked for."""
    given = {name: value for name, value in asked.items() if value is not None}
    return make_settings(**{"batch_size": max(1, min(_BATCH_SIZE, most)), "seconds": seconds, **given})


def show(result: Recommendation) -> None:
    """Print what to do, the predictions, and what goes with them."""
    show_rows(result)
    for name, reason in result.skipped.items():
        click.echo(f"skipped {name}: {reason}")
    say(RULE)
    if result.settings["stored_size"] < stored_size(result.settings["size"]):
        say(RISK)


def show_rows(result: Recommendation, *, told: bool = False) -> None:
    """The answer, unless it is `told` that the machine was busy, and the table."""
    others = other_cpu(result.settings)
    if not told:
        say(" ".join(_answer(result, result.rows, others)))
    click.echo()
    table(result.rows, None if is_disturbed(others) else advised(result.rows)).show()
    large = [way(row) for row in result.rows if not fits_memory(row, result.inputs)]
    if large:
        say(f"Larger than half of the memory, and so read from the disk in every epoch: {', '.join(large)}.")
    click.echo()


def _answer(found: Recommendation, rows: Sequence[Row], others: float | None) -> list[str]:
    """What to do, of what was predicted or of what came of it."""
    return answer(
        rows,
        accelerator=found.inputs.accelerator(found.settings["trainer"]),
        images=found.inputs.train_images,
        repeats=max(2, found.settings["repeats"]),  # a single turn has no range, and is better than no answer
        others=others,
        today=rows[0],
    )


def table(rows: Sequence[Row], best: Row | None) -> Table:
    """A line for each way to feed the trainer; the advised one in bold."""
    lines = [
        [
            "imagefolder"
            if row.backend == "imagefolder"
            else "loaders.build"
            if row.data == RAW_TREE
            else row.data,
            "-" if row.busy is None else percent(row.busy.median),
            f"{row.rate.median:,.0f}",
            f"{row.loader.median:,.0f}",
            "-" if row.cold is None else f"{row.cold.median:,.0f}",
            "-" if row.size_bytes is None else human_bytes(row.size_bytes),
            duration(row.convert_s),
        ]
        for row in rows
    ]
    titles = ("from", "accelerator busy", "images/s", "loader alone", "cold disk", "size", "convert")
    return Table(titles, lines, bold=[at for at, row in enumerate(rows) if row is best])


def conditions(result: Recommendation) -> list[str]:
    """Under which conditions the figures hold."""
    settings, inputs = result.settings, result.inputs
    others = other_cpu(settings)
    busy = "" if others is None or is_disturbed(others) else f", other processes {others:.0%} of the CPUs"
    side = settings["size"]
    return [
        f"Data {settings['source']}: {_given(inputs)}; trainer {settings['trainer']}; batch "
        f"{settings['batch_size']} of {side}x{side}, augment {settings['augment']}; stored at most "
        f"{settings['stored_size']} px, quality {settings['quality']}. Predicted from a sample of "
        f"{counted(settings['sample_pictures'], 'picture')}; median of "
        f"{counted(settings['repeats'], 'repeat')}, page cache warm, checksums not compared{busy}.",
        f"{machine_line(result.machine, _VERSIONS)}.",
    ]


def _given(inputs: Inputs) -> str:
    gpus = "" if inputs.gpus == 1 else f"{inputs.gpus} x "
    return (
        f"{counted(inputs.images, 'picture')}, {counted(inputs.cpus, 'CPU')}, accelerator {gpus}"
        f"{number(inputs.trainer_images_per_s)} images/s, disk {number(inputs.disk_bytes_per_s / 1e6)} MB/s"
    )


def convert_what_pays(
    src: Location,
    dst: Location | None,
    max_bytes: str | None,
    formats: str | None,
    yes: bool,
    converting: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Choose what suits this machine, ask, convert, measure and say what that brought.

    Nothing is converted where another loader of the tree is as fast. Killed, the same call goes on. It ends
    with exit code 1 where the trainer then gets less, or more bytes are taken than asked.

    Args:
        dst: data/FORMAT by default.
        max_bytes: what it may take, as in 20GB; None: what is free.
        yes: convert without asking.
        converting: values of the options CONVERTING.
        asked: values of the options MEASURING.
    """
    tree, target = _on_disk("SRC", src), None if dst is None else resolve_place(_on_disk("DST", dst))
    places = {name: target or DATA / name for name in chosen_formats(formats)}
    if max_bytes is not None:
        parse_bytes(max_bytes)  # an error now, not after minutes
    if not yes and not sys.stdin.isatty():
        raise SettingError("there is no terminal to ask at before converting; give --yes to convert at once")
    splits, overwrite = converting["splits"], converting["overwrite"]
    parse_splits(splits)
    parse_share("max_rejects", converting["max_rejects"])
    scan = scan_tree(tree)
    # a picture of the sample may be damaged, and left out by the conversion
    settings = measuring(asked, train_images(scan) // 2, QUICK_S)
    if splits != DEFAULT_SPLITS:
        plan_conversion(scan.samples, Recipe(format=FORMAT_NAMES[0], splits=splits))

    every = (find_begun(place, scan, name, settings.size) for name, place in places.items())
    begun = None if overwrite else next((found for found in every if found is not None), None)
    if begun is None:
        if target is not None:  # else it is not known yet which it will be
            _check_free(scan, target, overwrite)
        limit_bytes, limit = _limit(next(iter(places.values())), max_bytes)
        recipe, fitting = choose(scan, settings.size, tuple(places), limit_bytes, limit)
    else:
        recipe, fitting = begun, (begun.format,)
        if not is_converted(places[begun.format]):
            what = f"a conversion to {begun.format}, {stored_words(begun)}"
            note(f"{places[begun.format]}: {what}, is unfinished; continuing it")
    found = _recommend(scan, replace(recipe, splits=DEFAULT_SPLITS), settings, fitting)
    name = recipe.format
    if begun is None:
        best = advised(found.rows)
        note(" ".join(_answer(found, found.rows, None)))
        if best is None:
            return
        click.echo()
        table(found.rows, best).show()
        name = best.data
        risk = "" if recipe.size == stored_size(settings.size) else f" {RISK}"
        words = stored_words(replace(recipe, format=name))
        click.echo()
        note(f"Pictures are stored whole, their shorter side {words}, within {limit}.{risk}")
        _check_free(scan, places[name], overwrite)
        if not yes and not click.confirm(f"Convert to {name}, into {places[name]}?", default=True):
            note("nothing was converted")
            return
    recipe, place = replace(recipe, format=name), places[name]
    _carry_out(tree, place, recipe, found, settings, converting, max_bytes)


def _recommend(scan: Scan, recipe: Recipe, settings: Settings, formats: tuple[str, ...]) -> Recommendation:
    """DatasetError if no format could be measured: then nothing is known of what converting brings."""
    with ProgressBar("recommend", "run") as bar:
        found = recommend(scan, recipe, settings, formats=formats, on_progress=bar, **QUICK)
    for name, reason in found.skipped.items():
        warn(f"{name} is left out: {reason}")
    if all(row.data == RAW_TREE for row in found.rows):
        raise DatasetError(f"no format could be measured: {'; '.join(found.skipped.values())}")
    if busy := disturbance(other_cpu(found.settings), ""):
        warn(busy)
    return found


def _carry_out(
    tree: Path,
    place: Path,
    recipe: Recipe,
    found: Recommendation,
    settings: Settings,
    converting: dict[str, Any],
    max_bytes: str | None,
) -> None:
    """Convert as `precache convert` does, with all that it says; measure, and say what that brought."""
    stored = {"format_name": recipe.format, "size": str(recipe.size), "quality": recipe.quality}
    invoke = click.get_current_context().invoke
    done: Conversion = invoke(convert, src=tree, dst=place, **stored, **converting)
    whole = done.converted == done.manifest.samples  # else an earlier call did some of it
    with ProgressBar("measure", "run") as bar:
        proof = prove(tree, place, found, settings, done.elapsed_s if whole else None, bar)
    disturbed = disturbance(proof.other_cpu, "")
    if disturbed:
        warn(disturbed)
    line, converted = proof.rows[-2:]
    first, *others = _answer(found, proof.rows, None)
    if proof.is_loss:
        others.append(
            f"Converting lost: from {recipe.format} the trainer gets {converted.rate.median:,.0f} images/s, "
            f"by {way(line)} from the tree {line.rate.median:,.0f}."
        )
    for text in (f"Measured: {first}", *others):
        note(text)
    click.echo("\nMeasured:")
    table(proof.rows, None).show()
    click.echo("Predicted:")
    table(proof.predicted, None).show()
    click.echo()
    for text in conditions(found):
        say(text)
    off = f"Predicted images/s were {proof.median_error:.0%} off in the median."
    note(f"{off} {place / AUTO_NAME} has every figure.")
    call = f"batch_size={settings.batch_size}, size={settings.size}, augment='train'"
    note(f"To train from it: loaders.build({str(place)!r}, {call})")
    takes = done.manifest.stored_bytes
    if max_bytes is not None and takes > parse_bytes(max_bytes):
        said = f"{place}: takes {human_bytes(takes)}, more than --max-bytes {max_bytes}"
        click.echo(printable(f"{said}; make room, or remove it"), err=True)
        raise click.exceptions.Exit(1)
    if proof.is_loss and not disturbed:
        raise click.exceptions.Exit(1)


def _check_free(scan: Scan, place: Path, overwrite: bool) -> None:
    """Raise an error, before minutes are spent, if nothing can be converted into `place`."""
    check_apart(scan.source, place)
    if not overwrite and not is_untouched(place):
        raise DatasetError(
            f"{place}: holds a conversion of other pictures, or with other settings; choose another DST, or "
            f"pass --overwrite to replace it"
        )
    check_empty(place)


def _on_disk(name: str, place: Location) -> Path:
    if isinstance(place, Url):
        raise SettingError(
            f"{place}: precache auto measures on a disk, so {name} has to lie on one; 'bench recommend URL' "
            f"advises, 'precache convert' reads and writes URLs"
        )
    return place


def _limit(place: Path, max_bytes: str | None) -> tuple[float, str]:
    """Bytes that what lies in `place` may take, and what limits it."""
    folder = place.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    asked = None if max_bytes is None else parse_bytes(max_bytes)
    if asked is not None and asked <= free:
        return asked, f"the {max_bytes} of --max-bytes"
    return free, f"the {human_bytes(free)} that are free"
