"""Convert a raw tree while training on it: the tree is read until its shards are finished, then the shards.

A process of the lowest priority runs `precache convert` on the CPU time that the training leaves, with the
same journal, lock and output bytes; if it is killed, the next run resumes it. Order, ids and states are those
of the raw tree before and after the change, so that each rank changes over on its own, at the start of an
epoch.
"""

import hashlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from loaders.batch import Batch, Request
from loaders.dataset import RAW, SplitData, depth_flags, open_split
from loaders.settings import read_launcher
from loaders.transfer import Pipeline
from precache.dataset.converted import ConvertedDataset, is_converted, open_dataset
from precache.errors import (
    DatasetError,
    PrecacheError,
    SettingError,
    check_open_files,
    printable,
    shell_command,
)
from precache.packages import child_environment
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import changed_pictures
from precache.sources.splits import is_list_file
from precache.sources.tree import list_tree, scan_tree, with_sizes
from precache.storage.urls import is_url

# the conversion ends with the process that started it, whose end of the pipe is closed then
_PROGRAM = """
import os, signal, threading
from precache.__main__ import entry_point

def watch():
    os.read(0, 1)  # not by `sys.stdin`, which a thread that reads it would keep from being closed
    os.kill(os.getpid(), signal.SIGTERM)

os.nice(19)
threading.Thread(target=watch, daemon=True).start()
entry_point()
"""
_ENDING_S = 10.0
_LOGGER = logging.getLogger(__name__)


def reconcile(
    recipe: Recipe | None, splits: str | os.PathLike[str] | None
) -> tuple[Recipe, str | os.PathLike[str] | None]:
    """Return the recipe and the splits of a raw tree, of which the user may have given either, or both.

    Raises:
        SettingError: they name different splits; or the splits are neither shares nor a list file.
    """
    recipe = recipe or Recipe(format="shards")
    if is_list_file(splits):
        return recipe, splits
    if splits is None:
        return recipe, None if recipe.splits == DEFAULT_SPLITS else recipe.splits
    split_recipe = replace(recipe, splits=splits)  # type: ignore[arg-type]  # it raises if this is no str
    if recipe.splits not in (DEFAULT_SPLITS, splits):
        raise SettingError(
            f"splits {splits!r}, but the recipe has {recipe.splits!r}", remedy="give one of the two"
        )
    return split_recipe, splits


class Conversion:
    """Conversion of a raw tree into a folder of shards, by a child process or by another run.

    Args:
        data: a split of the tree.
        split: the split's name.
        folder: folder for the shards; another run may have finished or begun it, or be writing it now.
        recipe: recipe of the conversion; default that of `precache convert --format shards`.
        rank: rank of this process, by default LOCAL_RANK if that is set; 0 starts the child process, the
            others wait for the shards.

    Attributes:
        folder: folder for the shards.

    Raises:
        SettingError: the shards could not be read in the order of the tree.
        DatasetError: the folder holds something converted from another source.
    """

    def __init__(
        self,
        data: SplitData,
        split: str,
        folder: str | os.PathLike[str],
        recipe: Recipe | None,
        rank: int = 0,
    ) -> None:
        recipe = recipe or Recipe(format="shards")
        if data.kind != RAW:
            raise SettingError(f"precache: {data.path} is converted already", remedy="leave precache out")
        if is_url(folder):
            raise SettingError(
                f"precache {folder}: give a folder", remedy="'precache push' takes it to a URL later"
            )
        if (recipe.format, recipe.channels) != ("shards", "rgb") or recipe.has_split_list:
            raise SettingError(
                f"precache by the recipe '{recipe.to_flags()}': only shards of RGB, split by shares or as "
                f"the tree is, are read in its place",
                remedy="run 'precache convert' with this recipe, and build on what it writes",
            )
        self.folder, self._data, self._split, self._recipe = Path(folder), data, split, recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._shards: SplitData | None = None
        tree = list_tree(str(data.path), data.datasets[0].class_depth)
        if hashlib.sha256(f"raw {tree.digest}".encode()).hexdigest() != data.whole.digest:
            self._give_up(f"is not read, for files of {data.path} came or went since the loader was built")
            return
        scan = with_sizes(tree)
        self._source_digest, self._modified_ns = scan.digest, scan.samples.modified_ns[data.ids[:]]
        if self.open_shards() is not None or is_converted(self.folder):
            return
        if read_launcher("LOCAL_RANK", rank, minimum=0) == 0:
            words = ["convert", str(data.path), str(folder), *shlex.split(recipe.to_flags())]
            words += depth_flags(data.datasets[0].class_depth)
            try:
                self._start_process(words)
            except OSError as error:
                check_open_files(error, error.filename)
                raise

    def _start_process(self, words: list[str]) -> None:
        """Start `precache` with the command line `words` as a child process."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=child_environment(),
        )
        self._end = weakref.finalize(self, _end_process, self._process)

    def close(self) -> None:
        """End the child process; its shards and its journal stay, and the next run resumes there."""
        if self._process is not None:
            self._end()

    def open_shards(self) -> SplitData | None:
        """Return the converted split, its samples in the order of the tree, if the shards are finished.

        Returns:
            None, too, if pictures of the tree changed since, or could not be decoded, which is logged once.

        Raises:
            DatasetError: the folder holds something converted from another source.
            PrecacheError: the child process failed; raised once, since another run may finish the shards.
        """
        if self._shards is not None:
            return self._shards
        if not is_converted(self.folder):
            process = self._process  # several threads may call this
            if process is None or not process.poll():
                return None
            self._process = None
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["it was killed"]
            raise PrecacheError(
                f"{self.folder} is not converted: {lines[-1].removeprefix('precache: error: ')}"
            )
        dataset = open_dataset(self.folder)
        manifest = dataset.manifest
        self._check_source(manifest.source_digest)
        if manifest.recipe != self._recipe:
            raise DatasetError(
                f"was converted by '{manifest.recipe.to_flags()}', asked for is '{self._recipe.to_flags()}'",
                path=self.folder,
                remedy="give its recipe, or name another folder",
            )
        if changed_picture := self._first_changed_picture(dataset):
            flags = (*shlex.split(self._recipe.to_flags()), *depth_flags(self._data.datasets[0].class_depth))
            command = shell_command("precache convert", self._data.path, self.folder, *flags, "--overwrite")
            self._give_up(
                f"is out of date, for pictures changed since it was converted (first: {changed_picture}); to "
                f"convert them again, run: {command}"
            )
            return None
        stored = open_split(self.folder, self._split)
        stored_ids, ids = stored.ids[:], self._data.ids[:]  # ids of a tree ascend
        positions = np.argsort(stored_ids)
        positions = positions[np.isin(stored_ids[positions], ids)]
        if missing := len(ids) - len(positions):
            command = shell_command(
                "precache check", self._data.path, *depth_flags(self._data.datasets[0].class_depth)
            )
            self._give_up(
                f"lacks {missing:,} pictures of {self._data.path}, which cannot be decoded; to train without "
                f'them, run: {command}, and build with reading=loaders.Reading(on_error="skip")'
            )
            return None
        self._shards = stored.select(positions).with_labels(self._data.classes, self._data.labels)
        return self._shards

    def try_open_shards(self) -> SplitData | None:
        """Return `open_shards()`; log its errors once instead of raising them, so that training goes on."""
        try:
            return None if self._given_up else self.open_shards()
        except PrecacheError as error:
            self._given_up = isinstance(error, DatasetError)
            _LOGGER.warning("%s; reading goes on from %s", error, printable(str(self._data.path)))
            return None

    def _give_up(self, reason: str) -> None:
        """Log why the shards are not used, and do not look at them again."""
        self._given_up = True
        tree = printable(str(self._data.path))
        _LOGGER.warning("%s; reading goes on from %s", printable(f"{self.folder}: {reason}"), tree)

    def _check_source(self, digest: str) -> None:
        """Raise DatasetError unless a scan's `digest` is that of the tree when the loader was built."""
        if digest != self._source_digest:
            raise DatasetError(
                f"holds something else than shards of {self._data.path} as it is now",
                path=self.folder,
                remedy="name another folder, or build on this one alone",
            )

    def _first_changed_picture(self, dataset: ConvertedDataset) -> str:
        """Return the first picture of the split whose content changed but not its size; empty if none did.

        As `precache convert` does, it reads and compares those with another modification time only.
        """
        data, state = self._data, dataset.read_source_state()
        ids = data.ids[:]  # ids of a tree are rows of its scan
        if np.array_equal(self._modified_ns, state.modified_ns[ids]):
            return ""
        scan = scan_tree(str(data.path), data.datasets[0].class_depth)
        self._check_source(scan.digest)
        return next(changed_pictures(scan, ids, state.modified_ns[ids], state.checksums[ids]), "")

    def __getstate__(self) -> dict[str, Any]:  # for another process, whose child the conversion is not
        return {**self.__dict__, "_process": None, "_errors": None, "_end": None}


@dataclass(slots=True)
class _Switch:
    """Request at which a `ConvertingPipeline` changes from the tree to the shards, once it has come."""

    request: Request | None = None
    shards: SplitData | None = None


class ConvertingPipeline:
    """Pipeline that serves the raw tree and, from the start of an epoch on, its shards.

    Args:
        data: the split of the raw tree.
        open_pipeline: opens the pipeline of the tree, or of its shards.
    """

    random_access = True

    def __init__(
        self, conversion: Conversion, data: SplitData, open_pipeline: Callable[[SplitData], Pipeline]
    ) -> None:
        self._conversion, self._open = conversion, open_pipeline
        shards = conversion.try_open_shards()
        self._is_stored = shards is not None
        self._pipeline = open_pipeline(data if shards is None else shards)
        self.lane, self.size = self._pipeline.lane, self._pipeline.size

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request."""
        conversion = self._conversion  # not `self`: readers keep the generator below alive, a cycle otherwise
        switch = _Switch()

        def tree_requests() -> Iterator[Request]:
            epoch = -1
            for request in requests:
                if request.epoch != epoch:
                    switch.shards = conversion.try_open_shards()
                    if switch.shards is not None:
                        switch.request = request
                        return
                epoch = request.epoch
                yield request

        if not self._is_stored:
            yield from self._pipeline.read(tree_requests())
        if switch.request is not None and switch.shards is not None:
            _LOGGER.info("%s is converted: epoch %d reads it", conversion.folder, switch.request.epoch)
            self._pipeline.close()
            self._pipeline, self._is_stored = self._open(switch.shards), True
            requests = chain([switch.request], requests)
        yield from self._pipeline.read(requests)

    def close(self) -> None:
        """End the conversion; free threads, processes and files; idempotent."""
        self._conversion.close()
        self._pipeline.close()


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()  # the child does not see it if a fork has the pipe, too
    process.terminate()
    try:
        process.wait(_ENDING_S)  # returns at once in a fork of the process that started the child
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
