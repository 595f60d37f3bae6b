"""Convert a tree on first use: `precache=` of `loaders.build` and `loaders.ImageDataset`.

Each process asks for the lock of the folder. The one that gets it converts, as `precache convert` does; the
others wait, in no collective. The system releases the lock when its holder ends, however that is: then one of
those that wait goes on.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

from loaders.dataset import depth_flags
from precache.cli.terminal import ProgressBar
from precache.conversion.convert import convert
from precache.dataset.manifest import is_converted
from precache.errors import DatasetError, SettingError, SourceError, printable, shell_command
from precache.recipe import Recipe
from precache.sources.splits import is_list_file
from precache.storage.urls import is_url, local_path

_REMIND_S = 300.0
_LOGGER = logging.getLogger(__name__)


def convert_on_first_use(
    path: Any,
    folder: str | os.PathLike[str],
    recipe: Recipe,
    splits: str | os.PathLike[str] | None,
    class_depth: int | None,
) -> Path:
    """Convert the tree at `path` into `folder`, unless that is done, and return the folder.

    Args:
        recipe: recipe of the conversion, with the shares of `splits`.
        splits, class_depth: see `loaders.build`.

    Raises:
        SettingError: `path` is no tree on this machine, or `folder` no folder.
        SourceError: the tree cannot be read.
        DatasetError: the folder holds something else, or the tree changed since it was converted.
    """
    if isinstance(path, (list, tuple)) or is_url(path) or is_url(folder):
        raise SettingError(
            f"precache converts one tree on this machine into a folder, not {path} into {folder}",
            remedy="leave it out, and run 'precache convert'",
        )
    path = local_path(path)
    if is_converted(path):
        raise SettingError(f"precache {folder}: {path} is converted already", remedy="leave precache out")
    folder = local_path(folder)
    flags = [recipe.to_flags(), *depth_flags(1 if class_depth is None else class_depth)]
    options: dict[str, Any] = {"class_depth": class_depth}
    if splits is not None and is_list_file(splits):
        options["split_list"] = splits
        flags.append(shell_command("--splits", Path(splits)))
    if is_converted(folder):  # whoever converted it has accepted what is rejected
        options["max_rejects"] = 1.0
    try:
        with ProgressBar(f"convert {path} to {folder}", "image") as bar:
            convert(path, folder, recipe, on_wait=_WaitLog(folder), on_progress=bar, **options)
    except DatasetError as error:
        if not isinstance(error, SourceError):
            command = shell_command("precache convert", path, folder, *flags)
            if is_converted(folder):
                error.remedy = f"to convert again, run: {command} --overwrite; or name another folder"
            else:
                error.remedy = f"{error.remedy}; the command is: {command}"
        raise
    return folder


class _WaitLog:
    """Logs that another process converts into the folder, at first and every few minutes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next_s = folder, 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _REMIND_S
            _LOGGER.warning("%s", printable(f"waiting for {self._folder}, which another process converts"))
