"""A conversion whose destination is a URL: what lies in the storage meanwhile, and who may write there.

    URL/train-00000.safetensors ...       shards, under their names as soon as they are whole
    URL/journal/header.json               what is being made, as the first line of a journal on disk
    URL/journal/DIGEST/train-00000.json   a finished shard; DIGEST is of the header
    URL/journal/lock.json                 who converts, renewed every few seconds
    URL/index.safetensors ...             at the end
    URL/dataset.json                      last: without it, nothing there is a dataset; then journal/ goes

An object is there whole or not at all, but cannot be appended to, renamed or locked. So each shard has a
record of its own, written by the worker that uploaded it; and the lock is an object that is made, and
renewed, on the condition that nobody else has done so. It keeps apart all who look at it before they write;
it cannot hold back the bytes of a process that was taken for dead and wakes up in the middle of an upload. So
the end of a conversion compares sizes and etags of all objects with what the workers uploaded; what comes
later than that, `precache verify` finds.
"""

from precache.uploads.journal import UrlJournal, check_free, refuse_change, room, tidy
from precache.uploads.lock import hold_lock

__all__ = ["UrlJournal", "check_free", "hold_lock", "refuse_change", "room", "tidy"]
