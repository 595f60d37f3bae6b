"""Which libraries decode, resize and encode pictures here: they are part of what a dataset is."""

import PIL
import simplejpeg
from PIL import features


def made_by() -> dict[str, str]:
    """Names and versions, as the manifest and the benchmarks record them."""
    return {
        "pillow_flavour": "pillow-simd" if pillow_is_simd() else "pillow",
        "pillow": PIL.__version__,
        "pillow_jpeg": pillow_jpeg(),
        "simplejpeg": simplejpeg.__version__,
    }


def pillow_is_simd() -> bool:
    """Whether the PIL that is imported is Pillow-SIMD; its releases alone are named `X.Y.Z.postN`."""
    return ".post" in PIL.__version__


def pillow_jpeg() -> str:
    """The JPEG library that Pillow was built with."""
    turbo = features.version("libjpeg_turbo")
    return f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"


def kinds_without_decoder() -> list[str]:
    """The kinds of pictures that Pillow was built without; plain TIFFs are read without libtiff, too."""
    built_with = set(features.get_supported())
    optional = {"avif": "AVIF", "jpg_2000": "JPEG2000", "libtiff": "compressed TIFF", "webp": "WEBP"}
    return [kind for feature, kind in optional.items() if feature not in built_with]
