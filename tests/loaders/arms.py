"""What several tests of loaders go through: (backend, what it reads)."""

from importlib.util import find_spec
from typing import Any

import pytest

_NO_DALI = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.dali") is None,
    reason="DALI is not installed: pip install nvidia-dali-cuda120",
)


def backend_params(*arms: tuple[str, ...]) -> list[Any]:
    """As parameters, of which those of DALI are skipped where it is not installed."""
    return [pytest.param(*arm, id="-".join(arm), marks=[_NO_DALI] * (arm[0] == "dali")) for arm in arms]


TREE_CASES = backend_params(("pytorch", "raw"), ("dali", "raw"))
CONVERTED_CASES = backend_params(
    ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")
)
MAIN = backend_params(("pytorch", "raw"), ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "dali"))
"""Of which the whole contract is asked."""
