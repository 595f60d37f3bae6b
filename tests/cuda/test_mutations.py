"""Mutation tests: a test of `test_order.py` fails without any one of the rules for the order on a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT

ORDER = "tests/cuda/test_order.py"
RIGHT = "each_batch_is_right"
# rule -> (file below loaders/, its line for the rule, the line that breaks the rule, the tests that then
# fail)
MUTATIONS = {
    "the training waits for the batch": (
        "transfer.py", "current.wait_event(batch.ready)", "pass", f"{RIGHT} and shards-float",
    ),
    "memory of a batch is not lent while the training reads it": (
        "transfer.py", "tensor.record_stream(current)", "pass", f"{RIGHT} and shards-float",
    ),
    "the event is recorded behind the work": (
        "transfer.py",
        "        batch = self._prepare(views, request.drop(decoded.refused))\n",
        "        mark = self.lane.mark()\n"
        "        batch = self._prepare(views, request.drop(decoded.refused))\n"
        "        batch.ready = mark\n",
        f"{RIGHT} and shards-float",
    ),
    "the reading thread works on the lane": (
        "loader.py", "with pipeline.lane.active():", "if True:", "only_waits_for_each_batch",
    ),
    "readers and caches are made on the lane": (
        "building.py", "with lane.active():", "if True:", "spoils_no_later_batch and cache-on-the-device",
    ),
    "pictures are read into pinned memory": (
        "read/filler.py", 'self._pinned = device.type == "cuda"', "self._pinned = False",
        "read_into_pinned",
    ),
    "what is sent comes from pinned memory": (
        "device.py",
        "pinned = tensor if tensor.is_pinned() else tensor.pin_memory()", "pinned = tensor",
        "host_waits and shards-train",
    ),
    "the thread does not wait for the copy": (
        "device.py", "non_blocking=True", "non_blocking=False", "host_waits and shards-float",
    ),
    "the device keeps its number": (
        "device.py", 'return torch.device("cuda", index)', 'return torch.device("cuda")',
        "current_one_when_the_loader_is_built",
    ),
    "DALI gets back what was read": (
        "device.py", "            read_event.synchronize()\n", "", "memory_of_dali",
    ),
    "what DALI lends is copied": (
        "device.py", "copy = borrowed.clone()", "copy = borrowed.view(borrowed.shape)",
        "memory_of_dali",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for name in ("loaders", "precache", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_each_rule_is_in_its_file_once() -> None:
    for name, line, *_ in MUTATIONS.values():
        assert (ROOT / "loaders" / name).read_text().count(line) == 1, line


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", MUTATIONS, ids=lambda rule: rule.replace(" ", "-"))
def test_a_test_fails_without_the_rule(rule: str, copy: Path) -> None:
    name, old, new, tests = MUTATIONS[rule]
    file = copy / "loaders" / name
    source = file.read_text()
    command = [sys.executable, "-m", "pytest", "-qxp", "no:cacheprovider", "-m", "", ORDER, "-k", tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        file.write_text(source.replace(old, new))
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        file.write_text(source)
    assert result.returncode == 1, result.stdout[-2000:]
    assert "1 failed" in result.stdout
