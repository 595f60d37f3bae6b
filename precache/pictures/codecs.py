"""Which libraries decode, resize and encode pictures here: they are part of what a dataset is."""

import PIL
import simplejpeg
from PIL import features

from precache.packages import version_of
from precache.pictures import kinds


def made_by() -> dict[str, str]:
    """Names and versions, as the manifest and the benchmarks record them."""
    return {
        "pillow_flavour": "pillow-simd" if pillow_is_simd() else "pillow",
        "pillow": PIL.__version__,
        "pillow_jpeg": pillow_jpeg(),
        "simplejpeg": simplejpeg.__version__,
        **{name: version_of(name) or "unknown" for name in kinds.loaded_packages},
    }


def pillow_is_simd() -> bool:
    """Whether the PIL that is imported is Pillow-SIMD; its releases alone are named `X.Y.Z.postN`."""
    return ".post" in PIL.__version__


def pillow_name() -> str:
    """What it calls itself."""
    return "Pillow-SIMD" if pillow_is_simd() else "Pillow"


def pillow_jpeg() -> str:
    """The JPEG library that Pillow was built with."""
    turbo = features.version("libjpeg_turbo")
    return f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"


def kinds_without_decoder() -> list[str]:
    """What stock Pillow reads and this one does not; plain TIFFs are read without libtiff, too."""
    built_with = set(features.get_supported())
    optional = {"jpg_2000": "JPEG2000", "libtiff": "compressed TIFF", "webp": "WEBP"}
    lacking = [kind for feature, kind in optional.items() if feature not in built_with]
    return [*(["AVIF"] if kinds.missing_decoder(kinds.AVIF_START) else []), *lacking]
