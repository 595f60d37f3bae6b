"""What a run says beside its result: on stderr, unless the program that calls it has set up logging."""

import logging

from precache.errors import printable

_LOGGER = logging.getLogger("precache")


def warn(message: str) -> None:
    """Say `message` on one line; control characters of the names in it as escapes."""
    _LOGGER.warning("%s", printable(message))


def some(names: list[str]) -> str:
    """The first three of `names`, and how many there are besides."""
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{rest}"
