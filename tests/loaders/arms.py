"""What several tests of loaders go through: (backend, what it reads)."""

from importlib.util import find_spec
from typing import Any

import pytest

_NO_DALI = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.dali") is None,
    reason="DALI is not installed: pip install nvidia-dali-cuda120",
)


def with_marks(*arms: tuple[str, ...]) -> list[Any]:
    """As parameters, of which those of DALI are skipped where it is not installed."""
    return [pytest.param(*arm, id="-".join(arm), marks=[_NO_DALI] * (arm[0] == "dali")) for arm in arms]


OF_FILES = with_marks(("pytorch", "raw"), ("dali", "raw"))
OF_SHARDS = with_marks(
    ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")
)
MAIN = with_marks(("pytorch", "raw"), ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "dali"))
"""Of which the whole contract is asked."""
