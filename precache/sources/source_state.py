"""Whether a source's pictures are still those that were converted, where their paths and sizes are.

A picture that was last written at the time on record is taken for the same. One with another time, as in a
copy of the tree, is read and its bytes are compared.
"""

from collections.abc import Iterator

import numpy as np

from precache.dataset.index import Checksums, Ints
from precache.errors import ImageError
from precache.sources.base import SampleRef, Scan, picture_checksum

_ANY_SIZE = 1 << 60  # it is as large as it was when it was converted


def changed_pictures(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[str]:
    """As `changed_rows`: the pictures, as messages call them."""
    for row in changed_rows(scan, rows, modified_ns, checksums):
        yield scan.source.where(scan.samples[row])


def changed_rows(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[int]:
    """Those of `rows` of the scan's samples whose pictures are not what they were.

    Args:
        modified_ns: int64 [len(rows)], when they had last been written.
        checksums: uint64 [len(rows)], XXH3-64 of the files then; 0 of those that could not be read.

    Raises:
        SourceError: one cannot be read.
    """
    for place in np.flatnonzero(scan.samples.modified_ns[rows] != modified_ns).tolist():
        ref = scan.samples[int(rows[place])]
        if checksums[place] and _checksum(scan, ref) != checksums[place]:
            yield int(rows[place])


def _checksum(scan: Scan, ref: SampleRef) -> int | None:
    """Checksum of the picture, whatever its size is now; None where it cannot be read any more."""
    try:
        return picture_checksum(scan.source.read(ref, _ANY_SIZE))
    except ImageError:
        return None
