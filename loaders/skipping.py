"""What becomes of a picture that cannot be decoded: it ends the training, or is left out."""

import logging

from loaders.batch import DecodedBatch

_LOGGER = logging.getLogger(__name__)


class ErrorPolicy:
    """Applies `on_error`, "raise" or "skip", to the batches of one loader."""

    def __init__(self, on_error: str) -> None:
        self._skip = on_error == "skip"
        self._warned: set[str] = set()

    def check(self, batch: DecodedBatch) -> DecodedBatch:
        """`batch` as it is; what it lacks is logged, each file once.

        Raises:
            ImageError: of the first picture that it lacks, unless others are left and "skip" is set.
        """
        for error in batch.refused.values():
            if not self._skip or not len(batch.ids):
                raise error
            if error.path not in self._warned:
                self._warned.add(error.path)
                _LOGGER.warning("%s; left out of its batch", error)
        return batch
