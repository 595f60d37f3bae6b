"""What `build` serves does not depend on the globals of the program, and it changes none of them."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import precache
from tests.building import build_loader
from tests.command import ROOT
from tests.precache.conversion.test_settings_of_program import make_pictures
from tests.program_settings import SETTINGS, program_state

FORMATS = ("shards", "webdataset")
TORCH_SETTINGS: dict[str, Callable[[], Any]] = {
    "torch's default dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's threads": lambda: torch.set_num_threads(2),
    "torch's gradients": lambda: torch.set_grad_enabled(False),
    "torch's algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch's printing": lambda: torch.set_printoptions(precision=1, threshold=2),
    "torch's precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch's random": lambda: torch.manual_seed(1),
    "torch's sharing": lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
}


def torch_state() -> dict[str, Any]:
    """Return the values of torch's globals."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "printing": str(torch._tensor_str.PRINT_OPTS),
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
    }


def digest_of_epoch(path: Path, workers: int) -> str:
    """Serve an epoch of what can be decoded, and return a digest of it."""
    digest = hashlib.sha256()
    settings: dict[str, Any] = {"size": 24, "batch_size": 4, "dtype": "float32", "augment": "train"}
    with build_loader(path, workers=workers, on_error="skip", **settings) as loader:
        for batch in loader:
            for part in (batch.images, batch.labels, batch.ids, batch.padding):
                digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def serve_with_settings(folder: Path, settings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Serve an epoch with each setting of the program, which stays for the later ones; return what is wrong.

    The threads that decode a tree serve with each; the other readers without and with all, to save time.
    """
    wrong: dict[str, Any] = {}
    digests: dict[tuple[str, int], str] = {}
    last = [*settings][-1]
    for name, change in {"none": lambda: None, **settings}.items():
        change()
        cases = [("tree", 0)]
        if name in ("none", last):
            cases += [(kind, 1) for kind in ("tree", *FORMATS)]
        for kind, workers in cases:
            before = program_state() | torch_state()
            digest = digest_of_epoch(folder / kind, workers)
            after = program_state() | torch_state()
            changed = [part for part in before if before[part] != after[part]]
            if changed or digests.setdefault((kind, workers), digest) != digest:
                wrong[f"{name}, {kind}, {workers} workers"] = changed or "other pictures"
    return wrong


def test_no_global_decides_what_build_serves_or_is_changed(tmp_path: Path) -> None:
    make_pictures(tmp_path / "tree")
    for name in FORMATS:
        recipe = precache.Recipe(format=name, size=32)
        precache.convert(tmp_path / "tree", tmp_path / name, recipe, workers=0, max_rejects=1)
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, f"it ended with {child.returncode}:\n{child.stderr}"
    assert json.loads(child.stdout) == {}


def test_warnings_of_the_training_are_not_lost(tmp_path: Path) -> None:
    """Threads decode pictures that make Pillow warn, while the training raises warnings of its own."""
    make_pictures(tmp_path / "tree")
    for path in tmp_path.glob("tree/*/c*"):  # those that are cut, or have a wrong checksum
        path.unlink()
    filters = list(warnings.filters)
    settings: dict[str, Any] = {"size": 24, "batch_size": 1, "workers": 0, "threads": 2}
    raised = seen = 0
    with build_loader(tmp_path / "tree", **settings) as loader:
        for _ in range(8):
            for _ in loader:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    torch.ones(300, 300) @ torch.ones(300, 300)  # so that threads go on meanwhile
                    warnings.warn("of the training", UserWarning, stacklevel=1)
                raised, seen = raised + 1, seen + len(caught)
    assert seen == raised > 50
    assert warnings.filters == filters


if __name__ == "__main__":
    print(json.dumps(serve_with_settings(Path(sys.argv[1]), {**TORCH_SETTINGS, **SETTINGS})))
