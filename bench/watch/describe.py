"""Describes the loaders of a script that `bench watch` started, in the script's own process. Stands alone.

It imports the standard library alone, and looks at what the script has imported. `bench.watch.hook` calls it
when a dataset or a loader is made, and once it has seen a first batch; what goes wrong in here is an event
there. `bench.watch.advice` makes text of the record, which is plain values:

    loader      full name of its class
    made        the line of the script where it was made, see `_call`; None: not known
    made_of     datasets of which a loader was made there
    libraries   that made it, between that line and the loader, the outermost first: ["transformers"]
    arguments   of the loader, by torch's names, as it has them now
    collate     "default", or the name of the function
    sampler     {"name": "RandomSampler", ...}
    dataset     see `_dataset`
    root        of the innermost dataset, absolute; "" where it has none
    batch       what `describe_batch` says of the first one
    main        the script's file; `guarded`: whether it got here below `if __name__ == "__main__"`
    start       how processes are started: fork, spawn, forkserver
    cuda        whether the script uses a GPU
    python      the interpreter
    folder      the working folder as the script began; `moved`: whether it is another one now
"""

import ast
import contextlib
import functools
import inspect
import linecache
import os
import sys
import textwrap
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.getcwd()
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LOADERS = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "loaders") + os.sep  # this project's own
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = ("accelerate", "fastai", "lightning", "timm", "transformers", "ultralytics")
"""They are libraries where they are run from a checkout, too."""
_FIRST_CLASSES = 20  # whose names are told
_IMAGE_FOLDER = "torchvision.datasets.folder.ImageFolder"
_MOST = 64  # numbers of a value that is told
_INNER_NAMES = ("dataset", "subset", "base_dataset", "base", "ds", "data")
_ARGUMENTS = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "drop_last",
)

_Record = dict[str, Any]
_made: dict[int, tuple[Any, _Record]] = {}
"""By the id of a dataset or loader: a reference to it, and where it was made."""
_loaded: dict[int, tuple[Any, tuple[_Record, Any]]] = {}
"""By the id of a dataset: a reference to it; where the script made a loader of it, a reference to that."""
_counts: dict[tuple[str, int, int | None], int] = {}
"""By path, line and column of a call: datasets that it made, or of which it made a loader."""
_roots: dict[int, tuple[Any, str]] = {}
"""By the id of a dataset: a reference to it, and its root when it was made."""


def watch_datasets(module: ModuleType) -> None:
    """Note where datasets of torchvision are made, and what their root is there."""
    dataset = module.VisionDataset
    make = dataset.__init__

    @functools.wraps(make)
    def __init__(self: Any, root: Any = None, *args: Any, **kwargs: Any) -> None:
        make(self, root, *args, **kwargs)
        with contextlib.suppress(Exception):
            origin = _origin(sys._getframe(1))
            _note(_made, self, origin)
            _count(origin)
            if isinstance(root, (str, os.PathLike)):
                _note(_roots, self, os.path.abspath(os.path.expanduser(os.fsdecode(root))))

    dataset.__init__ = __init__


def loader_made(loader: Any, dataset: Any) -> None:
    """Note where `loader` is made; of one that a framework makes of another, where that was made."""
    origin = _origin(sys._getframe(1))
    own = _find(_loaded, dataset)
    if origin["libraries"] and own is not None:
        origin, original = own
        if original() is not None:
            origin = {**origin, **_settings(original())}
    elif own is None or own[0]["made"] != origin["made"]:
        _note(_loaded, dataset, (origin, weakref.ref(loader)))
        _count(origin)
    _note(_made, loader, origin)


def place(loader: Any) -> str:
    """`file:line` of the script where the loader was made; "" where that is not known."""
    call = (_find(_made, loader) or {}).get("made")
    return f"{call['path']}:{call['line']}" if call else ""


def describe(loader: Any) -> _Record:
    """The record of the module's docstring, without `batch`."""
    origin = _find(_made, loader) or {"made": None, "libraries": [], "main": "", "guarded": False}
    origin["made_of"] = _counts.get(_key(origin["made"]), 0)
    dataset = _dataset(getattr(loader, "dataset", None))
    innermost = dataset
    while len(innermost["inner"]) == 1:
        innermost = innermost["inner"][0]
    torch = sys.modules.get("torch")
    return {
        **_settings(loader),
        **origin,
        "dataset": dataset,
        "root": innermost["root"],
        "start": _start_method(loader),
        "cuda": bool(torch is not None and torch.cuda.is_initialized()),
        "python": sys.executable,
        "folder": _FOLDER,
        "moved": os.getcwd() != _FOLDER,
    }


def _settings(loader: Any) -> _Record:
    """The class of a loader, and what it was told."""
    batches = getattr(loader, "batch_sampler", None)
    arguments = {name: _plain(getattr(loader, name, None)) for name in _ARGUMENTS}
    if batches is not None:  # which a script may give in their place
        arguments |= {name: _plain(getattr(batches, name, None)) for name in ("batch_size", "drop_last")}
    return {
        "loader": _full_name(type(loader)),
        "arguments": arguments,
        "collate": _collate(loader),
        "sampler": _sampler(loader),
    }


def _count(origin: _Record) -> None:
    key = _key(origin["made"])
    _counts[key] = _counts.get(key, 0) + 1


def _key(call: _Record | None) -> tuple[str, int, int | None]:
    return (call["path"], call["line"], call["column"]) if call else ("", 0, None)


def _note(table: dict[int, tuple[Any, Any]], subject: Any, value: Any) -> None:
    key = id(subject)
    with contextlib.suppress(TypeError):  # a list, say, cannot be referred to weakly
        table[key] = weakref.ref(subject, lambda _: table.pop(key, None)), value


def _find(table: Mapping[int, tuple[Any, Any]], subject: Any) -> Any:
    found = table.get(id(subject))
    if found is None or found[0]() is not subject:
        return None
    return found[1]


# where it was made


def _origin(frame: FrameType | None) -> _Record:
    """The line of the script that is running, the libraries that it called, and how the script got there.

    Where no line is of the script, as of a command that a package installs, it is the outermost one.
    """
    call: _Record | None = None
    outermost: _Record | None = None
    libraries: list[str] = []
    main, guarded = "", False
    spawned = sys.modules.get("__mp_main__")
    if spawned is not None and spawned.__name__ == "__mp_main__":  # a process that the script has started
        main, guarded = str(spawned.__file__), True
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and not _is_here(path):
            if not _is_library(frame):
                if call is None:
                    call = _call(frame)
            elif call is None:
                library = _library(frame)
                if library not in ("", "torch", "torchvision") and library not in libraries:
                    libraries.insert(0, library)
                outermost = _call(frame)
            is_main = frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>"
            if is_main and not main:
                main, guarded = os.path.abspath(path), _is_guarded(path, frame.f_lineno)
        frame = frame.f_back
    return {"made": call or outermost, "libraries": libraries, "main": main, "guarded": guarded}


def _is_here(path: str) -> bool:
    return os.path.dirname(os.path.abspath(path)) == _HERE


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is of Python or a package, and not of the script or a module of its project."""
    path = frame.f_code.co_filename
    is_installed = any(f"{os.sep}{name}{os.sep}" in path for name in _PACKAGES)
    is_installed = is_installed or path.startswith(_LOADERS)
    return is_installed or path.startswith(_STANDARD_LIBRARY) or _package(frame) in _LIBRARIES


def _library(frame: FrameType) -> str:
    """The package that a frame of a library is of; "" for Python's own, and for what passes a call on."""
    if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY) and "-packages" not in frame.f_code.co_filename:
        return ""
    if "lightning" in _package(frame) and frame.f_code.co_name == "wrapper":  # around `DataLoader.__init__`
        return ""
    return _package(frame)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _call(frame: FrameType) -> _Record:
    """Where the call is that a frame is in: lines from 1, columns in bytes from 0; None: not known."""
    found: _Record = {"path": os.path.abspath(frame.f_code.co_filename), "line": frame.f_lineno}
    found |= {"end_line": None, "column": None, "end_column": None}
    if sys.version_info >= (3, 11):
        positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        line, found["end_line"], found["column"], found["end_column"] = positions
        found["line"] = line or frame.f_lineno
    return found


def _is_guarded(path: str, line: int) -> bool:
    """Whether the line of a script is below `if __name__ == ...`, which a process of it does not run."""
    with contextlib.suppress(SyntaxError):
        for statement in ast.parse("".join(linecache.getlines(path))).body:
            if isinstance(statement, ast.If) and statement.lineno <= line <= (statement.end_lineno or 0):
                return any(
                    isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
                )
    return False


# what it is of


def _dataset(dataset: Any) -> _Record:
    """A dataset and those that it is made of.

    `inner` are the datasets in it, and `attribute` is where they are; `indices` says of a Subset how many
    there are, and whether one of them comes twice. `digest` is of paths below the root and labels.
    `transforms` is a list of `_transform`, empty where a picture stays as it is, None where the dataset has
    none to tell.
    """
    made = (_find(_made, dataset) or {}).get("made")
    found: _Record = {
        "class": _full_name(type(dataset)),
        "file": _file_of(type(dataset)),
        "is_image_folder": "torchvision.datasets.folder.ImageFolder"
        in map(_full_name, type(dataset).__mro__),
        "samples": _length(dataset),
        "made": made,
        "made_of": _counts.get(_key(made), 0),
        "root": _root(dataset),
        "inner": [],
        "attribute": "",
        "indices": None,
        "transforms": _transforms(dataset),
        "target_transform": getattr(dataset, "target_transform", None) is not None,
        "reader": _name_of(getattr(dataset, "loader", None)),
        "classes": None,
        "digest": None,
    }
    parts = getattr(dataset, "datasets", None)
    if found["class"].endswith(".ConcatDataset") and isinstance(parts, Sequence):
        found |= {"inner": [_dataset(part) for part in parts], "attribute": "datasets"}
        return found
    for name in _INNER_NAMES:
        inner = vars(dataset).get(name) if hasattr(dataset, "__dict__") else None
        if _is_dataset(inner):
            found |= {"inner": [_dataset(inner)], "attribute": name}
            break
    if found["class"] == "torch.utils.data.dataset.Subset":
        numbers = [int(number) for number in dataset.indices]
        found["indices"] = {"count": len(numbers), "repeated": len(set(numbers)) < len(numbers)}
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        names = [str(name) for name in classes[:_FIRST_CLASSES]]
        every = digest((str(name), 0) for name in classes)
        found["classes"] = {"count": len(classes), "first": names, "digest": every}
    samples = getattr(dataset, "samples", None)
    if found["root"] and isinstance(samples, list):
        with contextlib.suppress(Exception):  # samples of another kind
            found["digest"] = digest(_below(str(dataset.root), samples))
    return found


def _below(root: str, samples: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    top = os.path.join(os.path.expanduser(root), "")
    for path, label in samples:
        yield path.removeprefix(top), int(label)


def digest(samples: Iterator[tuple[str, int]]) -> int:
    """A number that tells two lists of paths and labels apart."""
    found = 0
    for path, label in samples:
        found = zlib.crc32(f"{path}\0{label}\n".encode("utf-8", "surrogateescape"), found)
    return found


def _root(dataset: Any) -> str:
    noted = _find(_roots, dataset)
    if noted is not None:
        return str(noted)
    root = getattr(dataset, "root", None)
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        return ""
    return os.path.abspath(os.path.expanduser(os.fsdecode(root)))


def _is_dataset(value: Any) -> bool:
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(value, torch.Dataset)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # whatever a script's own class raises: it has no length
        return None


def _collate(loader: Any) -> str:
    function = getattr(loader, "collate_fn", None)
    name = _name_of(function)
    usual = [f"torch.utils.data._utils.collate:default_{word}" for word in ("collate", "convert")]
    return "default" if name in usual else name


def _sampler(loader: Any) -> _Record:
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    found: _Record = {"name": type(sampler).__name__}
    names = ("replacement", "num_samples", "shuffle", "drop_last")
    found |= {name: _plain(getattr(sampler, name)) for name in names if hasattr(sampler, name)}
    if not _full_name(type(sampler)).startswith("torch.utils.data."):
        found["name"] = _full_name(type(sampler))
    if batches is not None and _full_name(type(batches)) != "torch.utils.data.sampler.BatchSampler":
        found["batches"] = _full_name(type(batches))
    return found


def _start_method(loader: Any) -> str:
    context = getattr(loader, "multiprocessing_context", None)
    if context is None:
        import multiprocessing

        context = multiprocessing.get_context()
    return str(context.get_start_method())


def describe_batch(batch: Any) -> _Record:
    """Its form, "pair" of images and labels, "dict" or the name of its class; its images, if it has some."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        images, labels = batch
        views = list(images) if isinstance(images, (list, tuple)) else [images]
        tensors = [_tensor(view) for view in views]
        if tensors and tensors[0] is not None and all(tensor == tensors[0] for tensor in tensors):
            found = {"images": tensors[0], "labels": _tensor(labels)}
            is_list = isinstance(images, (list, tuple))
            return {"form": "pair", **found, "views": len(views) if is_list else 1, "listed": is_list}
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        tensors = [_tensor(batch[name]) for name in batch.keys()]  # noqa: SIM118 (it need not be a dict)
        pictures = [tensor for tensor in tensors if tensor is not None and len(tensor["shape"]) == 4]
        return {"form": "dict", "images": pictures[0] if pictures else None}
    return {"form": type(batch).__name__}


def _tensor(value: Any) -> _Record | None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [int(side) for side in value.shape]}


# what is done to a picture


def _transforms(dataset: Any) -> list[_Record] | None:
    names = vars(dataset) if hasattr(dataset, "__dict__") else {}
    if "transform" not in names:
        return None
    return [] if names["transform"] is None else list(_steps(names["transform"]))


def _steps(transform: Any) -> Iterator[_Record]:
    """The transforms one after the other, without those that only hold others."""
    inner = None
    if _is_torchvision(transform):
        if type(transform).__name__ == "Compose":
            inner = transform.transforms
    elif type(transform).__name__ == "Sequential" and _full_name(type(transform)).startswith("torch."):
        inner = list(transform)
    elif (passed := _passes_on(transform)) is not None:
        inner = [getattr(transform, passed)]
    if inner is None:
        yield _transform(transform)
        return
    for step in inner:
        yield from _steps(step)


def _transform(transform: Any) -> _Record:
    """A transform as plain values: `known` where it is torchvision's, `text` as one reads it.

    `views` and `inner` are of one that makes several pictures of one, each by the same transforms.
    """
    if not _is_torchvision(transform):
        found: _Record = {"name": _name_of(transform).rpartition(":")[2], "known": False, "arguments": {}}
        if inspect.isfunction(transform) and transform.__name__ == "<lambda>":
            found["text"] = "a lambda"
        else:
            found["text"] = f"{found['name']}(...)"
        views = _makes_views(transform)
        if views is not None:
            attribute, found["views"] = views
            found["inner"] = list(_steps(getattr(transform, attribute)))
        return found
    values = {
        name: _plain(value)
        for name, value in vars(transform).items()
        if not name.startswith("_") and name not in ("training", "transforms")
    }
    text = " ".join(repr(transform).split())
    return {
        "name": type(transform).__name__,
        "known": True,
        "arguments": values,
        "text": text if len(text) <= 160 else f"{type(transform).__name__}(...)",
    }


def _is_torchvision(transform: Any) -> bool:
    return type(transform).__module__.startswith("torchvision.transforms")


def _passes_on(transform: Any) -> str | None:
    """The attribute with a transform to which `__call__` only passes the picture on; None: it does more."""
    value, _ = _returned(transform)
    return _own_attribute(value)


def _makes_views(transform: Any) -> tuple[str, int] | None:
    """The attribute with a transform that `__call__` calls once for each view, and how many views."""
    value, names = _returned(transform)
    if isinstance(value, (ast.List, ast.Tuple)):
        views = [names.get(one.id) if isinstance(one, ast.Name) else one for one in value.elts]
        attributes = {_own_attribute(view) for view in views}
        attribute = attributes.pop() if len(attributes) == 1 else None
        return None if attribute is None else (attribute, len(views))
    if not isinstance(value, ast.ListComp) or len(value.generators) != 1:
        return None
    attribute, numbers = _own_attribute(value.elt), value.generators[0].iter
    if attribute is None or not isinstance(numbers, ast.Call) or value.generators[0].ifs:
        return None
    if getattr(numbers.func, "id", "") != "range" or len(numbers.args) != 1:
        return None
    count = numbers.args[0]
    if isinstance(count, ast.Attribute) and getattr(count.value, "id", "") == "self":
        several = getattr(transform, count.attr, None)
    else:
        several = count.value if isinstance(count, ast.Constant) else None
    return (attribute, several) if isinstance(several, int) else None


def _returned(transform: Any) -> tuple[ast.expr | None, dict[str, ast.expr]]:
    """What the `__call__`, or `forward`, of a script's own class returns, and what it calls by a name before.

    None where it does anything else.
    """
    own = type(transform)
    method = vars(own).get("forward") or vars(own).get("__call__")
    names: dict[str, ast.expr] = {}
    if not inspect.isfunction(method):
        return None, names
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return None, names
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # its docstring
    for statement in body:
        if isinstance(statement, ast.Return):
            return statement.value, names
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            break
        names[statement.targets[0].id] = statement.value
    return None, names


def _own_attribute(call: ast.expr | None) -> str | None:
    """NAME of a call `self.NAME(x)`."""
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(call.args[0], ast.Name):
        return None
    return function.attr if getattr(function.value, "id", "") == "self" else None


# names and values


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _file_of(kind: type) -> str:
    try:
        return os.path.abspath(inspect.getsourcefile(kind) or "")
    except (TypeError, OSError):
        return ""


def _name_of(function: Any) -> str:
    """`module:name` of a function, or of the class of what is called."""
    if function is None:
        return ""
    while isinstance(function, functools.partial):
        function = function.func
    named: Callable[..., Any] | type = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


def _plain(value: Any) -> Any:
    """The value as JSON has it; of others the name of the type, in angle brackets."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "tolist") and len(getattr(value, "shape", (_MOST,))) < 2 and value.nbytes < 8 * _MOST:
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) < _MOST:
        return [_plain(one) for one in value]
    return f"<{type(value).__name__}>"
