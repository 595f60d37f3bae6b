"""Which files `import` finds: a `loaders.py` in the working folder hides the package `loaders`.

`python train.py` puts the script's folder in front of the path where modules are looked for, `python -m` and
`python -c` the working folder. A file there hides whatever has its name: a package of this project, one that
it needs, or a module of Python (`random.py`).
"""

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path

OURS = ("bench", "loaders", "precache")
_NEEDED = (
    "PIL", "boto3", "click", "cv2", "datasets", "google_crc32c", "numpy", "obstore",
    "plotly", "psutil", "pyarrow", "ray", "rich", "simplejpeg", "tensorboard", "torch", "torchvision",
    "tqdm", "webdataset", "xxhash",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """Environment for Python processes that find our packages, and nothing in their working folder.

    Python 3.10 does not know PYTHONSAFEPATH, and looks in the working folder all the same.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if _ROOT not in _installed_folders():
        inherited = os.environ.get("PYTHONPATH")
        others = [entry for entry in inherited.split(os.pathsep) if entry != str(_ROOT)] if inherited else []
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *others])
    return environment


def hiding_files(path: Sequence[str], names: Sequence[str] = ()) -> list[Path]:
    """Files and folders on `path`, as `sys.path` is, that hide modules of other places.

    Args:
        names: of the modules; none: those of Python, of this project, and of what it needs.
    """
    if not names:
        names = (*OURS, *_NEEDED, *sorted(sys.stdlib_module_names - set(sys.builtin_module_names)))
    installed = {_ROOT, *_installed_folders()}
    hiding = []
    for name in names:
        if FrozenImporter.find_spec(name) is not None:  # found before any file is looked for
            continue
        modules, folders = [], []  # a folder without an __init__.py is a module where there is no other
        for place in dict.fromkeys(path):
            spec = PathFinder.find_spec(name, [place])
            if spec is None:
                continue
            if spec.origin is None:
                folders.append(Path(place or ".", name).resolve())
            else:
                module = Path(spec.origin)
                modules.append(module.parent if module.name == "__init__.py" else module)
        found = [*modules, *folders] if name in OURS else modules
        has_another = len(modules) > 1 or name in OURS
        if found and has_another:
            first = found[0].resolve()
            # Ray puts a psutil of its own, in its package, in front of the installed one
            is_in_package = any("site-packages" in folder.name for folder in first.parents)
            if first.parent not in installed and not is_in_package:
                hiding.append(found[0])
    return hiding


def explain_hiding(files: Sequence[Path]) -> str:
    """Sentence that says what the files hide, and the remedy."""
    hidden = ", ".join(f"{file} hides the module {file.stem}" for file in files)
    return f"{hidden}; rename {'it' if len(files) == 1 else 'them'}, or run from another folder"


def _installed_folders() -> set[Path]:
    """Folders of Python's own modules, and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names]
    folders += [os.path.join(folder, "lib-dynload") for folder in folders[:2]]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return {Path(folder).resolve() for folder in folders}
