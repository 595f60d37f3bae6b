"""Whether a source's pictures are still those that were converted, where their paths and sizes are.

A picture that was last written at the time on record is taken for the same. One with another time, as in a
copy of the tree, is read and its bytes are compared.
"""

import os
from collections.abc import Iterator

import numpy as np

from precache.index import Checksums, Ints, checksum_of
from precache.reading import read_picture
from precache.source import Scan

_ANY_SIZE = 1 << 60  # it is as large as it was when it was converted


def changed_pictures(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[str]:
    """Paths of the pictures at `rows` of the scan's samples that are not what they were.

    Args:
        modified_ns: int64 [len(rows)], when they had last been written.
        checksums: uint64 [len(rows)], XXH3-64 of the files then; 0 of those that were too large to be read.

    Raises:
        SourceError: one cannot be read.
    """
    for place in np.flatnonzero(scan.samples.modified_ns[rows] != modified_ns).tolist():
        ref = scan.samples[int(rows[place])]
        path = os.path.join(scan.root, ref.path)
        if checksums[place] and checksum_of(read_picture(path, _ANY_SIZE)) != checksums[place]:
            yield ref.path
