"""Line with `loaders.build` in the place of a watched script's DataLoader, as text.

It is given for one DataLoader over one ImageFolder with plain transforms (`bench.watch.transforms`), where
`loaders.build` finds the same pictures in the tree. For all others there is a sentence with the reason.
"""

from pathlib import Path

from bench.report.advice import framework_of
from bench.report.waiting import Stream
from bench.watch.transforms import classes_checksum
from precache.errors import PrecacheError, shell_command
from precache.reporting import quantity
from precache.sources.tree import list_tree

_INDENT = "    "  # lines to paste are not broken
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Extensions of files that torchvision's ImageFolder takes."""
_GUIDE = "loaders/README.md, 'Coming from ImageFolder', has a table of transforms and what to write for them."


def describe_build(stream: Stream) -> str:
    """Write the line that serves what a stream's loader serves, and how to measure it, or why there is none.

    Lists the tree that the loader's ImageFolder reads.
    """
    if stream.info["kind"] != "DataLoader" or not stream.shows_pictures:
        return ""
    reason, note = _reason_against(stream), ""
    if not reason:
        reason, note = _compare_tree(stream)
    if reason:
        return f"No line with loaders.build is given: {reason}. {_GUIDE}"
    given = ", ".join(f"{name}={value}" for name, value in stream.info["build"]["arguments"].items())
    root, where = stream.info["root"], stream.info["where"]
    return "\n".join(
        [
            f"In place of the DataLoader made at {where}, for this split:",
            f"{_INDENT}loaders.build({root!r}, {given})",
            f"Call it once, before the first epoch. Where the script has no `if __name__ == '__main__':`, "
            f"add reading=loaders.Reading(workers=0). It turns pictures upright by their EXIF data.{note}",
            "To measure what it brings:",
            f"{_INDENT}{shell_command('bench recommend', Path(root))}",
        ]
    )


def _reason_against(stream: Stream) -> str:
    """Reason, but for the tree, why no line is given, as a clause; "" where there is none."""
    framework, build = framework_of(stream), stream.info["build"]
    if framework is not None:
        return f"{framework.title} makes the DataLoader"
    if stream.loaders > 1:
        return f"each step takes batches of {stream.loaders} loaders"
    if "reason" in build:
        return str(build["reason"])
    if stream.made > 1:
        return f"{stream.info['where']} makes several loaders, of several datasets or anew in each epoch"
    if stream.info["choice"]:
        return f"{stream.info['where']} may make loaders of other datasets, too, by {stream.info['choice']}"
    return ""


def _compare_tree(stream: Stream) -> tuple[str, str]:
    """Compare the pictures of an ImageFolder with those that `loaders.build` finds in its tree.

    Returns:
        Why they are others, as a clause, "" where they are the same; and a sentence on what is served, too.
    """
    root, build = stream.info["root"], stream.info["build"]
    try:
        scan = list_tree(root)
    except PrecacheError as error:
        return f"{root} cannot be listed ({error})", ""
    samples = [(sample.path, sample.label) for sample in scan.samples]
    common = [label for path, label in samples if path.lower().endswith(_EXTENSIONS)]
    if build["classes"] != classes_checksum(scan.classes, common):
        listed = f"{len(samples):,} pictures of {len(scan.classes):,} classes"
        return f"in {root} it finds {listed}, and not the {build['samples']:,} of the ImageFolder", ""
    more = len(samples) - len(common)
    return "", f" It also serves {quantity(more, 'picture')} that ImageFolder does not take." if more else ""
