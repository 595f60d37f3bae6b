"""Convert while training: the raw tree is read until `precache convert` has made shards of it, then those.

A process of the lowest priority converts, with what the training leaves of the CPUs, and with the journal,
the lock and the bytes of `precache convert`: killed, it goes on the next time. Order, ids and states are
those of the raw tree before and after, so that each rank changes over by itself, at the start of an epoch.
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
from dataclasses import replace
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
    SourceError,
    check_open_files,
    printable,
    shell_command,
)
from precache.imports import child_environment
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import changed_pictures
from precache.sources.splits import is_list_file
from precache.sources.tree import list_tree, scan_tree, with_sizes
from precache.storage.urls import is_url

# ends with the process that started it, whose end of the pipe is then closed
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
    """The recipe and the splits of a raw tree, of which the user may have given either, or both.

    Raises:
        SettingError: they ask for different splits; or the splits are neither shares nor a list file.
    """
    recipe = recipe or Recipe(format="shards")
    if is_list_file(splits):
        return recipe, splits
    if splits is None:
        return recipe, None if recipe.splits == DEFAULT_SPLITS else recipe.splits
    asked = replace(recipe, splits=splits)  # type: ignore[arg-type]  # raises for what is no text
    if recipe.splits not in (DEFAULT_SPLITS, splits):
        raise SettingError(f"splits {splits!r}, but the recipe has {recipe.splits!r}; give one of the two")
    return asked, splits


class Conversion:
    """The conversion of a raw tree into a folder of shards, by a process of this one's or in another run.

    Args:
        data: a split of the tree.
        folder: that another run may have finished, begun, or be writing now.
        recipe: default that of `precache convert --format shards`.
        rank: 0 starts a process, the others read what it commits; LOCAL_RANK, where that is set, is taken.

    Raises:
        SettingError: the shards could not be read in the order of the tree.
        DatasetError: the folder holds what was converted from something else.
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
            raise SettingError(f"precache: {data.path} is converted already; leave precache out")
        if is_url(folder):
            raise SettingError(f"precache {folder}: give a folder; 'precache push' takes it to a URL later")
        served = recipe.format, recipe.channels, recipe.dtype
        if served != ("shards", "rgb", "uint8") or recipe.has_split_list:
            raise SettingError(
                f"precache by the recipe '{recipe.to_flags()}': only shards of RGB, split by shares or as "
                f"the tree is, are read in its place; run 'precache convert' with this recipe, and build on "
                f"what it writes"
            )
        self.folder, self._data, self._split, self._recipe = Path(folder), data, split, recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._stored: SplitData | None = None
        listed = list_tree(str(data.path), data.class_depth)
        if hashlib.sha256(f"raw {listed.digest}".encode()).hexdigest() != data.whole.digest:
            raise SourceError(f"{data.path}: changed while it was listed; leave it alone, and build again")
        scan = with_sizes(listed)
        self._source_digest, self._modified_ns = scan.digest, scan.samples.modified_ns[data.ids[:]]
        starts = self.finished() is None and not is_converted(self.folder)
        if starts and read_launcher("LOCAL_RANK", rank, least=0) == 0:
            words = ["convert", str(data.path), str(folder), *shlex.split(recipe.to_flags())]
            words += depth_flags(data.class_depth)
            try:
                self._start(words)
            except OSError as error:
                check_open_files(error, error.filename)
                raise

    def _start(self, words: list[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env=child_environment(),
        )
        self._end = weakref.finalize(self, _end, self._process)

    def close(self) -> None:
        """End the process; what it has written stays, and is gone on from the next time."""
        if self._process is not None:
            self._end()

    def finished(self) -> SplitData | None:
        """What was converted, its samples in the order of the tree; None: not finished, or of no use.

        It is of no use, which is said once, where pictures of the tree changed, or could not be decoded.

        Raises:
            DatasetError: the folder holds what was converted from something else.
            PrecacheError: the process has failed; said once, since another run may finish.
        """
        if self._stored is not None:
            return self._stored
        if not is_converted(self.folder):
            process = self._process  # several threads may look
            if process is None or not process.poll():
                return None
            self._process = None
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines() or ["it was killed"]
            raise PrecacheError(
                f"{self.folder} is not converted: {lines[-1].removeprefix('precache: error: ')}"
            )
        dataset = open_dataset(self.folder)
        manifest = dataset.manifest
        # what an update adds has ids behind all others: not those of the tree
        self._check_source("" if manifest.updates else manifest.source_digest)
        if manifest.recipe != self._recipe:
            raise DatasetError(
                f"{self.folder}: was converted by '{manifest.recipe.to_flags()}', asked for is "
                f"'{self._recipe.to_flags()}'; give its recipe, or name another folder"
            )
        if changed := self._changed(dataset):
            flags = (*shlex.split(self._recipe.to_flags()), *depth_flags(self._data.class_depth))
            again = shell_command("precache convert", self._data.path, self.folder, *flags, "--overwrite")
            self._give_up(
                f"is out of date, for pictures changed since it was converted (first: {changed}); to convert "
                f"them again, run: {again}"
            )
            return None
        stored = open_split(self.folder, self._split)
        stored_ids, ids = stored.ids[:], self._data.ids[:]  # those of a tree ascend
        rows = np.argsort(stored_ids)
        rows = rows[np.isin(stored_ids[rows], ids)]
        if lacking := len(ids) - len(rows):
            flags = depth_flags(self._data.class_depth)
            check = shell_command("precache check", self._data.path, *flags)
            self._give_up(
                f"lacks {lacking:,} pictures of {self._data.path}, which cannot be decoded; to train without "
                f'them, run: {check}, and build with reading=loaders.Reading(on_error="skip")'
            )
            return None
        self._stored = stored.select(rows).with_labels(self._data.classes, self._data.labels)
        return self._stored

    def found(self) -> SplitData | None:
        """As `finished`, but what it would raise is said once: training goes on."""
        try:
            return None if self._given_up else self.finished()
        except PrecacheError as error:
            self._given_up = isinstance(error, DatasetError)
            _LOGGER.warning("%s; reading goes on from %s", error, printable(str(self._data.path)))
            return None

    def _give_up(self, reason: str) -> None:
        """Say why the tree is read on, whatever is converted."""
        self._given_up = True
        tree = printable(str(self._data.path))
        _LOGGER.warning("%s; reading goes on from %s", printable(f"{self.folder}: {reason}"), tree)

    def _check_source(self, digest: str) -> None:
        """DatasetError unless `digest`, of a scan, is that of the tree when the loader was built."""
        if digest != self._source_digest:
            raise DatasetError(
                f"{self.folder}: holds something else than shards of {self._data.path} as it is now; name "
                f"another folder, or build on this one alone"
            )

    def _changed(self, dataset: ConvertedDataset) -> str:
        """A picture of the split that is not what was converted, although its size is; or nothing.

        Looked at as `precache convert` does: one that was last written at another time is read and compared.
        """
        data, state = self._data, dataset.read_source_state()
        ids = data.ids[:]  # of a tree: rows of its scan
        if np.array_equal(self._modified_ns, state.modified_ns[ids]):
            return ""
        scan = scan_tree(str(data.path), data.class_depth)
        self._check_source(scan.digest)
        return next(changed_pictures(scan, ids, state.modified_ns[ids], state.checksums[ids]), "")

    def __getstate__(self) -> dict[str, Any]:  # for another process, whose child the conversion is not
        return {**self.__dict__, "_process": None, "_said": None, "_end": None}


class Converting:
    """Serves the raw tree, and from the start of an epoch on its shards; otherwise as a `Pipeline`.

    Args:
        open_pipeline: what serves the tree, or its shards.
    """

    random_access = True

    def __init__(
        self, conversion: Conversion, data: SplitData, open_pipeline: Callable[[SplitData], Pipeline]
    ) -> None:
        self._conversion, self._open = conversion, open_pipeline
        stored = conversion.found()
        self._is_stored = stored is not None
        self._pipeline = open_pipeline(data if stored is None else stored)
        self.lane, self.size = self._pipeline.lane, self._pipeline.size

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request."""
        conversion = self._conversion  # not `self`: a reader keeps what asks it, which would keep the reader
        found: list[tuple[Request, SplitData]] = []  # the first of the epoch that finds the shards, and these

        def of_tree() -> Iterator[Request]:
            epoch = -1
            for request in requests:
                if request.epoch != epoch and (stored := conversion.found()) is not None:
                    found.append((request, stored))
                    return
                epoch = request.epoch
                yield request

        if not self._is_stored:
            yield from self._pipeline.read(of_tree())
        for request, stored in found:
            _LOGGER.info("%s is converted: epoch %d reads it", conversion.folder, request.epoch)
            self._pipeline.close()
            self._pipeline, self._is_stored = self._open(stored), True
            requests = chain([request], requests)
        yield from self._pipeline.read(requests)

    def close(self) -> None:
        """End the conversion; free threads, processes and files; idempotent."""
        self._conversion.close()
        self._pipeline.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()  # which is not the end of the pipe where a fork has it, too
    process.terminate()
    try:
        process.wait(_ENDING_S)  # in a fork, whose child it is not, this returns at once
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
