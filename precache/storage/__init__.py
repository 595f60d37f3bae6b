"""Where bytes lie: files of this machine, either complete or absent, and objects of a storage.

local        write beside, fsync, rename; reading that never waits for a pipe; checksums
output       large files, written once, past the page cache
records      files of JSON lines that show what became of them
urls         which text names a path, and which a URL
objects      S3, Google Cloud Storage, Azure, web servers: by obstore, which is opened by `providers`
retries      what of a request is asked again, and how it fails
shard_cache  files of datasets at URLs that are kept on this machine
staging      a folder of this process for what is on its way to a storage, or comes from it
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
