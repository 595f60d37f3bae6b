"""Whether a source's pictures are still those that were converted, where their paths and sizes are.

A picture that was last written at the time on record is taken for the same. One with another time, as in a
copy of the tree, is read and its bytes are compared.
"""

import os
from collections.abc import Iterator

import numpy as np

from precache.errors import SourceError
from precache.index import Checksums, Ints, checksum_of
from precache.source import Scan
from precache.storage import read_regular


def changed_pictures(scan: Scan, rows: Ints, modified_ns: Ints, checksums: Checksums) -> Iterator[str]:
    """Paths of the pictures at `rows` of the scan's samples that are not what they were.

    Args:
        modified_ns: int64 [len(rows)], when they had last been written.
        checksums: uint64 [len(rows)], XXH3-64 of the files then.

    Raises:
        SourceError: one cannot be read.
    """
    for place in np.flatnonzero(scan.samples.modified_ns[rows] != modified_ns).tolist():
        ref = scan.samples[int(rows[place])]
        path = os.path.join(scan.root, ref.path)
        try:
            content = read_regular(path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be read ({error.strerror}), and it was written since it was converted; "
                f"check its disk and its permissions, then run the same command again"
            ) from error
        if checksum_of(content) != checksums[place]:
            yield ref.path
