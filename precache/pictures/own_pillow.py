"""Pillow's modules, loaded a second time, with settings of their own.

Pillow keeps its settings as globals of its modules: LOAD_TRUNCATED_IMAGES, MAX_IMAGE_PIXELS, MAX_TEXT_CHUNK,
the kinds that it opens. They are the program's, which sets them for its own code, at any time and in any
thread. Pictures are decoded by the modules here: the program's settings do not decide what is converted, and
stay as they are. Code in C is shared. An image of these modules is no `PIL.Image.Image`.
"""

import importlib.util
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import PIL

__all__ = ("Image", "ImageOps", "UnidentifiedImageError", "adopt", "load")
_PACKAGE = f"{__name__}_package"
_SHARED = ("_imaging", "_webp", "_avif", "ExifTags")  # in C, or without settings
_SILENT = SimpleNamespace(warn=lambda *_, **__: None)


def _load_package() -> ModuleType:
    """Load Pillow's package under another name, with the modules that need not be loaded twice."""
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, PIL.__file__, submodule_search_locations=list(PIL.__path__)
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    for name in _SHARED:
        with suppress(ImportError):  # Pillow may be built without
            module = importlib.import_module(f"PIL.{name}")
            sys.modules[f"{_PACKAGE}.{name}"] = module
            setattr(package, name, module)
    return package


def load(names: Iterable[str]) -> None:
    """Load these modules of Pillow, as far as it has them; their warnings are silent."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(f"{_PACKAGE}.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}.") and "warnings" in vars(module):
            vars(module)["warnings"] = _SILENT


def adopt(image: Any) -> "Image.Image":
    """Decode an image of Pillow's, and return it as an image of these modules that shares its pixels."""
    image.load()
    adopted = Image.Image()
    vars(adopted).update(vars(image), format=image.format)
    return adopted


_package = _load_package()
load(("Image", "ImageOps"))
if TYPE_CHECKING:
    from PIL import Image, ImageOps, UnidentifiedImageError
else:
    Image, ImageOps, UnidentifiedImageError = (
        _package.Image,
        _package.ImageOps,
        _package.UnidentifiedImageError,
    )
    Image.MAX_IMAGE_PIXELS = None  # `precache.pictures.pillow` checks the sizes
