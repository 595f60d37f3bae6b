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


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: '1 picture', '9,144 pictures'; `plural` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
