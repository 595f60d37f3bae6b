"""From a raw tree to a converted dataset: scan, plan, write shards, commit the manifest.

While a conversion runs, DST holds `journal.jsonl`: a first line that says what is being made, then
a line per finished shard. The same command continues an unfinished run from it. The manifest is
written last, the journal removed after it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precache import executors, images
from precache.doctor import made_by
from precache.errors import DatasetError, ImageError, SettingError, check_range
from precache.formats import FORMATS, Sample
from precache.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    RejectedSample,
    ShardEntry,
    check_file,
    file_entry,
    is_converted,
    open_dataset,
    write_index,
    write_manifest,
)
from precache.plan import ConvertPlan, ShardPlan, plan_conversion
from precache.recipe import Recipe
from precache.source import Scan, scan_tree
from precache.storage import TEMPORARY_SUFFIX, fsync_folder

JOURNAL_NAME = "journal.jsonl"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one call of `convert` did.

    Attributes:
        manifest: of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        elapsed_s: wall time of this call.
    """

    manifest: Manifest
    converted: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Task:
    shard: ShardPlan
    source: str
    destination: Path
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished shard, as the journal records it; without files if every picture was rejected."""

    entry: ShardEntry
    rejected: tuple[RejectedSample, ...]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Conversion:
    """Convert the raw tree `source` into the folder `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers`.

    Args:
        workers: processes; default one per CPU, 0 for the calling process.
        overwrite: replace a destination that holds another conversion.
        on_progress: called with (pictures done, pictures in all), a few times a second.

    Raises:
        SourceError: no such tree, or none with class folders.
        DatasetError: the destination holds something else, or cannot be written.
        SettingError: a value is out of range, or one folder lies inside the other.
        WorkerError: a worker process died.
    """
    start_s = time.perf_counter()
    workers = executors.available_cpus() if workers is None else workers
    check_range("workers", workers, 0)
    source, destination = Path(source), Path(destination)
    scan = scan_tree(source)
    _check_apart(source, destination)
    if overwrite:
        _remove_ours(destination)
    elif is_converted(destination):
        manifest = open_dataset(destination).manifest
        _check_same(
            destination, _target(recipe, scan.digest()), _target(manifest.recipe, manifest.source_digest)
        )
        return Conversion(manifest, 0, time.perf_counter() - start_s)
    try:
        manifest, converted = _run(scan, recipe, destination, workers, on_progress)
    except OSError as error:
        raise DatasetError(
            f"{error.filename or destination}: cannot be written ({error.strerror}); finished shards "
            f"are kept: make room or fix permissions, then run the same command again"
        ) from error
    return Conversion(manifest, converted, time.perf_counter() - start_s)


def _run(
    scan: Scan, recipe: Recipe, destination: Path, workers: int, on_progress: Progress | None
) -> tuple[Manifest, int]:
    """Write what is missing, commit the manifest; (manifest, pictures converted by this call)."""
    finished = _open_journal(destination, _target(recipe, scan.digest()))
    plan = plan_conversion(scan.samples, recipe)
    waiting = [shard for shard in plan.shards if shard.name not in finished]
    total = len(scan.samples)
    done = total - sum(len(shard.samples) for shard in waiting)

    def report(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    report(0)
    converted = 0
    if waiting:
        tasks = [_Task(shard, str(scan.root), destination, recipe) for shard in waiting]
        with open(destination / JOURNAL_NAME, "a", encoding="utf-8") as journal:
            for result in executors.run(_write_shard, tasks, workers, report):
                _append(journal, asdict(result))
                finished[result.entry.name] = result
                converted += result.entry.samples
    manifest = _commit(scan, plan, finished, destination)
    (destination / JOURNAL_NAME).unlink()
    fsync_folder(destination)
    return manifest, converted


def _target(recipe: Recipe, source_digest: str) -> dict[str, Any]:
    """What a conversion makes, as its journal's first line says it."""
    return {"recipe": recipe.to_json(), "source_digest": source_digest}


def _write_shard(task: _Task, tick: Callable[[], None]) -> _Done:
    """Decode, resize and write one shard; runs in a worker."""
    rejected: list[RejectedSample] = []
    base = task.destination / task.shard.name
    paths = FORMATS[task.recipe.format].write_shard(base, _samples(task, rejected, tick), task.recipe)
    count = len(task.shard.samples) - len(rejected)
    if count == 0:
        for path in paths:
            path.unlink()
        paths = []
    files = tuple(file_entry(path) for path in paths)
    entry = ShardEntry(task.shard.name, task.shard.split, count, files)
    return _Done(entry, tuple(rejected))


def _samples(task: _Task, rejected: list[RejectedSample], tick: Callable[[], None]) -> Iterator[Sample]:
    for ref in task.shard.samples:
        path = os.path.join(task.source, ref.path)
        try:
            image = images.decode(images.read_bytes(path), path)
        except ImageError as error:
            rejected.append(RejectedSample(ref.id, ref.path, error.reason))
        else:
            pixels = images.fit(image, task.recipe.size)
            yield Sample(ref.id, ref.label, pixels, ref.path, image.size)
        tick()


def _commit(scan: Scan, plan: ConvertPlan, finished: dict[str, _Done], destination: Path) -> Manifest:
    """Check that the counts add up, then write the index and, last, the manifest."""
    done = [finished[shard.name] for shard in plan.shards]
    rejected = sorted((sample for result in done for sample in result.rejected), key=lambda r: r.id)
    rejected_ids = {sample.id for sample in rejected}
    kept = [
        (shard.split, ref) for shard in plan.shards for ref in shard.samples if ref.id not in rejected_ids
    ]
    written = sum(result.entry.samples for result in done)
    if not written == len(kept) == len(scan.samples) - len(rejected):
        raise DatasetError(
            f"{scan.root}: {len(scan.samples):,} pictures scanned, but {written:,} converted "
            f"and {len(rejected):,} rejected; this is a defect, please report it"
        )
    if not kept:
        raise DatasetError(
            f"{scan.root}: none of its {len(scan.samples):,} pictures can be converted; "
            f"the first one, {rejected[0].path}, {rejected[0].reason}"
        )
    per_class = {shard.split: [0] * len(scan.classes) for shard in plan.shards}
    for split, ref in kept:
        per_class[split][ref.label] += 1
    ids = np.array([ref.id for _, ref in kept], np.int64)
    labels = np.array([ref.label for _, ref in kept], np.int64)
    manifest = Manifest(
        recipe=plan.recipe,
        made_by=made_by(),
        source_digest=scan.digest(),
        source_bytes=sum(ref.bytes for ref in scan.samples),
        classes=scan.classes,
        samples_per_class={split: tuple(counts) for split, counts in per_class.items()},
        shards=tuple(result.entry for result in done if result.entry.samples),
        index=write_index(destination, ids, labels),
        rejected=tuple(rejected),
        ignored=tuple((ignored.path, ignored.reason) for ignored in scan.ignored),
    )
    write_manifest(destination, manifest)
    return manifest


def _check_apart(source: Path, destination: Path) -> None:
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise SettingError(
            f"{destination}: lies inside the source tree {source}, or the other way round; "
            f"choose a DST beside it"
        )


def _open_journal(destination: Path, target: dict[str, Any]) -> dict[str, _Done]:
    """Start a journal in `destination`, or return the intact shards that an earlier run left."""
    journal_path = destination / JOURNAL_NAME
    destination.mkdir(parents=True, exist_ok=True)
    if not journal_path.exists():
        if any(destination.iterdir()):
            raise DatasetError(
                f"{destination}: exists, is not empty and holds no conversion of ours; "
                f"choose another DST or empty it yourself"
            )
        with open(journal_path, "w", encoding="utf-8") as journal:
            _append(journal, target)
        fsync_folder(destination)
        return {}
    for leftover in destination.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink()
    lines = _read_journal(journal_path)
    _check_same(destination, target, lines[0] if lines else target)
    with open(journal_path, "w", encoding="utf-8") as journal:
        _append(journal, target)
        finished = {}
        for line in lines[1:]:
            result = _decode_done(line)
            if all(check_file(destination, file) is None for file in result.entry.files):
                finished[result.entry.name] = result
                _append(journal, line)
    return finished


def _append(journal: Any, content: dict[str, Any]) -> None:
    journal.write(json.dumps(content) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def _read_journal(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the last line of a run that was killed while it wrote it
    return lines


def _decode_done(line: dict[str, Any]) -> _Done:
    entry = line["entry"]
    files = tuple(FileEntry(**file) for file in entry["files"])
    rejected = tuple(RejectedSample(**sample) for sample in line["rejected"])
    return _Done(ShardEntry(entry["name"], entry["split"], entry["samples"], files), rejected)


def _check_same(destination: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise unless the conversion in `destination` is of the same recipe and source."""
    differences = [
        f"{name} {found['recipe'].get(name)}, asked for {value}"
        for name, value in wanted["recipe"].items()
        if found["recipe"].get(name) != value
    ]
    if found["source_digest"] != wanted["source_digest"]:
        differences.append("another source tree, or one that changed since")
    if differences:
        raise DatasetError(
            f"{destination}: holds another conversion ({'; '.join(differences)}); "
            f"choose another DST, or pass --overwrite to replace it"
        )


def _remove_ours(destination: Path) -> None:
    """Remove a conversion, finished or not, and nothing that is not part of one."""
    if not is_converted(destination) and not (destination / JOURNAL_NAME).exists():
        return
    (destination / MANIFEST_NAME).unlink(missing_ok=True)  # first: from now on it is no dataset
    suffixes = {s for f in FORMATS.values() for s in (f.suffix, f.index_suffix) if s is not None}
    for path in destination.iterdir():
        if path.suffix in suffixes | {TEMPORARY_SUFFIX} or path.name == JOURNAL_NAME:
            path.unlink()
