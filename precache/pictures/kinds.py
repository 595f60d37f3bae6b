"""Which files are pictures, which of Pillow's decoders may open them, and which libraries decode here.

Pillow reads some forty kinds of files. Those listed here are pictures of a size that their header states,
decoded by Pillow itself or by a library made for it. Not listed, so never opened: what makes Pillow run
another program (EPS: Ghostscript), what needs one that is not there (WMF, FITS, HDF5, GRIB, BUFR, MPEG),
what is source code (XBM, XPM), and what is a work file or a resource rather than a photograph (PSD, ICNS,
CUR, PCD, FLI, GBR, BLP, ...). A scan warns of them where there are many.

What is a picture does not depend on what is installed: sample ids are ranks among pictures, and must be the
same on every machine. Where a decoder is missing, a picture is rejected by name. HEIF, and AVIF where Pillow
was built without it, is read by a plugin of Pillow's, if it is installed.

SVG and PDF are drawings: how many pixels they have is for the user to say, so they are refused by name.
"""

import importlib
import os
import re
from contextlib import suppress

import PIL
import simplejpeg
from PIL import Image, features

from precache.packages import installed_version

_PLUGINS = {  # Pillow's modules, by the kinds that they read
    "JPEG": "Jpeg", "PNG": "Png", "GIF": "Gif", "WEBP": "WebP", "BMP": "Bmp", "TIFF": "Tiff",
    "AVIF": "Avif", "JPEG2000": "Jpeg2K", "PPM": "Ppm", "ICO": "Ico", "DDS": "Dds", "QOI": "Qoi",
    "SGI": "Sgi", "SUN": "Sun", "PCX": "Pcx", "DIB": "Bmp", "TGA": "Tga",
}  # fmt: skip
DECODER_PACKAGES = {"AVIF": "pillow-avif-plugin", "HEIF": "pillow-heif"}
"""Kinds that a package beside Pillow reads."""
_OPTIONAL = {"avif": "AVIF", "jpg_2000": "JPEG2000", "libtiff": "compressed TIFF", "webp": "WEBP"}
"""Kinds that Pillow reads where it was compiled with a library; plain TIFFs are read without libtiff, too."""
_KIND_OF_EXTENSION = {
    ".webp": "WEBP", ".avif": "AVIF", ".avifs": "AVIF", ".heic": "HEIF", ".heics": "HEIF", ".heif": "HEIF",
    ".heifs": "HEIF", ".hif": "HEIF", ".jp2": "JPEG2000", ".j2k": "JPEG2000", ".jpc": "JPEG2000",
    ".jpf": "JPEG2000", ".jpx": "JPEG2000", ".j2c": "JPEG2000",
}  # fmt: skip
_NO_DECODER = re.compile(r"this Pillow has no decoder for ([\w ]+),")
loaded_packages: list[str] = []
"""Those of them that are in use."""
AVIF_START = b"\0\0\0\x20ftypavif"
KINDS = (*_PLUGINS, "HEIF")
"""Names of the kinds, as Pillow has them."""

IMAGE_EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".bmp", ".tif", ".tiff",
    ".avif", ".avifs", ".heic", ".heics", ".heif", ".heifs", ".hif", ".jp2", ".j2k", ".jpc", ".jpf",
    ".jpx", ".j2c", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico", ".dds", ".qoi",
))  # fmt: skip
"""A file with one of these is a picture, whatever it holds."""

# These stand for other things as well: such a file is a picture if its first bytes say so too.
_SHARED_EXTENSIONS = {
    ".sgi": "SGI",
    ".rgb": "SGI",
    ".rgba": "SGI",
    ".bw": "SGI",
    ".ras": "SUN",
    ".pcx": "PCX",
    ".dib": "DIB",
}
# A name that only pictures have, of kinds that are not read here. PFM holds floats without a range.
_OTHER_EXTENSIONS = frozenset((
    ".jxl", ".jxr", ".wdp", ".hdp", ".bpg", ".svg", ".svgz", ".pdf", ".eps", ".psd", ".psb", ".xcf",
    ".exr", ".hdr", ".pfm", ".icns", ".cur", ".pcd", ".wmf", ".emf", ".xbm", ".xpm", ".dng", ".cr2",
    ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".sr2", ".fits", ".dcm", ".djvu", ".pict",
    ".iff", ".vda", ".vst", ".icb",
))  # fmt: skip
DRAWING = "a drawing, not a picture; render it first"
_DRAWINGS = {".svg": "SVG", ".svgz": "SVG", ".pdf": "PDF"}
_DRAWING_BYTES = 4096  # of a file's start: comments may stand before the first element

PREFIX_BYTES = 16
"""How much of a file's start `content_kind` looks at."""

# Of kinds that nothing else begins like, so that a file without a known name is a picture by them.
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
_SHARED_SIGNATURES = {
    "SGI": re.compile(rb"\x01\xda[\x00\x01][\x01\x02]"),
    "SUN": re.compile(rb"\x59\xa6\x6a\x95"),
    "PCX": re.compile(rb"\n[\x00\x02\x03\x05]\x01"),
    "DIB": re.compile(rb"[\x0c\x28\x34\x38\x40\x6c\x7c]\x00\x00\x00"),
}


def content_kind(prefix: bytes) -> str | None:
    """The kind of picture that begins with `prefix`, if nothing else begins so."""
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


def is_picture(name: str, prefix: bytes) -> bool:
    """Whether the first bytes of a file without an extension of IMAGE_EXTENSIONS are a picture's."""
    shared = _SHARED_EXTENSIONS.get(extension(name))
    return content_kind(prefix) is not None or (
        shared is not None and _SHARED_SIGNATURES[shared].match(prefix) is not None
    )


def may_be_picture(name: str) -> bool:
    """Whether a file of this name may be a picture that is read here; without an extension any may."""
    return extension(name) in IMAGE_EXTENSIONS or extension(name) in ("", *_SHARED_EXTENSIONS)


def looks_like_picture(name: str) -> bool:
    """Whether the name of a file that is not a sample is that of a picture."""
    return extension(name) in _OTHER_EXTENSIONS | IMAGE_EXTENSIONS


def why_not_read(name: str) -> str:
    """Why a file of this name, whose first bytes are not a picture's, is left out."""
    if drawn := _DRAWINGS.get(extension(name)):
        return f"{drawn}: {DRAWING}"
    if looks_like_picture(name):
        return "an unsupported kind of picture"
    return "neither an image extension nor an image signature"


def drawing(data: bytes) -> str | None:
    """What kind of drawing `data` is, by its first bytes."""
    if data.startswith(b"%PDF-"):
        return "PDF"
    start = data[:_DRAWING_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    return "SVG" if start.startswith(b"<") and b"<svg" in start else None


def extension(name: str) -> str:
    """The extension of a file's name, in lower case, with its dot."""
    return os.path.splitext(name)[1].lower()


def openers(data: bytes, name: str) -> list[str]:
    """The kinds that Pillow may try on `data`.

    What begins like no other kind is that. TGA has no signature: anything might pass for one, so its
    decoder is asked only where the name says so.
    """
    kind = content_kind(data[:PREFIX_BYTES])
    if kind == "HEIF":  # by their brand some may be either
        return [k for k in ("HEIF", "AVIF") if k in Image.OPEN]
    kinds = [kind] if kind else [k for k in KINDS if k != "TGA" or extension(name) == ".tga"]
    return [k for k in kinds if k in Image.OPEN]


def undecodable_kind(data: bytes) -> str | None:
    """What kind of picture begins with `data` that this Pillow has no decoder for."""
    kind = content_kind(data[:PREFIX_BYTES])
    if kind is None:
        return None
    accept = Image.OPEN.get(kind, (None, None))[1]
    answer = accept(data[:PREFIX_BYTES]) if accept else False
    return kind if not answer or isinstance(answer, str) else None


def decoder_versions() -> dict[str, str]:
    """Names and versions, as the manifest and the benchmarks record them."""
    return {
        "pillow_flavour": "pillow-simd" if pillow_is_simd() else "pillow",
        "pillow": PIL.__version__,
        "pillow_jpeg": pillow_jpeg(),
        "simplejpeg": simplejpeg.__version__,
        **{name: installed_version(name) or "unknown" for name in loaded_packages},
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


def kinds_not_built_in() -> list[str]:
    """Kinds that stock Pillow reads, and this one, without plugins, does not."""
    built_with = set(features.get_supported())
    return [kind for feature, kind in _OPTIONAL.items() if feature not in built_with]


def kinds_without_decoder() -> list[str]:
    """Kinds that stock Pillow reads and that cannot be read here, not by a plugin either."""
    reads_avif = undecodable_kind(AVIF_START) is None
    return [kind for kind in kinds_not_built_in() if not (kind == "AVIF" and reads_avif)]


def unreadable_extensions() -> dict[str, str]:
    """Extensions of pictures that cannot be read here, each with the kind."""
    lacking = kinds_without_decoder() + ([] if "HEIF" in Image.OPEN else ["HEIF"])
    return {suffix: kind for suffix, kind in _KIND_OF_EXTENSION.items() if kind in lacking}


def no_decoder(kind: str) -> str:
    """Why a picture of a kind that cannot be read here is rejected, and the remedy."""
    return f"this Pillow has no decoder for {kind}, so the picture may be intact; {decoder_remedy(kind)}"


def decoder_remedy(kind: str) -> str:
    """What to install so that pictures of this kind can be read."""
    if kind in DECODER_PACKAGES:
        return f"install its plugin: python -m pip install --no-deps {DECODER_PACKAGES[kind]}"
    return "stock Pillow has it: 'precache doctor' prints the command that installs that"


def kind_without_decoder(reason: str) -> str | None:
    """Kind that a reason of `no_decoder` names; None for another reason."""
    named = _NO_DECODER.search(reason)
    return named[1] if named else None


# Now, not with the first picture that needs one: an import that fails is not damage of that picture.
for _plugin in dict.fromkeys(_PLUGINS.values()):
    with suppress(ImportError):  # AVIF, before Pillow 11.3
        importlib.import_module(f"PIL.{_plugin}ImagePlugin")
if undecodable_kind(AVIF_START) is not None:
    with suppress(ImportError):
        importlib.import_module("pillow_avif")
        loaded_packages.append("pillow-avif-plugin")
with suppress(ImportError):
    importlib.import_module("pillow_heif").register_heif_opener()
    loaded_packages.append("pillow-heif")
