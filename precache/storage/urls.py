"""Locations of data: paths of this machine, and URLs of an object storage."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from precache.errors import SettingError, shell_command

SCHEMES = ("s3", "gs", "az", "https", "http")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_URL_AS_PATH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # limits of common file systems, and of Linux
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX, https://HOST/PATH"


@dataclass(frozen=True, slots=True, order=True)
class Url:
    """URL of an object, or of a prefix that objects share like a folder.

    Attributes:
        root: scheme and bucket, as `s3://bucket`; for `az` account and container, for `https` the host.
        key: path below the root, without slashes at its ends; empty for the root itself.
    """

    root: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> "Url":
        return Url(self.root, "/".join(filter(None, (self.key, name.strip("/")))))

    @property
    def scheme(self) -> str:
        """Scheme of the URL, one of SCHEMES."""
        return self.root.partition(":")[0]

    @property
    def name(self) -> str:
        """Last part of the key, or of the root if there is no key."""
        return str(self).rpartition("/")[2]


Location: TypeAlias = Path | Url


def is_url(path: object) -> bool:
    """Whether this is a `Url`, or text that begins with a scheme."""
    return isinstance(path, Url) or (isinstance(path, str) and _SCHEME.match(path) is not None)


def locate(path: "str | bytes | os.PathLike[str] | Url") -> Location:
    """Parse a path or a URL; `file:///data` is a path.

    Raises:
        SettingError: `path` can be no path, or is a URL of an unknown kind, or an incomplete one.
    """
    if isinstance(path, Url):
        return path
    text = _path_text(path)
    match = _SCHEME.match(text)
    if match is None:
        if _URL_AS_PATH.match(text) and not os.path.exists(text):
            raise SettingError(
                "lacks a slash of a URL",
                path=text,
                remedy="write '//' after the colon (in Python pass URLs as text: a Path drops it)",
            )
        return Path(text)
    scheme = match[1].lower()
    if scheme == "file":
        split = urlsplit(text)
        if split.netloc not in ("", "localhost"):
            raise SettingError("names a host", path=text, remedy="write file:///PATH, or the path alone")
        return Path(unquote(split.path))
    scheme = {"s3a": "s3", "gcs": "gs", "azure": "az"}.get(scheme, scheme)
    if scheme not in SCHEMES:
        raise SettingError(
            f"unknown kind of URL {scheme!r}",
            path=_without_password(text),
            remedy=f"write one of {_FORMS}",
        )
    rest = text[match.end() :]
    if "@" in rest.partition("/")[0]:
        raise SettingError(
            "holds a user name or password, which would be printed",
            path=_without_password(text),
            remedy="leave it to the environment",
        )
    if "?" in rest or "#" in rest:
        raise SettingError(
            "holds a ? or #, which is not supported",
            path=text.partition("?")[0],
            remedy="leave it out",
        )
    parts = [part for part in rest.split("/") if part]
    root_parts = 2 if scheme == "az" else 1
    if len(parts) < root_parts or any(part in (".", "..") for part in parts):
        raise SettingError("is not a complete URL", path=text, remedy=f"write one of {_FORMS}")
    return Url(f"{scheme}://{'/'.join(parts[:root_parts])}", "/".join(parts[root_parts:]))


def local_path(path: "str | bytes | os.PathLike[str] | Url") -> Path:
    """Parse a path of this machine as `locate` does; SettingError for a URL."""
    location = locate(path)
    if isinstance(location, Url):
        raise SettingError("is a URL", path=location, remedy="name a path of this machine")
    return location


def source_path(path: "str | bytes | os.PathLike[str] | Url") -> Path:
    """Parse the path of pictures to read; SettingError for a URL, with the command that copies them here."""
    location = locate(path)
    if isinstance(location, Path):
        return location
    remedy, folder = "copy them to this machine first", Path(location.name)
    if location.scheme == "s3":
        remedy += f", as with '{shell_command('aws s3 sync', location, folder)}'"
    elif location.scheme == "gs":
        remedy += f", as with '{shell_command('gcloud storage cp -r', location)} .'"
    pull = shell_command("precache pull", location, folder)
    raise SettingError(
        "is a URL, and pictures are read from a disk",
        path=location,
        remedy=f"{remedy}; a converted dataset with '{pull}'",
    )


def destination_path(path: "str | bytes | os.PathLike[str] | Url") -> Path:
    """Parse the folder to convert into; SettingError for a URL, with the command that copies it there."""
    location = locate(path)
    if isinstance(location, Path):
        return location
    raise SettingError(
        "is a URL, and datasets are written to a disk",
        path=location,
        remedy=f"convert into a folder DST, then run '{shell_command('precache push DST', location)}'",
    )


def _path_text(path: "str | bytes | os.PathLike[str]") -> str:
    """Convert a path or a URL to text; SettingError for a value that can be neither."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise SettingError(f"{path!r:.99} is not a path", remedy="give text, or a pathlib.Path")
    text = os.path.expanduser(os.fsdecode(path))  # as torchvision does, and as a shell does
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise SettingError(f"{text!r:.99} holds a character that no path may", remedy="leave it out")
    if len(encoded) > _MAX_PATH_BYTES or max(map(len, encoded.split(b"/"))) > _MAX_NAME_BYTES:
        raise SettingError(
            f"{text!r:.99} is too long ({len(encoded):,} bytes): a name may have {_MAX_NAME_BYTES}, a path "
            f"{_MAX_PATH_BYTES:,}",
            remedy="shorten it",
        )
    return text


def check_writable(url: Url) -> None:
    """Raise SettingError if objects cannot be written below this URL."""
    if url.scheme in ("http", "https"):
        raise SettingError("is read-only", path=url, remedy="push to s3://, gs:// or az://")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", text)
