"""Locations: a path of this machine, or a URL of an object storage."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from precache.errors import SettingError

SCHEMES = ("s3", "gs", "az", "https", "http")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_OF_PATH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")
_NAME_BYTES, _PATH_BYTES = 255, 4095  # that file systems take, and systems
_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://ACCOUNT/CONTAINER/PREFIX, https://HOST/PATH"


@dataclass(frozen=True, slots=True, order=True)
class Url:
    """A place in an object storage: an object, or the prefix that a folder's objects have.

    Attributes:
        root: scheme and bucket, `s3://bucket`; of `az` account and container; of `https` the host.
        key: below the root, without slashes at its ends; empty for the root itself.
    """

    root: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> "Url":
        return Url(self.root, "/".join(filter(None, (self.key, name.strip("/")))))

    @property
    def scheme(self) -> str:
        """One of SCHEMES."""
        return self.root.partition(":")[0]

    @property
    def name(self) -> str:
        """The last part of the key; of a root that of the root."""
        return str(self).rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the name, with its dot."""
        return Path(self.name).suffix if self.key else ""

    @property
    def parent(self) -> "Url":
        """Without the last part of the key; a root is its own."""
        return Url(self.root, self.key.rpartition("/")[0])


Location: TypeAlias = Path | Url


def is_url(place: object) -> bool:
    """Whether this is a `Url`, or text that begins as a URL does."""
    return isinstance(place, Url) or (isinstance(place, str) and _SCHEME.match(place) is not None)


def locate(place: "str | bytes | os.PathLike[str] | Url") -> Location:
    """The path or URL that `place` says; `file:///data` is a path.

    Raises:
        SettingError: it says none that a system takes, no storage of this kind is known, or the URL is not
            complete.
    """
    if isinstance(place, Url):
        return place
    text = _checked(place)
    match = _SCHEME.match(text)
    if match is None:
        if _OF_PATH.match(text) and not os.path.exists(text):
            raise SettingError(
                f"{text}: lacks a slash of a URL; write '//' after the colon (in Python pass URLs as text: "
                f"a Path drops it)"
            )
        return Path(text)
    scheme = match[1].lower()
    if scheme == "file":
        split = urlsplit(text)
        if split.netloc not in ("", "localhost"):
            raise SettingError(f"{text}: names a host; write file:///PATH, or the path alone")
        return Path(unquote(split.path))
    scheme = {"s3a": "s3", "gcs": "gs", "azure": "az"}.get(scheme, scheme)
    if scheme not in SCHEMES:
        raise SettingError(
            f"{_without_password(text)}: unknown kind of URL {scheme!r}; write one of {_FORMS}"
        )
    rest = text[match.end() :]
    if "@" in rest.partition("/")[0]:
        raise SettingError(
            f"{_without_password(text)}: holds a user name or password, which would be printed; leave it to "
            f"the environment"
        )
    if "?" in rest or "#" in rest:
        raise SettingError(f"{text.partition('?')[0]}: holds a ? or #, which is not supported; leave it out")
    parts = [part for part in rest.split("/") if part]
    in_root = 2 if scheme == "az" else 1
    if len(parts) < in_root or any(part in (".", "..") for part in parts):
        raise SettingError(f"{text}: is not a complete URL; write one of {_FORMS}")
    return Url(f"{scheme}://{'/'.join(parts[:in_root])}", "/".join(parts[in_root:]))


def local_path(place: "str | bytes | os.PathLike[str] | Url") -> Path:
    """As `locate`, of what can only lie on this machine: SettingError for a URL, too."""
    found = locate(place)
    if isinstance(found, Url):
        raise SettingError(f"{found}: is a URL; name a path of this machine")
    return found


def _checked(place: "str | bytes | os.PathLike[str]") -> str:
    """The text of a path or a URL that may exist; SettingError for any other value."""
    if not isinstance(place, str | bytes | os.PathLike):
        raise SettingError(f"{place!r:.99} is not a path; give text, or a pathlib.Path")
    text = os.fsdecode(place)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise SettingError(f"{text!r:.99} holds a character that no path may; leave it out")
    if len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > _NAME_BYTES:
        raise SettingError(
            f"{text!r:.99} is too long ({len(encoded):,} bytes): a name may have {_NAME_BYTES}, a path "
            f"{_PATH_BYTES:,}; shorten it"
        )
    return text


def check_writable(url: Url) -> None:
    """Raise SettingError if nothing can be written there."""
    if url.scheme in ("http", "https"):
        raise SettingError(f"{url}: is read-only; write to s3://, gs:// or az://, or to a folder")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", text)
