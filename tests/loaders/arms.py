"""What the tests of processes and leaks go through: (backend, what it reads)."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ARMS = [
    ("pytorch", "raw"),
    ("shards", "shards"),
    ("webdataset", "webdataset"),
    ("dali", "raw"),
    ("dali", "webdataset"),
    ("dali", "dali"),
    ("synthetic", "shards"),
]
_NO_DALI = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.dali") is None,
    reason="DALI is not installed: pip install nvidia-dali-cuda120",
)
EACH_ARM = [
    pytest.param(*arm, id="-".join(arm), marks=[_NO_DALI] if arm[0] == "dali" else []) for arm in ARMS
]


def installed_arms(raw_tree: Path, converted: dict[str, Path]) -> list[tuple[str, str]]:
    """(backend, path) of each arm that can run here, for a program in a process of its own."""
    return [
        (backend, str(raw_tree if kind == "raw" else converted[kind]))
        for backend, kind in ARMS
        if backend != "dali" or not _NO_DALI.args[0]
    ]
