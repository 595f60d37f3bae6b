"""Description of the loaders of a script that `bench watch` started, in the script's own process.

This module imports the standard library alone, and looks at modules that the script has imported.
`bench.watch.hook` calls it when a dataset or a loader is made, and after a first batch; errors in here become
events there. The result is the *record* of a loader, a dict of plain values, from which `bench.watch.advice`
and `bench.watch.replacements` write lines to change in the script:

    loader      full name of the loader's class
    made        call in the script that made it, see `_position_of`; None: not known
    made_of     number of datasets for which that call has made a loader
    libraries   libraries between that call and the loader, the outermost first: ["transformers"]
    arguments   arguments of the loader, by torch's names, as it has them now
    collate     "default", or the name of the function
    sampler     {"name": "RandomSampler", ...}
    dataset     record of the dataset, see `_describe_dataset`
    root        root folder of the innermost dataset, absolute; "" where it has none
    batch       form of the first batch, see `describe_batch`
    main        file of the script that was started
    guarded     whether the call is below `if __name__ == "__main__"` there
    start       start method of processes: fork, spawn, forkserver
    cuda        whether the script uses a GPU
    python      path of the interpreter
    folder      working folder when the script began
    moved       whether the working folder is another one now
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
_LOADERS = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "loaders") + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = ("accelerate", "fastai", "lightning", "timm", "transformers", "ultralytics")
"""Packages that are libraries even where they are run from a checkout, and not installed."""
_MAX_CLASSES = 20  # most names of classes in a record
_IMAGE_FOLDER = "torchvision.datasets.folder.ImageFolder"
_MAX_NUMBERS = 64  # longest list or array in a record
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
_origins: dict[int, tuple[Any, _Record]] = {}
"""Weak reference to a dataset or loader, and its origin, by the id of it; see `_find_origin`."""
_first_loaders: dict[int, tuple[Any, tuple[_Record, Any]]] = {}
"""Weak reference to a dataset, origin of the script's loader of it and reference to that, by dataset id."""
_counts: dict[tuple[str, int, int | None], int] = {}
"""Number of datasets that a call made, or made a loader for, by its path, line and column."""
_roots: dict[int, tuple[Any, str]] = {}
"""Weak reference to a dataset, and its root when it was made, by the id of the dataset."""


def watch_datasets(module: ModuleType) -> None:
    """Wrap torchvision's dataset class so that it notes where datasets are made, and their roots."""
    dataset = module.VisionDataset
    make = dataset.__init__

    @functools.wraps(make)
    def __init__(self: Any, root: Any = None, *args: Any, **kwargs: Any) -> None:
        make(self, root, *args, **kwargs)
        with contextlib.suppress(Exception):
            origin = _find_origin(sys._getframe(1))
            _note(_origins, self, origin)
            _count_dataset(origin)
            if isinstance(root, (str, os.PathLike)):
                _note(_roots, self, os.path.abspath(os.path.expanduser(os.fsdecode(root))))

    dataset.__init__ = __init__


def note_loader(loader: Any, dataset: Any) -> None:
    """Note where a loader is made; where a framework makes it of another loader, where that one was made."""
    origin = _find_origin(sys._getframe(1))
    first = _find(_first_loaders, dataset)
    if origin["libraries"] and first is not None:  # a library makes its own loader of the script's
        origin, script_loader = first
        if script_loader() is not None:
            origin = {**origin, **_settings(script_loader())}
    elif first is None or first[0]["made"] != origin["made"]:
        _note(_first_loaders, dataset, (origin, weakref.ref(loader)))
        _count_dataset(origin)
    _note(_origins, loader, origin)


def line_of(loader: Any) -> str:
    """'file:line' of the script where a loader was made; "" where that is not known."""
    call = (_find(_origins, loader) or {}).get("made")
    return f"{call['path']}:{call['line']}" if call else ""


def describe(loader: Any) -> _Record:
    """Make the record of a loader, without `batch`."""
    origin = _find(_origins, loader) or {"made": None, "libraries": [], "main": "", "guarded": False}
    origin["made_of"] = _counts.get(_key_of(origin["made"]), 0)
    dataset = _describe_dataset(getattr(loader, "dataset", None))
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
    """Class, arguments, collate function and sampler of a loader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    arguments = {name: _plain(getattr(loader, name, None)) for name in _ARGUMENTS}
    if batch_sampler is not None:  # a script may give it instead of these two arguments
        for name in ("batch_size", "drop_last"):
            arguments[name] = _plain(getattr(batch_sampler, name, None))
    return {
        "loader": _full_name(type(loader)),
        "arguments": arguments,
        "collate": _name_collate(loader),
        "sampler": _describe_sampler(loader),
    }


def _count_dataset(origin: _Record) -> None:
    """Count a dataset for the call that made it, or made its loader."""
    key = _key_of(origin["made"])
    _counts[key] = _counts.get(key, 0) + 1


def _key_of(call: _Record | None) -> tuple[str, int, int | None]:
    return (call["path"], call["line"], call["column"]) if call else ("", 0, None)


def _note(table: dict[int, tuple[Any, Any]], subject: Any, value: Any) -> None:
    """Note a value for an object, until the object is gone."""
    key = id(subject)
    with contextlib.suppress(TypeError):  # there are no weak references to a list, for example
        table[key] = weakref.ref(subject, lambda _: table.pop(key, None)), value


def _find(table: Mapping[int, tuple[Any, Any]], subject: Any) -> Any:
    """Return the value noted for an object; None where there is none."""
    entry = table.get(id(subject))
    if entry is None or entry[0]() is not subject:
        return None
    return entry[1]


# origins of loaders and datasets


def _find_origin(frame: FrameType | None) -> _Record:
    """Find the call of the script that is running: `made`, `libraries`, `main` and `guarded` of a record.

    Args:
        frame: innermost frame. Where no frame is of the script, as in a command that a package installs, the
            outermost call of a library stands in.
    """
    call: _Record | None = None
    outermost: _Record | None = None
    libraries: list[str] = []
    main, guarded = "", False
    spawned_main = sys.modules.get("__mp_main__")
    if spawned_main is not None and spawned_main.__name__ == "__mp_main__":  # a process of multiprocessing
        main, guarded = str(spawned_main.__file__), True
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and not _is_here(path):
            if not _is_library(frame):
                if call is None:
                    call = _position_of(frame)
            elif call is None:
                library = _library(frame)
                if library not in ("", "torch", "torchvision") and library not in libraries:
                    libraries.insert(0, library)
                outermost = _position_of(frame)
            is_main = frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>"
            if is_main and not main:
                main, guarded = os.path.abspath(path), _is_guarded(path, frame.f_lineno)
        frame = frame.f_back
    return {"made": call or outermost, "libraries": libraries, "main": main, "guarded": guarded}


def _is_here(path: str) -> bool:
    """Whether a file is one of the hook's own."""
    return os.path.dirname(os.path.abspath(path)) == _HERE


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is of Python or a package, rather than of the script or a module of its project."""
    path = frame.f_code.co_filename
    is_installed = any(f"{os.sep}{name}{os.sep}" in path for name in _PACKAGES)
    is_installed = is_installed or path.startswith(_LOADERS)
    return is_installed or path.startswith(_STANDARD_LIBRARY) or _package(frame) in _LIBRARIES


def _library(frame: FrameType) -> str:
    """Package of a library's frame; "" for Python's own, and for a wrapper that only passes a call on."""
    if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY) and "-packages" not in frame.f_code.co_filename:
        return ""
    if "lightning" in _package(frame) and frame.f_code.co_name == "wrapper":  # wraps `DataLoader.__init__`
        return ""
    return _package(frame)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _position_of(frame: FrameType) -> _Record:
    """Position of the call that a frame is in: path, lines from 1, columns in bytes from 0 (or None)."""
    position: _Record = {"path": os.path.abspath(frame.f_code.co_filename), "line": frame.f_lineno}
    position |= {"end_line": None, "column": None, "end_column": None}
    if sys.version_info >= (3, 11):
        line, end_line, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        position |= {"end_line": end_line, "column": column, "end_column": end_column}
        position["line"] = line or frame.f_lineno
    return position


def _is_guarded(path: str, line: int) -> bool:
    """Whether a line of a script is below `if __name__ == ...`, which processes that it starts do not run."""
    with contextlib.suppress(SyntaxError):
        for statement in ast.parse("".join(linecache.getlines(path))).body:
            if isinstance(statement, ast.If) and statement.lineno <= line <= (statement.end_lineno or 0):
                return any(
                    isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
                )
    return False


# datasets, samplers and batches


def _describe_dataset(dataset: Any) -> _Record:
    """Make the record of a dataset, with those of the datasets in it.

    Returns:
        Among others: `inner`, the records of the datasets in it, and `attribute`, the attribute that holds
        them; `made` and `made_of`, as in the record of a loader; `indices`, of a Subset: how many there are,
        and whether one of them comes twice; `digest`, of the paths below the root and the labels;
        `transforms`, the records of `_describe_transform`: empty where pictures stay as they are, None where
        the dataset has no attribute `transform`.
    """
    made = (_find(_origins, dataset) or {}).get("made")
    record: _Record = {
        "class": _full_name(type(dataset)),
        "file": _file_of(type(dataset)),
        "is_image_folder": _IMAGE_FOLDER in map(_full_name, type(dataset).__mro__),
        "samples": _length(dataset),
        "made": made,
        "made_of": _counts.get(_key_of(made), 0),
        "root": _root(dataset),
        "inner": [],
        "attribute": "",
        "indices": None,
        "transforms": _describe_transforms(dataset),
        "target_transform": getattr(dataset, "target_transform", None) is not None,
        "reader": _name_of(getattr(dataset, "loader", None)),
        "classes": None,
        "digest": None,
    }
    parts = getattr(dataset, "datasets", None)
    if record["class"].endswith(".ConcatDataset") and isinstance(parts, Sequence):
        record |= {"inner": [_describe_dataset(part) for part in parts], "attribute": "datasets"}
        return record
    for name in _INNER_NAMES:  # a dataset that wraps another
        inner = vars(dataset).get(name) if hasattr(dataset, "__dict__") else None
        if _is_dataset(inner):
            record |= {"inner": [_describe_dataset(inner)], "attribute": name}
            break
    if record["class"] == "torch.utils.data.dataset.Subset":
        numbers = [int(number) for number in dataset.indices]
        record["indices"] = {"count": len(numbers), "repeated": len(set(numbers)) < len(numbers)}
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        names = [str(name) for name in classes[:_MAX_CLASSES]]
        names_digest = digest((str(name), 0) for name in classes)
        record["classes"] = {"count": len(classes), "first": names, "digest": names_digest}
    samples = getattr(dataset, "samples", None)
    if record["root"] and isinstance(samples, list):
        with contextlib.suppress(Exception):  # its samples may be something else
            record["digest"] = digest(_relative_samples(str(dataset.root), samples))
    return record


def _relative_samples(root: str, samples: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the path below the root and the label of each sample."""
    top = os.path.join(os.path.expanduser(root), "")
    for path, label in samples:
        yield path.removeprefix(top), int(label)


def digest(samples: Iterator[tuple[str, int]]) -> int:
    """Checksum (CRC-32) of a list of paths and labels."""
    crc = 0
    for path, label in samples:
        crc = zlib.crc32(f"{path}\0{label}\n".encode("utf-8", "surrogateescape"), crc)
    return crc


def _root(dataset: Any) -> str:
    """Absolute root folder of a dataset; "" where it has none."""
    root_at_start = _find(_roots, dataset)
    if root_at_start is not None:  # a relative path meant this one, wherever the script is now
        return str(root_at_start)
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
    except Exception:  # a script's own class may raise anything
        return None


def _name_collate(loader: Any) -> str:
    """Name of a loader's collate function; "default" for those of torch."""
    function = getattr(loader, "collate_fn", None)
    name = _name_of(function)
    defaults = [f"torch.utils.data._utils.collate:default_{word}" for word in ("collate", "convert")]
    return "default" if name in defaults else name


def _describe_sampler(loader: Any) -> _Record:
    """Name and settings of a loader's sampler, and `batches`, the class of a batch sampler of the script."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    record: _Record = {"name": type(sampler).__name__}
    names = ("replacement", "num_samples", "shuffle", "drop_last")
    record |= {name: _plain(getattr(sampler, name)) for name in names if hasattr(sampler, name)}
    if not _full_name(type(sampler)).startswith("torch.utils.data."):
        record["name"] = _full_name(type(sampler))
    kind = _full_name(type(batch_sampler))
    if batch_sampler is not None and kind != "torch.utils.data.sampler.BatchSampler":
        record["batches"] = kind
    return record


def _start_method(loader: Any) -> str:
    context = getattr(loader, "multiprocessing_context", None)
    if context is None:
        import multiprocessing

        context = multiprocessing.get_context()
    return str(context.get_start_method())


def describe_batch(batch: Any) -> _Record:
    """Describe the form of a batch: "pair" of images and labels, "dict", or the name of its class.

    Returns:
        `form`; of a pair and a dict `images`, of a pair `labels`: dtype and shape of these tensors, or None;
        of a pair `views`, the number of image tensors, and `listed`, whether they are in a list.
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        images, labels = batch
        views = list(images) if isinstance(images, (list, tuple)) else [images]
        tensors = [_describe_tensor(view) for view in views]
        if tensors and tensors[0] is not None and all(tensor == tensors[0] for tensor in tensors):
            is_list = isinstance(images, (list, tuple))
            return {
                "form": "pair",
                "images": tensors[0],
                "labels": _describe_tensor(labels),
                "views": len(views) if is_list else 1,
                "listed": is_list,
            }
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        tensors = [_describe_tensor(batch[name]) for name in batch.keys()]  # noqa: SIM118 (it need not be a dict)
        pictures = [tensor for tensor in tensors if tensor is not None and len(tensor["shape"]) == 4]
        return {"form": "dict", "images": pictures[0] if pictures else None}
    return {"form": type(batch).__name__}


def _describe_tensor(value: Any) -> _Record | None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [int(side) for side in value.shape]}


# transforms


def _describe_transforms(dataset: Any) -> list[_Record] | None:
    """Records of a dataset's transforms; None where it has no attribute `transform`."""
    names = vars(dataset) if hasattr(dataset, "__dict__") else {}
    if "transform" not in names:
        return None
    return [] if names["transform"] is None else list(_steps(names["transform"]))


def _steps(transform: Any) -> Iterator[_Record]:
    """Yield the records of the transforms in their order, without transforms that only hold others."""
    inner = None
    if _is_torchvision(transform):
        if type(transform).__name__ == "Compose":
            inner = transform.transforms
    elif type(transform).__name__ == "Sequential" and _full_name(type(transform)).startswith("torch."):
        inner = list(transform)
    elif (attribute := _forwarding_attribute(transform)) is not None:
        inner = [getattr(transform, attribute)]
    if inner is None:
        yield _describe_transform(transform)
        return
    for step in inner:
        yield from _steps(step)


def _describe_transform(transform: Any) -> _Record:
    """Make the record of a transform.

    Returns:
        `name`; `known`, whether it is torchvision's; `arguments` by name; `text`, for sentences. A transform
        that makes several views of a picture also has their number, `views`, and `inner`, the records of the
        transforms that make a view.
    """
    if not _is_torchvision(transform):
        record: _Record = {"name": _name_of(transform).rpartition(":")[2], "known": False, "arguments": {}}
        if inspect.isfunction(transform) and transform.__name__ == "<lambda>":
            record["text"] = "a lambda"
        else:
            record["text"] = f"{record['name']}(...)"
        views = _find_views(transform)
        if views is not None:
            attribute, record["views"] = views
            record["inner"] = list(_steps(getattr(transform, attribute)))
        return record
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


def _forwarding_attribute(transform: Any) -> str | None:
    """Name the attribute with the transform that `__call__` only passes a picture to; None: it does more."""
    value, _ = _parse_return(transform)
    return _called_attribute(value)


def _find_views(transform: Any) -> tuple[str, int] | None:
    """Name the attribute with a transform that `__call__` calls once for each view, and count the views.

    Returns:
        Attribute and number of views; None where `__call__` does something else.
    """
    value, names = _parse_return(transform)
    if isinstance(value, (ast.List, ast.Tuple)):
        views = [names.get(view.id) if isinstance(view, ast.Name) else view for view in value.elts]
        attributes = {_called_attribute(view) for view in views}
        attribute = attributes.pop() if len(attributes) == 1 else None
        return None if attribute is None else (attribute, len(views))
    if not isinstance(value, ast.ListComp) or len(value.generators) != 1:
        return None
    attribute, numbers = _called_attribute(value.elt), value.generators[0].iter
    if attribute is None or not isinstance(numbers, ast.Call) or value.generators[0].ifs:
        return None
    if getattr(numbers.func, "id", "") != "range" or len(numbers.args) != 1:
        return None
    count = numbers.args[0]
    number: Any = None
    if isinstance(count, ast.Attribute) and getattr(count.value, "id", "") == "self":
        number = getattr(transform, count.attr, None)
    elif isinstance(count, ast.Constant):
        number = count.value
    return (attribute, number) if isinstance(number, int) else None


def _parse_return(transform: Any) -> tuple[ast.expr | None, dict[str, ast.expr]]:
    """Parse the `__call__`, or `forward`, of a script's own class, if it only assigns names and returns.

    Returns:
        The expression that it returns, None where the method does anything else; and the expressions that it
        assigns to names before.
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


def _called_attribute(call: ast.expr | None) -> str | None:
    """NAME of an expression `self.NAME(x)`; None for any other expression."""
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
    """'module:name' of a function, or of the class of another callable."""
    if function is None:
        return ""
    while isinstance(function, functools.partial):
        function = function.func
    named: Callable[..., Any] | type = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON has; of any other value, return the name of its type in '<>'."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if (
        hasattr(value, "tolist")
        and len(getattr(value, "shape", (_MAX_NUMBERS,))) < 2
        and value.nbytes < 8 * _MAX_NUMBERS
    ):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) < _MAX_NUMBERS:
        return [_plain(entry) for entry in value]
    return f"<{type(value).__name__}>"
