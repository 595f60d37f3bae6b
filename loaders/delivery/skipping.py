"""What becomes of a picture that cannot be decoded: it ends the training, or is left out."""

import logging
from collections.abc import Mapping

from precache.errors import ImageError

_LOGGER = logging.getLogger(__name__)


class ErrorPolicy:
    """Applies `on_error`, "raise" or "skip", to the batches of one loader."""

    def __init__(self, on_error: str) -> None:
        self._skip = on_error == "skip"
        self._warned: set[str] = set()

    def check(self, refused: Mapping[int, ImageError], left: int) -> None:
        """Log what a batch lacks, each file once; `left` is how many pictures it has.

        Raises:
            ImageError: of the first picture that it lacks, unless others are left and "skip" is set.
        """
        for error in refused.values():
            if not self._skip or not left:
                raise error
            if error.path not in self._warned:
                self._warned.add(error.path)
                _LOGGER.warning("%s; left out of its batch", error)
