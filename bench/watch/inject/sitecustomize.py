"""Start of the hook in every Python process of a watched script, as soon as the script imports torch.

`bench watch` puts this folder first on PYTHONPATH, so that Python imports this module when it starts. It only
waits for the modules in _TIMED to be imported, and runs the environment's own sitecustomize.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOK = "bench_watch_hook"
_CPUS = "bench_watch_cpus"
_FILES = {
    _HOOK: "hook.py",
    _CPUS: "cpus.py",
    "bench_watch_origin": "origin.py",
    "bench_watch_parts": "parts.py",
    "bench_watch_transforms": "transforms.py",
}
_TIMED = (
    "torch.utils.data.dataloader",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "fastai.data.load",
    "loaders.loader",
)
"""Modules that the hook wraps once they have been imported."""


class _Finder:
    """Finder of the hook's own files, which also calls the hook after a module of _TIMED was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in _FILES:
            return importlib.util.spec_from_file_location(name, os.path.join(_HERE, "..", _FILES[name]))
        if name not in _TIMED:
            return None
        spec = None
        for finder in sys.meta_path:
            if spec is None and finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def run_and_watch(module: ModuleType) -> None:
            run(module)
            importlib.import_module(_HOOK).watch_module(name, module)

        spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def _run_other_sitecustomize() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "BENCH_WATCH" in os.environ:
    sys.meta_path.insert(0, _Finder())
    importlib.import_module(_CPUS)
_run_other_sitecustomize()
