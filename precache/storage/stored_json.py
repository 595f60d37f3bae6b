"""JSON that this project stores and reads back, each kind a `msgspec.Struct` that it is decoded by.

A Struct says which fields there are, of which types and in which ranges (as `Count`), and `__post_init__`
what holds between them. So what is read has been checked: no code looks at it as plain values.

A text that is no Unicode, as the name of a file may be, is written with escapes like `\\udcff`. msgspec takes
none of them, so the standard library writes and reads a file that has some.
"""

import json
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from precache.errors import DatasetError, PrecacheError

_MAX_QUOTE = 200  # characters of an error that quotes the file
_Kind = TypeVar("_Kind")
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""Number of things, or of bytes, that fits into an int64, as do a few of them together."""


def encode(value: Any, *, indent: int = 0) -> bytes:
    """Encode a Struct or plain values as JSON that ends with a line break, its fields in their own order.

    Args:
        indent: spaces of each level, for files that people read; 0: all in one line.
    """
    try:
        raw = msgspec.json.encode(value)
    except UnicodeEncodeError:
        return f"{json.dumps(msgspec.to_builtins(value), indent=indent or None)}\n".encode()
    return (msgspec.json.format(raw, indent=indent) if indent else raw) + b"\n"


def decode(
    raw: bytes,
    kind: type[_Kind],
    *,
    path: object,
    remedy: str,
    error: type[PrecacheError] = DatasetError,
) -> _Kind:
    """Decode JSON as a value of this type.

    Args:
        raw: content of the file.
        kind: a Struct or another type that msgspec knows.
        path: path or URL of the file, for messages.
        remedy: what to do where the file is of no use.
        error: type of the error to raise.

    Raises:
        PrecacheError: these bytes are no such JSON; it is an `error`.
    """
    try:
        if b"\\ud" in raw:
            return msgspec.convert(json.loads(raw), kind)
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        reason = str(cause)[:_MAX_QUOTE]
        raise error(f"is damaged, or not of this project ({reason})", path=path, remedy=remedy) from cause
