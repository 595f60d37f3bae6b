"""Kinds of picture files: recognising them by name, and choosing decoders of Pillow by their first bytes.

Whether a file is a picture is decided by its extension; only a name without one is looked into. How a picture
is decoded is decided by its first bytes.

Pillow reads some forty kinds of files. The kinds listed here are pictures whose header states their size, and
which Pillow decodes itself or by a library made for it. Other kinds are never opened: those for which Pillow
runs another program (EPS: Ghostscript) or needs a missing one (WMF, FITS, HDF5, GRIB, BUFR, MPEG), source
code (XBM, XPM), and work files or resources that are no photographs (PSD, ICNS, CUR, PCD, FLI, GBR, BLP,
...). A scan warns if a tree holds many of them.

Whether a file is a picture does not depend on the software that is installed: sample ids are ranks among
pictures, and must be the same on every machine. If a decoder is missing, the picture is rejected, and the
reason names the decoder. HEIF, and AVIF where Pillow was built without it, is read by a plugin of Pillow if
that is installed.

SVG and PDF are drawings without a size in pixels, so they are refused by name.
"""

import importlib.util
import os
import re
from contextlib import suppress

import PIL
import simplejpeg
from PIL import Image as PillowImage
from PIL import features

from precache.packages import installed_version, pillow_install_command
from precache.pictures import opencv, own_pillow
from precache.pictures.own_pillow import Image

_PLUGINS = {  # kind -> Pillow's module that reads it
    "JPEG": "Jpeg", "PNG": "Png", "GIF": "Gif", "WEBP": "WebP", "BMP": "Bmp", "TIFF": "Tiff",
    "AVIF": "Avif", "JPEG2000": "Jpeg2K", "PPM": "Ppm", "ICO": "Ico", "DDS": "Dds", "QOI": "Qoi",
    "SGI": "Sgi", "SUN": "Sun", "PCX": "Pcx", "DIB": "Bmp", "TGA": "Tga",
}  # fmt: skip
DECODER_PACKAGES = {"AVIF": "pillow-avif-plugin", "HEIF": "pillow-heif"}
"""Kind -> plugin of Pillow that reads it."""
_OPTIONAL = {"avif": "AVIF", "jpg_2000": "JPEG2000", "libtiff": "compressed TIFF", "webp": "WEBP"}
"""Pillow's name of an optional library -> kind that needs it; plain TIFFs are read without libtiff, too."""
_KIND_OF_EXTENSION = {
    ".webp": "WEBP", ".avif": "AVIF", ".avifs": "AVIF", ".heic": "HEIF", ".heics": "HEIF", ".heif": "HEIF",
    ".heifs": "HEIF", ".hif": "HEIF", ".jp2": "JPEG2000", ".j2k": "JPEG2000", ".jpc": "JPEG2000",
    ".jpf": "JPEG2000", ".jpx": "JPEG2000", ".j2c": "JPEG2000",
}  # fmt: skip
_NO_DECODER = re.compile(r"this Pillow has no decoder for ([\w ]+),")
loaded_packages: dict[str, str] = {}
"""Package -> version of what decodes pictures, beside Pillow and simplejpeg."""
AVIF_START = b"\0\0\0\x20ftypavif"
_HEIF_START = b"\0\0\0\x20ftypheic"
_OPENCV_PACKAGES = (
    "opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"
)  # fmt: skip
KINDS = (*_PLUGINS, "HEIF")
"""Pillow's names of the kinds that are pictures."""

IMAGE_EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".bmp", ".tif", ".tiff",
    ".avif", ".avifs", ".heic", ".heics", ".heif", ".heifs", ".hif", ".jp2", ".j2k", ".jpc", ".jpf",
    ".jpx", ".j2c", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico", ".dds", ".qoi", ".sgi",
    ".ras", ".pcx", ".dib",
))  # fmt: skip
"""Extensions of files that are pictures, whatever they hold."""
IMAGE_FOLDER_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Extensions of the files that torchvision's ImageFolder lists, its IMG_EXTENSIONS."""

# Extensions of pictures of kinds that are not read. PFM, for one, holds floats without a defined range; the
# first picture of a camera raw file is a thumbnail.
_OTHER_EXTENSIONS = frozenset((
    ".jxl", ".jxr", ".wdp", ".hdp", ".bpg", ".svg", ".svgz", ".pdf", ".eps", ".psd", ".psb", ".xcf",
    ".exr", ".hdr", ".pfm", ".icns", ".cur", ".pcd", ".wmf", ".emf", ".xbm", ".xpm", ".dng", ".cr2",
    ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".srf", ".srw", ".orf", ".rw2", ".rwl", ".raf", ".pef",
    ".3fr", ".iiq", ".erf", ".kdc", ".dcr", ".mrw", ".x3f", ".fits", ".dcm", ".djvu", ".pict", ".iff", ".vda",
    ".vst", ".icb", ".rgb", ".rgba", ".bw",
))  # fmt: skip
DRAWING = "a drawing, not a picture; render it first"
_DRAWINGS = {".svg": "SVG", ".svgz": "SVG", ".pdf": "PDF"}
_DRAWING_BYTES = 4096  # of a file's start that are searched: comments may stand before the first element

PREFIX_BYTES = 18
"""Number of first bytes of a file that `content_kind` and `begins_like_picture` need."""

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
)
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_BMP_START = re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\x00\x00\x00", re.DOTALL)


def content_kind(prefix: bytes) -> str | None:
    """Kind of a picture with these first bytes; None if they are not those of a single kind."""
    for signature, kind in _SIGNATURES:
        if prefix.startswith(signature):
            return kind
    if prefix[:4] == b"RIFF" and prefix[8:12] == b"WEBP":
        return "WEBP"
    if prefix[4:8] == b"ftyp" and prefix[8:12] in (b"avif", b"avis"):
        return "AVIF"
    if prefix[4:8] == b"ftyp" and prefix[8:12] in _HEIF_BRANDS:
        return "HEIF"
    return None


def begins_like_picture(prefix: bytes) -> bool:
    """Whether a file without an extension is a picture by its first bytes.

    A note may begin with the two letters of a BMP, so the size of its header counts, too.
    """
    kind = content_kind(prefix)
    return kind is not None and (kind != "BMP" or _BMP_START.match(prefix) is not None)


def looks_like_picture(name: str) -> bool:
    """Whether a file has the extension of a picture, kinds that are not read included."""
    return extension(name) in _OTHER_EXTENSIONS | IMAGE_EXTENSIONS


def skip_reason(name: str) -> str:
    """Reason for leaving out a file of this name."""
    kind = _DRAWINGS.get(extension(name))
    if kind is not None:
        return f"{kind}: {DRAWING}"
    if looks_like_picture(name):
        return "an unsupported kind of picture"
    return "no image extension" if extension(name) else "neither an image extension nor an image signature"


def drawing_kind(data: bytes) -> str | None:
    """Kind of drawing, SVG or PDF, by a file's first bytes; None if it is neither."""
    if data.startswith(b"%PDF-"):
        return "PDF"
    start = data[:_DRAWING_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    return "SVG" if start.startswith(b"<") and b"<svg" in start else None


def extension(name: str) -> str:
    """Extension of a file's name, in lower case, with its dot."""
    return os.path.splitext(name)[1].lower()


def decoder_kinds(data: bytes, name: str) -> list[str]:
    """Kinds whose decoders Pillow may try on a file.

    If its first bytes are those of a single kind, this is the only one. TGA has no signature, so its decoder
    would accept nearly anything, and is tried only on files of its extension.
    """
    kind = content_kind(data[:PREFIX_BYTES])
    if kind == "HEIF":  # files of some brands may be AVIF as well
        candidates = ["HEIF", "AVIF"]
    elif kind is not None:
        candidates = [kind]
    else:
        candidates = list(KINDS)
        if extension(name) != ".tga":
            candidates.remove("TGA")
    return [candidate for candidate in candidates if candidate in Image.OPEN]


def undecodable_kind(data: bytes) -> str | None:
    """Kind of a picture that this Pillow has no decoder for; None if it has one, or the kind is not known."""
    kind = content_kind(data[:PREFIX_BYTES])
    if kind is None:
        return None
    _, accept = Image.OPEN.get(kind, (None, None))
    if accept is None:
        return kind
    answer = accept(data[:PREFIX_BYTES])  # False, or a text that says why it cannot decode this
    return kind if not answer or isinstance(answer, str) else None


def decoder_versions() -> dict[str, str]:
    """Name -> version of the software that decodes pictures, as manifests and benchmarks record it."""
    return {
        "pillow_flavour": "pillow-simd" if pillow_is_simd() else "pillow",
        "pillow": PIL.__version__,
        "pillow_jpeg": pillow_jpeg(),
        "simplejpeg": simplejpeg.__version__,
        **loaded_packages,
    }


def pillow_is_simd() -> bool:
    """Whether Pillow-SIMD is installed as PIL; only its releases have versions like `X.Y.Z.postN`."""
    return ".post" in PIL.__version__


def pillow_jpeg() -> str:
    """Name and version of the JPEG library that Pillow was built with."""
    turbo = features.version("libjpeg_turbo")
    return f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"


def kinds_not_built_in() -> list[str]:
    """Kinds that stock Pillow reads, and the installed one was built without."""
    built_with = set(features.get_supported())
    return [kind for feature, kind in _OPTIONAL.items() if feature not in built_with]


def kinds_without_decoder() -> list[str]:
    """Kinds that neither the installed Pillow nor a plugin of it reads."""
    starts = {"AVIF": AVIF_START, "WEBP": opencv.START, "HEIF": _HEIF_START}
    kinds = [*kinds_not_built_in(), "HEIF"]
    return [kind for kind in kinds if kind not in starts or undecodable_kind(starts[kind]) is not None]


def unreadable_extensions() -> dict[str, str]:
    """Extension -> kind of the pictures that cannot be read with the software that is installed."""
    unreadable = kinds_without_decoder()
    return {suffix: kind for suffix, kind in _KIND_OF_EXTENSION.items() if kind in unreadable}


def no_decoder_reason(kind: str) -> str:
    """Reason for rejecting a picture of a kind that no decoder is installed for, with the remedy."""
    return f"this Pillow has no decoder for {kind}, so the picture may be intact; {decoder_remedy(kind)}"


def is_decodable_now(reason: str) -> bool:
    """Whether a picture was rejected only for want of a decoder that is installed now."""
    kind = kind_without_decoder(reason)
    return kind is not None and kind not in kinds_without_decoder()


def decoder_remedy(kind: str) -> str:
    """Remedy for pictures of this kind that cannot be read: the command that installs a decoder."""
    if kind in DECODER_PACKAGES:
        return f"install its plugin: python -m pip install --no-deps {DECODER_PACKAGES[kind]}"
    return f"stock Pillow has it: {pillow_install_command('pillow')}"


def kind_without_decoder(reason: str) -> str | None:
    """Kind that a reason of `no_decoder_reason` names; None for another reason."""
    match = _NO_DECODER.search(reason)
    return match[1] if match else None


def _record_package(name: str) -> None:
    loaded_packages[name] = installed_version(name) or "unknown"


# Loaded now, not with the first picture that needs one: a failing import is no damage of that picture.
own_pillow.load(f"{plugin}ImagePlugin" for plugin in dict.fromkeys(_PLUGINS.values()))
if undecodable_kind(AVIF_START) is not None:
    with suppress(ImportError):
        importlib.import_module("pillow_avif")
        Image.OPEN["AVIF"] = PillowImage.OPEN["AVIF"]
        _record_package("pillow-avif-plugin")
with suppress(ImportError):
    _heif = importlib.import_module("pillow_heif")
    Image.OPEN["HEIF"] = _heif.HeifImageFile, _heif.is_supported
    _record_package("pillow-heif")
if undecodable_kind(opencv.START) is not None and importlib.util.find_spec("cv2") is not None:
    Image.OPEN["WEBP"] = (  # type: ignore[assignment]  # an image decoded already
        opencv.open_webp,
        lambda prefix: content_kind(prefix) == "WEBP",
    )
    _opencv_names = [name for name in _OPENCV_PACKAGES if installed_version(name)]
    _record_package(_opencv_names[0] if _opencv_names else "opencv")
