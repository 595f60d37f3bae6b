"""Check, before training, that the converter's own decoder can decode every picture of a raw tree."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from precache import engines
from precache.conversion.shard_writer import predict_bytes, predict_seconds
from precache.dataset.index import Rejected
from precache.dataset.manifest import is_converted
from precache.dataset.unfinished import unfinished_error
from precache.errors import ImageError, SettingError, SourceError, check_range, os_errors_as, shell_command
from precache.pictures import images
from precache.pictures.kinds import kind_without_decoder
from precache.pictures.reading import MAX_PIXELS
from precache.plan import split_rows
from precache.recipe import Recipe
from precache.reporting import Progress, no_progress, progress_counter, warn
from precache.sources.base import SampleRef, Scan, Source, warn_of_undecodable
from precache.sources.rejected_list import check_writable, default_list_path, write_list
from precache.sources.tree import scan_tree
from precache.storage.urls import local_path, source_path

_TASK_PICTURES = 64


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of `check`.

    Attributes:
        pictures: number of pictures that were checked.
        rejected: pictures that cannot be decoded, in the order of the scan.
        list_file: file in which they are listed, without those that lack only a decoder here.
        deeper: number of pictures that lie in a folder of their class folder.
        classes: number of classes.
        splits: number of pictures of each split.
        shards_bytes: bytes that the pictures will take about, converted to shards.
        shards_s: seconds that converting them to shards takes at least, in as many processes.
    """

    pictures: int
    rejected: tuple[Rejected, ...]
    list_file: Path
    deeper: int
    classes: int
    splits: dict[str, int]
    shards_bytes: int
    shards_s: float


def check(
    source: str | os.PathLike[str],
    *,
    list_file: str | os.PathLike[str] | None = None,
    class_depth: int | None = None,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> CheckReport:
    """Decode every picture of the raw tree `source`, and list the undecodable ones.

    Loaders with `Reading(on_error="skip")` leave these out. Each run replaces the list at its end;
    `precache.sources.rejected_list` describes it.

    Args:
        list_file: file for the list; default `source` with `.rejected.csv`, where loaders look.
        class_depth: depth of the class folders below `source`, as for `precache convert`; default 1.
        max_pixels: most pixels of a picture; a larger one counts as undecodable.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures done, pictures in all), a few times a second.

    Raises:
        DatasetError: `source` holds an unfinished conversion.
        SourceError: `source` is not an image tree, something of it cannot be read, or `list_file` exists and
            is not such a list.
        SettingError: `source` is a URL; `list_file` lies in the tree or cannot be written; or `class_depth`
            is negative.
        WorkerError: a worker process died.
    """
    tree = source_path(source)
    workers = engines.worker_count(workers)
    max_pixels = check_range("max_pixels", max_pixels, 1)
    depth = check_range("class_depth", 1 if class_depth is None else class_depth, 0)
    if is_converted(tree):
        command = shell_command("precache verify", tree)
        raise SourceError("is a converted dataset", path=tree, remedy=f"check it with: {command}")
    if (unfinished := unfinished_error(tree)) is not None:
        raise unfinished
    scan = scan_tree(tree, depth)
    for warning in scan.warnings:
        warn(warning)
    warn_of_undecodable(scan)
    target = default_list_path(scan.root) if list_file is None else local_path(list_file)
    check_writable(target, scan.root)
    report = progress_counter(on_progress, len(scan.samples))
    tasks = -(-len(scan.samples) // _TASK_PICTURES)
    rejected: list[Rejected] = []
    with closing(engines.run(_decode_all, _tasks(scan, max_pixels), min(workers, tasks), report)) as results:
        for undecodable in results:
            rejected += undecodable
    rejected.sort(key=lambda picture: picture.id)
    with os_errors_as(SettingError, "cannot be written", "choose another with --list", path=target):
        # a missing decoder is no property of the picture, and may be installed later
        write_list(target, [picture for picture in rejected if not kind_without_decoder(picture.reason)])
    recipe = Recipe(format="shards")
    return CheckReport(
        pictures=len(scan.samples),
        rejected=tuple(rejected),
        list_file=target,
        deeper=scan.deeper,
        classes=len(scan.classes),
        splits={split: len(rows) for split, rows in split_rows(scan.samples, recipe)},
        shards_bytes=predict_bytes(scan, recipe),
        shards_s=predict_seconds(scan, recipe) / max(1, workers),
    )


@dataclass(frozen=True, slots=True)
class _CheckTask:
    source: Source
    samples: tuple[SampleRef, ...]
    max_pixels: int

    @property
    def name(self) -> str:
        """Name in error messages: its first picture and what follows."""
        return f"{self.source.where(self.samples[0])} and what follows it"


def _tasks(scan: Scan, max_pixels: int) -> Iterator[_CheckTask]:
    """Yield the tasks one at a time, because each holds the paths of its pictures."""
    for start in range(0, len(scan.samples), _TASK_PICTURES):
        rows = range(start, min(start + _TASK_PICTURES, len(scan.samples)))
        yield _CheckTask(scan.source, tuple(scan.samples[row] for row in rows), max_pixels)


def _decode_all(task: _CheckTask, tick: engines.Ticks) -> list[Rejected]:
    """Return the pictures of `task` that cannot be decoded."""
    rendering = images.Rendering(size=1, max_pixels=task.max_pixels)  # decoded in full; the size is not used
    rejected = []
    for unit, ref in enumerate(task.samples):
        path = task.source.where(ref)
        try:
            if unit in tick.fatal:
                raise ImageError(path, engines.KILLED)
            tick.begin(unit)
            data = task.source.read(ref, task.max_pixels)
            with ExitStack() as locks:
                images.decode_for(data, path, rendering, locks)
        except ImageError as error:
            rejected.append(Rejected(ref.path, error.reason_and_remedy, ref.id, ref.bytes, ref.modified_ns))
        tick()
    return rejected
