"""Find files that hide a module: a `loaders.py` in the working folder hides the package `loaders`.

`python train.py` puts the script's folder first on `sys.path`; `python -m` and `python -c` put the working
folder there. A file in it hides each module of its name: a package of this project, a package that it needs,
or a module of Python (`random.py`).
"""

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path

from precache.errors import MissingDependencyError

OUR_PACKAGES = ("bench", "loaders", "precache")
_NEEDED = (
    "PIL", "boto3", "click", "cv2", "datasets", "google_crc32c", "numpy", "obstore",
    "plotly", "psutil", "pyarrow", "ray", "rich", "simplejpeg", "tensorboard", "torch", "torchvision",
    "tqdm", "webdataset", "xxhash",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """Return an environment in which Python finds our packages, and imports nothing of its working folder.

    Python 3.10 ignores PYTHONSAFEPATH, and still looks in the working folder.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if _ROOT not in _installed_folders():
        inherited = os.environ.get("PYTHONPATH")
        others = [entry for entry in inherited.split(os.pathsep) if entry != str(_ROOT)] if inherited else []
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *others])
    return environment


def hiding_files(path: Sequence[str], names: Sequence[str] = ()) -> list[Path]:
    """Return the files and folders on `path`, a list like `sys.path`, that hide modules of other places.

    Args:
        names: modules to look for; by default those of Python, of this project, and of its dependencies.
    """
    if not names:
        names = (*OUR_PACKAGES, *_NEEDED, *sorted(sys.stdlib_module_names - set(sys.builtin_module_names)))
    installed = {_ROOT, *_installed_folders()}
    hiding = []
    for name in names:
        if FrozenImporter.find_spec(name) is not None:  # Python imports it before it looks for files
            continue
        modules, folders = [], []  # a folder without an __init__.py is imported only if nothing else is there
        for place in dict.fromkeys(path):
            spec = PathFinder.find_spec(name, [place])
            if spec is None:
                continue
            if spec.origin is None:
                folders.append(Path(place or ".", name).resolve())
            else:
                module = Path(spec.origin)
                modules.append(module.parent if module.name == "__init__.py" else module)
        is_ours = name in OUR_PACKAGES
        candidates = [*modules, *folders] if is_ours else modules
        if candidates and (is_ours or len(modules) > 1):
            first = candidates[0].resolve()
            # Ray puts the psutil inside its own package in front of the installed one
            is_in_package = any("site-packages" in folder.name for folder in first.parents)
            if first.parent not in installed and not is_in_package:
                hiding.append(candidates[0])
    return hiding


def hiding_error(files: Sequence[Path], problem: str = "") -> MissingDependencyError:
    """Return the error that says which modules `files` hide, after the `problem` that this has caused."""
    hidden = ", ".join(f"{file} hides the module {file.stem}" for file in files)
    message = f"{problem}; {hidden}" if problem else hidden
    pronoun = "it" if len(files) == 1 else "them"
    return MissingDependencyError(message, remedy=f"rename {pronoun}, or run from another folder")


def _installed_folders() -> set[Path]:
    """Return the folders of Python's own modules and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names]
    folders += [os.path.join(folder, "lib-dynload") for folder in folders[:2]]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return {Path(folder).resolve() for folder in folders}
