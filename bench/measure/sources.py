"""The same pictures from every kind of source: are the shards the same, and how fast is each beside the tree?

    python -m bench.measure.sources data/raw

Sources are made of the tree first, unmeasured; then they take turns. The pictures are in the page cache.
"""

import csv
import io
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from rich.table import Table

from bench.machine.hardware import describe_machine, versions_of
from bench.machine.others import OtherProcesses
from bench.report import stats
from precache import SourceOptions, convert, open_dataset
from precache.console.commandline import ProgressBar
from precache.console.tables import new_console
from precache.errors import MissingDependencyError, check_choice, check_range
from precache.executors import available_cpus
from precache.recipe import DEFAULT_SIZE, FORMAT_NAMES, Recipe
from precache.sources.base import Scan
from precache.sources.tree import scan_tree

TREE = "tree"
_TAR_SAMPLES = 2000
Made: TypeAlias = tuple[Any, SourceOptions]
"""What `precache.convert` takes."""


@dataclass(frozen=True, slots=True)
class SourceTrial:
    """One kind of source.

    Attributes:
        images_per_s: of whole conversions.
        ratio: images/s beside the tree's, turn by turn.
        cpu_ms: CPU time for a picture, of all processes: beside other programs it says more than the rate.
        cpu_ratio: the same beside the tree's.
        same: whether every shard has the bytes that the tree's has.
    """

    name: str
    images_per_s: stats.Estimate
    ratio: stats.Estimate
    cpu_ms: stats.Estimate
    cpu_ratio: stats.Estimate
    same: bool


@dataclass(slots=True)
class _Turns:
    images_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    same: bool = True


def from_tree(scan: Scan, folder: Path) -> Made:
    """The tree as it is."""
    return scan.folder, SourceOptions()


def from_csv(scan: Scan, folder: Path) -> Made:
    """A CSV of paths and class names."""
    with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "class"))
        writer.writerows(_rows(scan))
    return folder / "labels.csv", _of_table(scan)


def from_jsonl(scan: Scan, folder: Path) -> Made:
    """The same as JSON lines."""
    with open(folder / "labels.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"path": path, "class": name}) + "\n" for path, name in _rows(scan))
    return folder / "labels.jsonl", _of_table(scan)


def from_parquet(scan: Scan, folder: Path) -> Made:
    """The same as Parquet."""
    import pyarrow
    from pyarrow import parquet

    paths, names = zip(*_rows(scan), strict=True)
    parquet.write_table(pyarrow.table({"path": paths, "class": names}), folder / "labels.parquet")
    return folder / "labels.parquet", _of_table(scan)


def from_tar(scan: Scan, folder: Path) -> Made:
    """All of it in one folder of a tar."""
    with tarfile.open(folder / "photos.tar", "w") as tar:
        tar.add(scan.folder, "photos")
    return folder / "photos.tar", SourceOptions()


def from_tar_gz(scan: Scan, folder: Path) -> Made:
    """The same, compressed: it is unpacked once a conversion."""
    with tarfile.open(folder / "photos.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(scan.folder, "photos")
    return folder / "photos.tar.gz", SourceOptions()


def from_zip(scan: Scan, folder: Path) -> Made:
    """The same as a zip, each picture compressed."""
    with zipfile.ZipFile(folder / "photos.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for sample in scan.samples:
            packed.write(scan.folder / sample.path, f"photos/{sample.path}")
    return folder / "photos.zip", SourceOptions()


def from_webdataset(scan: Scan, folder: Path) -> Made:
    """Tars of samples, each a picture and its label."""
    for start in range(0, len(scan.samples), _TAR_SAMPLES):
        with tarfile.open(folder / f"photos-{start // _TAR_SAMPLES:06d}.tar", "w") as tar:
            for row in range(start, min(start + _TAR_SAMPLES, len(scan.samples))):
                sample = scan.samples[row]
                path = Path(sample.path)
                key = str(path.with_name(path.stem.replace(".", "_")))
                tar.add(scan.folder / path, f"{key}{path.suffix or '.jpg'}")
                member = tarfile.TarInfo(f"{key}.cls")
                label = str(sample.label).encode()
                member.size = len(label)
                tar.addfile(member, io.BytesIO(label))
    return folder, SourceOptions()


def from_torchvision(scan: Scan, folder: Path) -> Made:
    """torchvision's ImageFolder of the tree, with the pictures that the scan finds."""
    from torchvision.datasets import ImageFolder

    known = {str(scan.folder / sample.path) for sample in scan.samples}
    return ImageFolder(scan.folder, is_valid_file=known.__contains__), SourceOptions()


def from_hf(scan: Scan, folder: Path) -> Made:
    """What Hugging Face's library saves of the files, in it."""
    import datasets

    datasets.disable_progress_bars()
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(scan.classes))}

    def rows() -> Iterator[dict[str, Any]]:
        for sample in scan.samples:
            content = (scan.folder / sample.path).read_bytes()
            yield {"image": {"bytes": content, "path": None}, "label": sample.label}

    made = datasets.Dataset.from_generator(
        rows, features=datasets.Features(features), cache_dir=str(folder / "cache")
    )
    made.save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}", SourceOptions()


def _rows(scan: Scan) -> Iterator[tuple[str, str]]:
    return ((sample.path, scan.classes[sample.label]) for sample in scan.samples)


def _of_table(scan: Scan) -> SourceOptions:
    return SourceOptions(root=str(scan.folder), label="class", target="class")


SOURCES: dict[str, Callable[[Scan, Path], Made]] = {
    TREE: from_tree,
    "csv": from_csv,
    "jsonl": from_jsonl,
    "parquet": from_parquet,
    "tar": from_tar,
    "tar.gz": from_tar_gz,
    "zip": from_zip,
    "webdataset": from_webdataset,
    "torchvision": from_torchvision,
    "hf": from_hf,
}
"""Name -> function that makes the source of a tree's scan, in a folder of its own. ImportError: not here."""


def compare_sources(
    tree: Path, recipe: Recipe, *, names: Iterable[str], workers: int, repeats: int, scratch: Path
) -> tuple[list[SourceTrial], dict[str, str]]:
    """Convert the pictures of `tree` from each source; and the names of those that cannot be made, and why.

    Raises:
        SourceError: no such tree, or it has splits of its own.
        SettingError: an unknown name.
    """
    scan = scan_tree(tree)
    for row in range(len(scan.samples)):  # into the page cache
        scan.source.read(scan.samples[row], recipe.max_pixels)
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-sources-") as folder:
        made: dict[str, Made] = {}
        for name in dict.fromkeys((TREE, *names)):
            check_choice("source", name, SOURCES)
            (Path(folder) / name).mkdir()
            try:
                made[name] = SOURCES[name](scan, Path(folder) / name)
            except (ImportError, MissingDependencyError) as error:
                skipped[name] = str(error)
        turns = {name: _Turns() for name in made}
        with ProgressBar("sources", "run") as bar:
            for turn in range(repeats):
                _take_turn(made, turns, recipe, workers, Path(folder) / "out")
                bar(turn + 1, repeats)
    tree_turns = turns[TREE]
    trials = [
        SourceTrial(
            name,
            stats.estimate(t.images_per_s),
            stats.ratio(t.images_per_s, tree_turns.images_per_s),
            stats.estimate(t.cpu_ms),
            stats.ratio(t.cpu_ms, tree_turns.cpu_ms),
            t.same,
        )
        for name, t in turns.items()
    ]
    return trials, skipped


def _take_turn(
    made: dict[str, Made], turns: dict[str, _Turns], recipe: Recipe, workers: int, out: Path
) -> None:
    """Convert from each source once, the tree first."""
    expected: Any = None
    for name, (source, options) in made.items():
        before_s = _cpu_s()
        done = convert(source, out, recipe, workers=workers, max_rejects=1.0, options=options)
        turns[name].images_per_s.append(done.converted / done.elapsed_s)
        turns[name].cpu_ms.append((_cpu_s() - before_s) * 1000 / done.converted)
        shards = open_dataset(out).manifest.shards  # with the checksum of each file
        expected = shards if expected is None else expected
        turns[name].same &= shards == expected
        shutil.rmtree(out)


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def show(trials: Sequence[SourceTrial], skipped: dict[str, str], conditions: str) -> None:
    """Print them."""
    console = new_console()
    table = Table(box=None)
    for title in ("source", "images/s", "beside the tree", "CPU ms", "beside the tree", "same shards"):
        table.add_column(title, justify="left" if title == "source" else "right")
    for trial in trials:
        rate, cpu = f"{trial.images_per_s.median:,.0f}", f"{trial.cpu_ms.median:.2f}"
        same = "yes" if trial.same else "NO"
        table.add_row(trial.name, rate, _shown(trial.ratio), cpu, _shown(trial.cpu_ratio), same)
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    console.print(conditions)


def _shown(ratio: stats.Estimate) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


@click.command()
@click.argument("tree", type=click.Path(path_type=Path))
@click.option("--source", "names", help=f"Some of: {', '.join(SOURCES)}.  [default: all]")
@click.option("--format", "format_name", default="shards", show_default=True, help=", ".join(FORMAT_NAMES))
@click.option("--size", default=DEFAULT_SIZE, show_default=True, help="As of precache convert.")
@click.option("--repeats", default=3, show_default=True, help="Turns.")
@click.option("--workers", default=available_cpus(), help="Worker processes.  [default: one per CPU]")
@click.option("--scratch", type=click.Path(path_type=Path), default=Path("."), help="Folder to convert into.")
def main(
    tree: Path, names: str | None, format_name: str, size: int, repeats: int, workers: int, scratch: Path
) -> None:
    """Convert the pictures of TREE from every kind of source, and compare."""
    check_range("repeats", repeats, 1)
    others = OtherProcesses()
    recipe = Recipe(format=format_name, size=size)
    asked = SOURCES if names is None else [name.strip() for name in names.split(",")]
    trials, skipped = compare_sources(
        tree, recipe, names=asked, workers=workers, repeats=repeats, scratch=scratch
    )
    machine = describe_machine(torch.device("cpu"))
    versions = ", ".join(versions_of(machine, ("pillow", "simplejpeg")))
    share = others.share()
    busy = "" if share is None else f"; other processes took {share:.0%} of the CPUs"
    settings = f"{tree.name} to {recipe.to_flags()}, {workers} workers, median (range) of {repeats} turns"
    show(
        trials, skipped, f"{settings}, files in memory; {machine['cpu']}, {versions}, {machine['date']}{busy}"
    )


if __name__ == "__main__":
    main()
