"""Parameters of tests of loaders: (backend, what it reads)."""

from importlib.util import find_spec
from typing import Any

import pytest

_NO_DALI = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.dali") is None,
    reason="DALI is not installed: pip install nvidia-dali-cuda120",
)


def backend_params(*cases: tuple[str, ...]) -> list[Any]:
    """Return pytest parameters of `cases`; those whose backend is DALI are skipped if it is not installed."""
    parameters = []
    for case in cases:
        marks = [_NO_DALI] if case[0] == "dali" else []
        parameters.append(pytest.param(*case, id="-".join(case), marks=marks))
    return parameters


TREE_CASES = backend_params(("pytorch", "raw"), ("dali", "raw"))
CONVERTED_CASES = backend_params(
    ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")
)
MAIN_CASES = backend_params(
    ("pytorch", "raw"), ("shards", "shards"), ("webdataset", "webdataset"), ("dali", "dali")
)
"""A case for each kind of reader: tests run the whole contract over these."""
