"""Tables on stdout, whose cells hold names that others chose."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from precache.console.terminal import styled
from precache.errors import printable


def new_console(**options: Any) -> Console:
    """A console on stdout that shows text as it is: `printable`, and neither [bold] nor `:name:` means more.

    `options` are those of `rich.console.Console`.
    """
    return _Console(file=styled(sys.stdout), highlight=False, emoji=False, markup=False, **options)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """What each string becomes that is printed, in a cell or alone."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)
