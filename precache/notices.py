"""What a run says beside its result: on stderr, unless the program that calls it has set up logging."""

import logging

_LOGGER = logging.getLogger("precache")


def warn(message: str) -> None:
    """Say `message` on one line; control characters of the names in it as escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    _LOGGER.warning("%s", shown)


def some(names: list[str]) -> str:
    """The first three of `names`, and how many there are besides."""
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{rest}"
