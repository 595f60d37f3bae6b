"""What the folder of an unfinished conversion holds: its description, and a sidecar for each finished shard.

    conversion.json     what is converted, and how; written once, when the conversion begins
    train-00000.json    a shard that is finished: written last, when all its files have their names

Both are removed once the manifest is written, `conversion.json` last. So a folder with `conversion.json` is a
conversion of ours, which the same command continues. Each has a checksum of its own, which detects damage.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from precache.dataset.files import FileEntry
from precache.dataset.index import INDEX_NAME, REJECTED_NAME, SOURCE, Array
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.shard_table import file_names, shard_name
from precache.dataset.statistics import PixelSums
from precache.errors import DatasetError, os_reason, shell_command
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.reporting import quantity
from precache.storage import open_regular, read_at_most
from precache.storage.stored_json import Count, decode, encode

CONVERSION_NAME = "conversion.json"
RUN_AGAIN = "nothing else may write there during a conversion: run the same command again"
"""Remedy where a file of a finished shard is not as it was written."""
_SIDECAR_SUFFIX = ".json"
_MAX_SHARDS = 10**7
_MAX_BYTES = 1 << 28  # limits the memory that a file of another kind takes
MODIFIED_NS, SOURCE_CHECKSUMS = f"{SOURCE}modified_ns", f"{SOURCE}checksums"
_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "source_sizes": ("<i4", (2,)),
    "shapes": ("<i4", (2,)),
    "checksums": ("<u8", ()),
    "byte_ranges": ("<i8", (2,)),
    MODIFIED_NS: ("<i8", ()),
    SOURCE_CHECKSUMS: ("<u8", ()),
}
"""Columns of a sidecar, by their names in the index: dtype and shape of a row."""


class Inputs(msgspec.Struct, frozen=True):
    """Inputs of a conversion: equal inputs give equal bytes.

    Attributes:
        recipe: settings that change the bytes.
        source_digest: digest of the source.
        made_by: versions of the software that decodes and encodes.
    """

    recipe: Recipe
    source_digest: str
    made_by: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex."""
        return hashlib.sha256(encode(self)).hexdigest()


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """File with a checksum: XXH3-64 of its JSON with an empty checksum, 16 hex digits."""

    checksum: str = ""

    def to_json(self) -> bytes:
        """Encode with the checksum."""
        return encode(replace(self, checksum=self._compute_checksum()))

    @property
    def is_damaged(self) -> bool:
        """Whether the checksum differs from that of the rest."""
        return self.checksum != self._compute_checksum()

    def _compute_checksum(self) -> str:
        return f"{xxhash.xxh3_64_intdigest(encode(replace(self, checksum=''))):016x}"


class UnfinishedConversion(_Checked, frozen=True, kw_only=True):
    """Description of an unfinished conversion: content of `conversion.json`.

    Attributes:
        inputs: what decides the bytes.
        shards: split -> number of its shards, from which the names of all files follow.
        pictures: number of pictures.
        source: source, as a word of the command that goes on; empty for a dataset in memory.
        flags: flags of this command.
    """

    inputs: Inputs
    shards: dict[str, Annotated[int, msgspec.Meta(ge=1, le=_MAX_SHARDS)]]
    pictures: Count
    source: str
    flags: str

    def __post_init__(self) -> None:
        for split in self.shards:
            shard_name(split, 0)  # SettingError for a name that leads out of the folder

    @property
    def sidecar_names(self) -> frozenset[str]:
        """Names of the sidecars of all shards."""
        return frozenset(f"{shard}{_SIDECAR_SUFFIX}" for shard in self._shard_names())

    @property
    def own_names(self) -> frozenset[str]:
        """Names of all files that the conversion makes."""
        form = FORMATS[self.inputs.recipe.format]
        shard_files = (name for shard in self._shard_names() for name in file_names(shard, form))
        own = (CONVERSION_NAME, REJECTED_NAME, INDEX_NAME, MANIFEST_NAME)
        return self.sidecar_names.union(own, shard_files)

    def _shard_names(self) -> Iterator[str]:
        for split, count in self.shards.items():
            for number in range(count):
                yield shard_name(split, number)


class Sidecar(_Checked, frozen=True, kw_only=True):
    """A finished shard, and its pictures as they were written.

    Attributes:
        shard: name of the shard.
        inputs_digest: digest of the inputs of its conversion.
        files: files of the shard; none if every picture of it was rejected.
        rejected: (position in the shard's plan, reason) of each picture that the shard lacks.
        sums: sums over the pixels of the samples.
        columns: arrays, as bytes (base64 in JSON), by their names in the index. Those of the source have a
            row for each picture of the plan, in its order, rejected ones too; the others one for each sample,
            in stored order.
    """

    shard: str
    inputs_digest: str
    files: tuple[FileEntry, ...]
    rejected: tuple[tuple[int, str], ...]
    sums: PixelSums
    columns: dict[str, bytes]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.column("checksums"))

    def column(self, name: str) -> Array:
        """Array of a column, with a row for each sample or picture."""
        dtype, row_shape = _COLUMNS[name]
        return np.frombuffer(self.columns[name], dtype).reshape(-1, *row_shape)


def encode_columns(columns: dict[str, Any]) -> dict[str, bytes]:
    """Encode rows of each column for a sidecar, by name."""
    return {name: np.array(rows, _COLUMNS[name][0]).tobytes() for name, rows in columns.items()}


def sidecar_path(folder: Path, shard: str) -> Path:
    """Path of the sidecar of the shard of this name."""
    return folder / f"{shard}{_SIDECAR_SUFFIX}"


def read_sidecar(folder: Path, shard: str, inputs_digest: str) -> Sidecar:
    """Read the sidecar of a shard.

    Args:
        inputs_digest: digest of the inputs of the conversion.

    Raises:
        DatasetError: it cannot be read, is damaged, or is of another shard or conversion.
    """
    path = sidecar_path(folder, shard)
    sidecar = _read(path, Sidecar, RUN_AGAIN)
    if (sidecar.shard, sidecar.inputs_digest) != (shard, inputs_digest):
        raise DatasetError("is of another shard or conversion", path=path, remedy=RUN_AGAIN)
    return sidecar


def read_conversion(folder: Path) -> UnfinishedConversion | None:
    """Read the description of the unfinished conversion in `folder`; None if there is none.

    Raises:
        DatasetError: the file cannot be read, is damaged, or is none of this project.
    """
    path = folder / CONVERSION_NAME
    if not os.path.lexists(path):
        return None
    return _read(path, UnfinishedConversion, "choose another DST, or remove what is in this folder yourself")


def unfinished_error(folder: Path) -> DatasetError | None:
    """Return the error to raise for a folder with an unfinished conversion; None if it holds none."""
    try:
        description = read_conversion(folder)
        if description is None:
            return None
        names = description.sidecar_names.intersection(os.listdir(folder))
    except (DatasetError, OSError):  # a file of somebody else
        return None
    done, digest = 0, description.inputs.digest
    for name in names:
        try:
            sidecar = read_sidecar(folder, name.removesuffix(_SIDECAR_SUFFIX), digest)
        except DatasetError:  # its shard will be converted again
            continue
        done += len(sidecar.column(SOURCE_CHECKSUMS))
    command = "the same call of precache.convert"
    if description.source:
        words = (description.source, folder, *filter(None, [description.flags]))
        command = shell_command("precache convert", *words)
    return DatasetError(
        f"holds an unfinished conversion, {done:,} of {quantity(description.pictures, 'picture')}",
        path=folder,
        remedy=f"go on with: {command}",
    )


_Kind = TypeVar("_Kind", bound=_Checked)


def _read(path: Path, kind: type[_Kind], remedy: str) -> _Kind:
    """Read a file as a Struct; DatasetError if it cannot be read, or is no such file."""
    try:
        with open_regular(path, getattr(os, "O_NOFOLLOW", 0)) as file:
            raw = read_at_most(file.fileno(), min(os.fstat(file.fileno()).st_size, _MAX_BYTES))
    except OSError as error:
        raise DatasetError(f"cannot be read ({os_reason(error)})", path=path, remedy=remedy) from error
    content = decode(raw, kind, path=path, remedy=remedy)
    if content.is_damaged:
        raise DatasetError("is damaged (its checksum differs)", path=path, remedy=remedy)
    return content
