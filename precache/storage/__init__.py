"""Where bytes lie: files of this machine, which are either whole or not there, and objects of a storage.

local    write beside, fsync, rename; reading that never waits for a pipe; checksums
urls     which of both a text names
objects  S3, Google Cloud Storage, Azure, web servers: what cannot be had at once is asked for again
"""

from precache.storage.local import (
    TEMPORARY_SUFFIX,
    atomic_folder,
    atomic_write,
    check_new_folder,
    crc32c,
    crc32c_file,
    fsync_folder,
    is_cached,
    is_leftover,
    open_append,
    open_new,
    open_regular,
    read_descriptor,
    read_descriptor_at,
    read_regular,
    read_regular_part,
    remove_leftovers,
    temporary_folder,
    temporary_path,
)

__all__ = [
    "TEMPORARY_SUFFIX",
    "atomic_folder",
    "atomic_write",
    "check_new_folder",
    "crc32c",
    "crc32c_file",
    "fsync_folder",
    "is_cached",
    "is_leftover",
    "open_append",
    "open_new",
    "open_regular",
    "read_descriptor",
    "read_descriptor_at",
    "read_regular",
    "read_regular_part",
    "remove_leftovers",
    "temporary_folder",
    "temporary_path",
]
