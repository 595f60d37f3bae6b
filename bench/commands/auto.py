"""The command `precache auto`: choose a format, convert to it, and measure what that brought.

It is registered with `precache` by the name of this module, for `precache` imports nothing of `bench`.
"""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from bench.commands.hardware import TABLE_WIDTH
from bench.commands.options import PLACE
from bench.commands.recommend import (
    MEASURING,
    QUICK_FORMATS,
    check_table,
    chosen_formats,
    conditions,
    make_spec,
)
from bench.measure import automatic
from bench.measure.automatic import Proof
from bench.measure.begun import Begun, find_begun, read_report, store
from bench.measure.recommendation import Recommendation, recommend, train_images
from bench.measure.sampling import Converted, RecommendSpec
from bench.measure.trainers import EPILOG
from bench.report import choice as rules
from bench.report import forecast as model
from bench.report.advice import accelerator, answer, is_unclear
from bench.report.choice import Setting
from bench.report.forecast import AS_IT_IS
from bench.report.trust import disturbance, other_cpu
from precache.cli import DATA, RAW, convert
from precache.console import commandline
from precache.console.commandline import (
    ProgressBar,
    gathered,
    human_bytes,
    note,
    parse_bytes,
    parse_share,
    printable,
)
from precache.console.notices import warn
from precache.console.tables import new_console
from precache.convert import Conversion
from precache.destination import AUTO_NAME, is_untouched, resolve
from precache.errors import DatasetError, SettingError, check_choice
from precache.journal import check_empty
from precache.plan import plan_conversion
from precache.recipe import DEFAULT_SPLITS, FORMAT_NAMES, Recipe, parse_splits
from precache.sources.base import Scan, check_apart
from precache.sources.tree import scan_tree
from precache.sources.walk import Scanning
from precache.storage.urls import Location, Url

_MOST_BATCH = 64
_MEASURED = {name: MEASURING[name] for name in MEASURING if name not in ("stored_size", "quality")}
_GIVEN = f"all, or some of: {', '.join(FORMAT_NAMES)}.  [default: {', '.join(QUICK_FORMATS)}]"

_CONVERTING = {
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


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for.

    Attributes:
        places: format -> where it would go.
        limit: what DST may take, as given; None: what is free.
        converting: options of `precache convert`.
    """

    tree: Path
    scan: Scan
    places: dict[str, Path]
    limit: str | None
    yes: bool
    converting: dict[str, Any]


@click.command(name="auto", cls=commandline.Command, epilog=EPILOG)
@click.argument("src", type=PLACE, default=RAW)
@click.argument("dst", type=PLACE, required=False)
@click.option("--max-bytes", metavar="SIZE", help="What DST may take, as in 20GB.  [default: what is free]")
@click.option("--format", "formats", help=_GIVEN)
@click.option("--yes", is_flag=True, help="Convert without asking.")
@gathered("converting", dict, _CONVERTING)
@gathered("asked", dict, _MEASURED)
def command(
    src: Location,
    dst: Location | None,
    max_bytes: str | None,
    formats: str | None,
    yes: bool,
    converting: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    """Convert the tree SRC (default data/raw) to what suits this machine, into DST (default data/FORMAT).

    A sample is measured, as by 'bench recommend'. What keeps most of the pictures within --max-bytes is
    chosen, you are asked, and after the conversion the trainer is fed from both. Nothing is converted where
    another loader of the tree is as fast. Killed, the same command goes on.
    """
    tree, target = _on_disk("SRC", src), None if dst is None else resolve(_on_disk("DST", dst))
    names = chosen_formats(formats, thorough=False)
    for name in names:
        check_choice("format", name, FORMAT_NAMES)
    if max_bytes is not None:
        parse_bytes(max_bytes)  # an error now, not after minutes
    if not yes and not sys.stdin.isatty():
        raise SettingError("there is no terminal to ask at before converting; give --yes to convert at once")
    parse_splits(converting["splits"])
    parse_share("max_rejects", converting["max_rejects"])
    spec = make_spec(False, {"quality": 95, **asked})
    scan = scan_tree(tree, how=Scanning(spec.workers))
    if asked["batch_size"] is None:
        # a picture of the sample may be damaged, and left out by the conversion
        spec = replace(spec, batch_size=max(1, min(_MOST_BATCH, train_images(scan) // 2)))
    places = {name: target or DATA / name for name in names}
    job = _Job(tree, scan, places, max_bytes, yes, converting)
    if converting["splits"] != DEFAULT_SPLITS:
        plan_conversion(scan.samples, Recipe(format=names[0], splits=converting["splits"]))
    every = (find_begun(place, scan, name, spec.size) for name, place in places.items())
    begun = next((found for found in every if found is not None), None)
    if begun is None or converting["overwrite"]:
        _begin(job, spec)
    else:
        _go_on(job, spec, begun)


def _begin(job: _Job, spec: RecommendSpec) -> None:
    """Choose, ask, convert, measure."""
    given = {*job.places.values()}
    if len(given) == 1:  # else it is not known yet which it will be
        _check_free(job, *given)
    choice = automatic.choose(job.scan, spec.size, tuple(job.places), *_room(job))
    found = _recommend(job, _stored_as(spec, choice.setting), choice.formats)
    _check_measured(found)
    chosen = model.best(found.predictions)
    if chosen.name in AS_IT_IS or is_unclear(chosen, found.turns):
        note(answer(found.predictions, found.inputs, found.turns))
        return
    for line in rules.why(chosen, found.predictions, found.inputs, choice, spec.size):
        note(line)
    place = job.places[chosen.name]
    _check_free(job, place)
    if not job.yes and not click.confirm(f"Convert to {chosen.name}, into {place}?", default=True):
        note("nothing was converted")
        return
    _carry_out(job, _stored_as(spec, choice.setting), found, chosen.name, place)


def _go_on(job: _Job, spec: RecommendSpec, begun: Begun) -> None:
    """Finish, and measure, what was begun before; say it again where that is done, too."""
    name, setting = begun.recipe.format, begun.setting
    spec = _stored_as(spec, setting)
    if begun.finished:
        _convert(job, spec, name, begun.place)  # which says if it is not what is asked for
        if (stored := read_report(begun.place, job.scan)) is not None:
            for line in stored["said"]:
                note(line)
            return
    else:
        note(f"{begun.place}: a conversion to {name}, {setting.words(name)}, was begun; going on with it")
    found = _recommend(job, spec, (name,))
    _check_measured(found)
    _carry_out(job, spec, found, name, begun.place)


def _check_measured(found: Recommendation) -> None:
    """Raise DatasetError if no format could be measured: then nothing is known of what converting brings."""
    if all(one.name in AS_IT_IS for one in found.predictions):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.skipped.items())
        raise DatasetError(f"no format could be measured: {reasons}")


def _recommend(job: _Job, spec: RecommendSpec, formats: tuple[str, ...]) -> Recommendation:
    with ProgressBar("recommend", "run") as bar:
        found = recommend(job.scan, spec, formats=formats, on_progress=bar)
    if any(one.name not in AS_IT_IS for one in found.predictions):
        for name, reason in found.skipped.items():
            warn(f"{name} is left out: {reason}")
    busy = disturbance(other_cpu(found.settings), "")
    if busy:
        warn(busy)
    return found


def _carry_out(job: _Job, spec: RecommendSpec, found: Recommendation, name: str, place: Path) -> None:
    """Convert, measure, say and store what came; exit code 1 where that is less, or larger, than asked."""
    result = _convert(job, spec, name, place)
    manifest = result.manifest
    converted = Converted(result.elapsed_s, manifest.stored_bytes)
    whole = result.converted == manifest.samples  # else an earlier call did some of it
    with ProgressBar("measure", "run") as bar:
        proof = automatic.prove(job.tree, place, found, name, spec, converted, whole, bar)
    said = [
        *proof.gain.words(accelerator(found.inputs)),
        f"Predictions were {proof.median_error:.0%} off in the median.",
    ]
    store(place, manifest.source_digest, found, proof, said)
    disturbed = disturbance(proof.other_cpu, "")
    if disturbed:
        warn(disturbed)
    for line in said[:-1]:
        note(line)
    show(found, proof)
    note(f"{said[-1]} {place / AUTO_NAME} has every figure.")
    settings = f"batch_size={spec.batch_size}, size={spec.size}, augment='train'"
    note(f"To train from it: loaders.build({str(place)!r}, {settings})")
    if job.limit is not None and manifest.stored_bytes > parse_bytes(job.limit):
        takes = f"{place}: takes {human_bytes(manifest.stored_bytes)}, more than --max-bytes {job.limit}"
        click.echo(printable(f"{takes}; make room, or remove it"), err=True)
        raise click.exceptions.Exit(1)
    if proof.gain.is_loss and not disturbed:
        raise click.exceptions.Exit(1)


def _convert(job: _Job, spec: RecommendSpec, name: str, place: Path) -> Conversion:
    """As `precache convert` does, with all that it says."""
    settings = {"format_name": name, "size": str(spec.stored_size), "quality": spec.quality}
    done: Conversion = click.get_current_context().invoke(
        convert, src=job.tree, dst=place, **settings, **job.converting
    )
    return done


def show(found: Recommendation, proof: Proof) -> None:
    """Predicted beside measured, and under which conditions."""
    console = new_console(width=TABLE_WIDTH)
    console.print(check_table(replace(found, checks=proof.checks)))
    console.print(conditions(found))


def _on_disk(name: str, place: Location) -> Path:
    if isinstance(place, Url):
        raise SettingError(
            f"{place}: precache auto measures on a disk, so {name} has to lie on one; 'bench recommend URL' "
            f"advises, 'precache convert' reads and writes URLs"
        )
    return place


def _stored_as(spec: RecommendSpec, setting: Setting) -> RecommendSpec:
    return replace(spec, stored_size=setting.stored_size, quality=setting.quality)


def _check_free(job: _Job, place: Path) -> None:
    """Raise an error, before minutes are spent, if nothing can be converted into `place`."""
    check_apart(job.scan.source, place)
    if not job.converting["overwrite"] and not is_untouched(place):
        raise DatasetError(
            f"{place}: holds a conversion of other pictures, or with other settings; choose another DST, or "
            f"pass --overwrite to replace it"
        )
    check_empty(place)


def _room(job: _Job) -> tuple[float, str]:
    """Bytes that DST may take, and what limits it."""
    folder = next(iter(job.places.values())).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    asked = None if job.limit is None else parse_bytes(job.limit)
    if asked is not None and asked <= free:
        return asked, f"the {job.limit} of --max-bytes"
    return free, f"the {human_bytes(free)} that are free"
