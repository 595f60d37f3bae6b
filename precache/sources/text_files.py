"""Text files that people write: tables and lists, as editors, Excel and programs on Windows save them."""

import codecs
import os
from pathlib import Path

from precache.errors import shell_command

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DELIMITERS = (",", ";", "\t", "|")


def encoding_of(start: bytes) -> str:
    """Return the encoding that the byte order mark of a file says; UTF-8 without a mark."""
    return "utf-16" if start.startswith(_UTF_16) else "utf-8-sig"


def decode_list(content: bytes) -> str:
    """Decode the content of a list of paths; bytes that are no UTF-8 become those of `os.fsdecode`."""
    encoding = encoding_of(content)
    return content.decode(encoding, "replace" if encoding == "utf-16" else "surrogateescape")


def find_delimiter(line: str, usual: str = ",") -> str:
    """Return what separates the cells of a first line: `usual` where it has that, or another delimiter."""
    return next((delimiter for delimiter in (usual, *_DELIMITERS) if delimiter in line), usual)


def listed_path(path: str) -> str:
    """Return a path of a list in its shortest form; one with backslashes alone is of Windows."""
    if "/" not in path:
        path = path.replace("\\", "/")
    return path if ".." in path.split("/") else os.path.normpath(path)


def utf_8_remedy(path: str | os.PathLike[str]) -> str:
    """Return how to save a file, which Excel has written in the encoding of a country, as UTF-8."""
    new_path = Path(path).with_name(f"utf8-{Path(path).name}")
    command = f"{shell_command('iconv -f WINDOWS-1252 -t UTF-8', Path(path))} > {shell_command(new_path)}"
    return f"save it as UTF-8 (in Excel: CSV UTF-8), or run: {command}"
