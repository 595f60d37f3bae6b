"""The pictures that the steps are measured on; what is there already stays.

    DATA/sample     generated pictures, which the photographs are put together of
    DATA/photos     photographs in class folders, JPEG
    DATA/shards, DATA/webdataset
                    what `precache convert` makes of them
    DATA/squares, DATA/squares-webdataset
                    the same with --fit crop, for cache="device", which keeps pictures of one size
    DATA/mixed      generated pictures of all kinds: PNG, grey, CMYK, turned by EXIF; and as
    DATA/mixed-shards, DATA/mixed-webdataset, DATA/mixed-squares, DATA/mixed-squares-webdataset

`python -m bench.evidence.pictures DATA --photos 5120 --json RESULT`
"""

from pathlib import Path

import click

from bench.evidence.programs import write_result
from bench.machine.photos import make_photos
from precache.console import commandline
from precache.convert import convert
from precache.errors import SettingError
from precache.example_data.sample_tree import make_sample
from precache.recipe import DEFAULT_SIZE, Recipe
from precache.sources.tree import scan_tree

_CLASSES = 64
_CONVERTED = {
    "shards": ("shards", "keep"),
    "webdataset": ("webdataset", "keep"),
    "squares": ("shards", "crop"),
    "squares-webdataset": ("webdataset", "crop"),
}
"""Folder -> format and fit."""
_PATH = click.Path(path_type=Path)


@click.command(cls=commandline.Command)
@click.argument("data", type=_PATH)
@click.option("--photos", default=5120, show_default=True, help="How many photographs.")
@click.option("--mean", default="500x400", show_default=True, help="Their mean size in pixels.")
@click.option("--mixed", default=512, show_default=True, help="How many pictures of all kinds.")
@click.option("--stored", default=DEFAULT_SIZE, show_default=True, help="As --size of precache convert.")
@click.option("--json", "json_path", type=_PATH, required=True, help="Write what is there now here.")
def pictures(data: Path, photos: int, mean: str, mixed: int, stored: int, json_path: Path) -> None:
    """Generate the pictures in DATA and convert them."""
    _sample(data / "sample", photos)
    if _is_missing(data / "photos", photos):
        width, height = map(int, mean.split("x"))
        make_photos(data / "sample", data / "photos", (width, height), photos)
    _sample(data / "mixed", mixed)
    for tree, prefix in (("photos", ""), ("mixed", "mixed-")):
        for folder, (form, fit) in _CONVERTED.items():
            shard_bytes = 64 * stored**2 * 3 if prefix else 64 << 20  # several shards of few pictures, too
            recipe = Recipe(format=form, size=stored, fit=fit, shard_bytes=shard_bytes)
            convert(data / tree, data / f"{prefix}{folder}", recipe)
    write_result(json_path, "cpu", photos=photos, mean=mean, mixed=mixed, stored=stored)


def _sample(tree: Path, count: int) -> None:
    if _is_missing(tree, count):
        make_sample(tree, images=count, classes=min(_CLASSES, count), like="caltech")


def _is_missing(tree: Path, count: int) -> bool:
    if not tree.exists():
        return True
    found = len(scan_tree(tree).samples)
    if found != count:
        raise SettingError(f"{tree}: has {found:,} pictures, {count:,} are needed; remove {tree.parent}")
    return False


if __name__ == "__main__":
    pictures()
