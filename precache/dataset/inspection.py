"""What a converted dataset holds: as JSON, as facts in words, and as one HTML page to look at."""

import base64
import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache import page
from precache.dataset.converted import ConvertedDataset
from precache.dataset.duplicates import Duplicates, listed
from precache.dataset.index import SampleIndex, Sizes
from precache.dataset.manifest import Manifest
from precache.errors import DatasetError, printable, shell_command
from precache.formats import FORMATS
from precache.pictures import jpeg
from precache.pictures.images import CHANNELS
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import sides
from precache.recipe import Recipe
from precache.reporting import human_bytes, quantity
from precache.storage.urls import Location, Url

# So that a page of any number of classes takes less than a megabyte.
_SHEET, _SHEET_SIDE = 24, 192  # pictures, and pixels; of more classes one each, with as many pixels in all
_SHEET_CLASSES = 300  # of more, so many of them
_FIRST_CLASSES, _PICTURES_PER_CLASS, _THUMBNAIL_SIDE = 20, 5, 96
_CLASSES_PER_FOLD = 100
_FILES = 100
_THUMBNAIL_QUALITY = 80
_ASPECTS = (0, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 0.95, 1.05, 4 / 3, 3 / 2, 2, 3, np.inf)
_SIDES = (0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, np.inf)
_PILLOW = ("pillow", "pillow_flavour", "pillow_jpeg")
_STYLE = """
.sheet { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }
.sheet img { width: 100%; aspect-ratio: 1; object-fit: cover; display: block; border-radius: 3px; }
.sheet figcaption { font-size: .8rem; font-weight: 400; color: var(--soft); overflow: hidden;
  white-space: nowrap; text-overflow: ellipsis; }
.classes { display: grid; gap: 1.2rem 2rem; margin: 1rem 0; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.sheet.many { gap: .4rem; grid-template-columns: repeat(auto-fill, minmax(4.5rem, 1fr)); }
@media (max-width: 30rem) {
  .sheet, .sheet.many { grid-template-columns: repeat(auto-fill, minmax(4rem, 1fr)); } }
"""


def summary(manifest: Manifest) -> dict[str, Any]:
    """The manifest's content as JSON values, without the shards' names."""
    return {
        "format": manifest.recipe.format,
        "recipe": manifest.recipe.to_json(),
        "made_by": manifest.made_by,
        "samples": manifest.samples,
        "target": manifest.target,
        "fields": manifest.fields,
        "splits": {
            split: {
                "samples": manifest.split_samples[split],
                "classes": dict(zip(manifest.classes, counts, strict=True)),
            }
            for split, counts in manifest.samples_per_class.items()
        },
        "statistics": {split: asdict(found) for split, found in manifest.statistics.items()},
        "shards": len(manifest.shards),
        "source": {"digest": manifest.source_digest, "options": manifest.source_options},
        "updates": [{"added": update.added, "removed": update.removed} for update in manifest.updates],
        "removed": manifest.removed,
        "source_bytes": manifest.source_bytes,
        "stored_bytes": manifest.stored_bytes,
        "rejected": [{"id": one.id, "path": one.path, "reason": one.reason} for one in manifest.rejected],
        "ignored": [{"path": path, "reason": reason} for path, reason in manifest.ignored],
    }


def write_html(dataset: ConvertedDataset, path: str | os.PathLike[str], *, all_classes: bool = False) -> None:
    """Write one page that needs no network: pictures, splits, classes, sizes, what was left out.

    Args:
        all_classes: with pictures of each class, not of the first 20 alone: some 15 kB for each class more.

    Raises:
        DatasetError: a shard or the index is damaged.
        ImageError: a stored picture is.
        SettingError: `path` cannot be written.
    """
    manifest = dataset.manifest
    index = dataset.read_index(removed=True)
    sheet, of_classes = _chosen(index, manifest, len(manifest.classes) if all_classes else _FIRST_CLASSES)
    pictures = _read_pictures(dataset, index, [row for rows in (sheet, *of_classes) for row in rows])
    title = f"{_name(dataset.place)}: {quantity(manifest.samples, 'picture')}"
    if manifest.classes:
        title += f" in {quantity(len(manifest.classes), 'class', 'classes')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _sheet(manifest, index, {row: pictures[row] for row in sheet}),
        _splits(manifest),
        f"<h2>Facts</h2>{page.facts(facts(dataset))}",
        _classes(manifest, [[pictures[row] for row in rows] for rows in of_classes]),
        _source_pictures(index.source_sizes[index.served]),
        _left_out("Rejected", [(one.path, one.reason) for one in manifest.rejected]),
        _left_out("Ignored", manifest.ignored),
    ]
    page.write(path, page.document(title, "".join(parts), style=_STYLE))


def write_duplicates(dataset: ConvertedDataset, path: Path) -> Duplicates:
    """Write the pictures of equal content into a CSV file: group, split, label and path of each.

    Raises:
        DatasetError: the index is damaged.
        SettingError: `path` cannot be written.
    """
    found, table = dataset.find_duplicates(), dataset.manifest.shards
    split_of = np.repeat(table.splits, table.samples)[found.rows].tolist()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("group", "split", "label", "path"))
    names, index = [table.split_names[number] for number in split_of], dataset.read_index(removed=True)
    writer.writerows(listed(found, index, names, dataset.manifest.classes))
    page.write(path, text.getvalue())
    return found


def facts(dataset: ConvertedDataset) -> dict[str, str]:
    """Facts on the dataset, one per line; last the command and the software that made it."""
    manifest = dataset.manifest
    splits = ", ".join(f"{split} {count:,}" for split, count in manifest.split_samples.items())
    outcomes = {"converted": manifest.samples, "rejected": len(manifest.rejected)}
    outcomes["ignored"] = len(manifest.ignored)
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items() if count)
    labelled = {
        "class": f" in {quantity(len(manifest.classes), 'class', 'classes')}",
        "classes": f", with any of {quantity(len(manifest.classes), 'class', 'classes')}",
        "number": ", labelled with numbers",
        "none": ", without labels",
    }[manifest.target]
    fields = ", ".join(f"{name} ({kind})" for name, kind in manifest.fields.items())
    masks = "one for each picture" if "mask" in manifest.source_options else ""
    return {
        "dataset": str(dataset.place),
        "format": manifest.recipe.format,
        "pictures": f"{manifest.samples:,}{labelled} ({splits})",
        **({"fields": printable(fields)} if fields else {}),
        **({"masks": masks} if masks else {}),
        "on disk": f"{human_bytes(manifest.stored_bytes)} in {quantity(len(manifest.shards), 'shard')}",
        "source": f"{quantity(manifest.scanned, 'file')}, {human_bytes(manifest.source_bytes)}: {counts}",
        # its path is not on record: the same source may lie anywhere
        "source digest": f"{manifest.source_digest} (SHA-256 of its paths, sizes and labels)",
        **_updates(manifest),
        **_duplicates(dataset),
        "stored as": _stored_as(manifest.recipe),
        **{f"pixels of {split}": str(found) for split, found in manifest.statistics.items()},
        "made with": f"{shell_command('precache convert SRC', dataset.place)} {manifest.to_flags()}",
        "made by": _software(manifest.made_by),
    }


def _updates(manifest: Manifest) -> dict[str, str]:
    """What updates changed since the conversion; empty without updates."""
    if not manifest.updates:
        return {}
    added = sum(update.added for update in manifest.updates)
    removed = sum(manifest.removed.values())
    facts = {"updates": f"{len(manifest.updates):,}: {added:,} pictures added, {removed:,} removed"}
    if removed:
        wasted = sum(shard.files[0].bytes for shard in manifest.shards) * removed // manifest.stored_samples
        are = "is" if removed == 1 else "are"
        facts["removed"] = (
            f"{quantity(removed, 'picture')} {are} still stored but no longer served: about "
            f"{human_bytes(wasted)}; converting again with --overwrite reclaims them"
        )
    return facts


def _duplicates(dataset: ConvertedDataset) -> dict[str, str]:
    """How many pictures are there more than once; empty if none is."""
    found = dataset.find_duplicates()
    return {"duplicates": f"{found} (list them: --duplicates FILE)"} if len(found) else {}


def _stored_as(recipe: Recipe) -> str:
    """What the pixels of a picture depend on, in the words of the options."""
    kind = "pixels" if FORMATS[recipe.format].holds_pixels else f"JPEG of quality {recipe.quality}"
    if recipe.channels != "rgb":
        kind = f"{recipe.channels} {kind}"
    if recipe.dtype != "uint8":
        kind = f"{recipe.dtype} {kind}"
    options = {
        "enlarged": recipe.enlarge,
        "truncated pictures allowed": recipe.allow_truncated,
        "decoded at a reduced scale": recipe.decode == "scaled",
        f"transparent on {recipe.background}": recipe.channels in ("grey", "rgb"),
    }
    chosen = ", ".join(name for name, used in options.items() if used)
    height, width = sides(recipe.size)
    size = f"{width}x{height}" if recipe.stored_size is not None else f"{width}"
    return f"{kind}, {size}, fit {recipe.fit}, resample {recipe.resample}, {chosen}"


def _software(made_by: Mapping[str, str]) -> str:
    """As `pillow 12.1 with libjpeg-turbo 2.1.5, simplejpeg 1.9.0`."""
    named = {name: version for name, version in made_by.items() if name not in _PILLOW}
    pillow = f"{made_by.get('pillow_flavour', 'pillow')} {made_by.get('pillow', '')}".rstrip()
    jpeg_library = f" with {made_by['pillow_jpeg']}" if "pillow_jpeg" in made_by else ""
    return ", ".join([pillow + jpeg_library, *(f"{name} {version}" for name, version in named.items())])


@dataclass(frozen=True, slots=True)
class _Picture:
    """A stored picture: the id of its sample, and its pixels."""

    id: int
    pixels: Pixels

    def image(self, side: int, title: str = "") -> str:
        """The picture as an HTML element, at most so many pixels on a side."""
        name = escape(f"{title}, sample {self.id}" if title else f"sample {self.id}")
        return f'<img alt="{name}" title="{name}" src="{_data_uri(self.pixels, side)}">'


def _chosen(index: SampleIndex, manifest: Manifest, classes: int) -> tuple[list[int], list[list[int]]]:
    """Rows of the index for the sheet of pictures, and of the first `classes`: the first ones as stored.

    The sheet begins with a picture of each class; where these are few it has a second of each, and so on.
    """
    served = np.flatnonzero(index.served)
    if manifest.target != "class":
        return served[:_SHEET].tolist(), []
    order = served[np.argsort(index.labels[served], kind="stable")]
    labels = np.arange(len(manifest.classes))
    starts, ends = (np.searchsorted(index.labels[order], labels, side) for side in ("left", "right"))
    spread = np.unique(
        np.linspace(0, len(labels) - 1, min(_SHEET_CLASSES, len(labels))).round().astype(np.int64)
    )
    each = -(-_SHEET // len(spread))
    places = [starts[at] + turn for turn in range(each) for at in spread if starts[at] + turn < ends[at]]
    sheet = order[places[: max(_SHEET, len(spread))]].tolist()
    of_classes = [
        order[start : min(end, start + _PICTURES_PER_CLASS)].tolist()
        for start, end in zip(starts[:classes], ends[:classes], strict=True)
    ]
    return sheet, of_classes


def _read_pictures(dataset: ConvertedDataset, index: SampleIndex, rows: list[int]) -> dict[int, _Picture]:
    """The pictures at `rows` of the index, each compared with its checksum; reads only their shards."""
    recipe, shards = dataset.manifest.recipe, dataset.manifest.shards
    starts = np.cumsum(shards.samples) - shards.samples
    wanted, pictures = set(rows), {}
    for number in np.unique(np.searchsorted(starts, sorted(wanted), "right") - 1).tolist():
        start, path = int(starts[number]), dataset.shard_path(shards[number])
        last = max(row for row in wanted if row < start + shards[number].samples)
        stored = islice(FORMATS[recipe.format].read_shard(path), last - start + 1)
        for row, sample in enumerate(stored, start):
            if row in wanted:
                index.check(row, sample.data, str(path), sample.damage)
                pixels = sample.pixels(str(path), CHANNELS[recipe.channels])
                pictures[row] = _Picture(sample.id, pixels)
        if last not in pictures:
            verify = shell_command("precache verify", dataset.place)
            raise DatasetError(
                f"{path}: ends before its sample {last - start + 1:,} (truncated?); run: {verify}"
            )
    return pictures


def _sheet(manifest: Manifest, index: SampleIndex, pictures: Mapping[int, _Picture]) -> str:
    figures, many = [], len(pictures) > _SHEET
    side = int(_SHEET_SIDE * (_SHEET / len(pictures)) ** 0.5) if many else _SHEET_SIDE
    for row, picture in pictures.items():
        name = manifest.classes[index.labels[row]] if manifest.target == "class" else ""
        caption = f"<figcaption>{escape(name)}</figcaption>" if name else ""
        figures.append(f"<figure>{picture.image(side, name)}{caption}</figure>")
    kind = "sheet many" if many else "sheet"
    return f'<div class="{kind}">{"".join(figures)}</div>'


def _splits(manifest: Manifest) -> str:
    """Pictures of each split, where there are several."""
    counts = manifest.split_samples
    if len(counts) < 2:
        return ""
    rows = []
    for split, count in counts.items():
        share = count / max(1, manifest.samples)
        classes = sum(number > 0 for number in manifest.samples_per_class[split])
        rows.append([escape(split), f"{count:,}", f"{classes:,}", f"{share:.1%}", page.bar(share)])
    titles = ["split", "pictures", "classes", "share", ""]
    return f"<h2>Splits</h2>{page.html_table(titles, rows, ['', '', '', '', 'bar'])}"


def _classes(manifest: Manifest, pictures: Sequence[Sequence[_Picture]]) -> str:
    """The first classes with their pictures, and how many each class has; folded where these are many."""
    if not manifest.classes:
        return ""
    per_class = manifest.samples_per_class
    totals = [sum(counts) for counts in zip(*per_class.values(), strict=True)]
    cards = []
    for label, shown in enumerate(pictures):
        number = quantity(totals[label], "picture")
        strip = "".join(picture.image(_THUMBNAIL_SIDE, manifest.classes[label]) for picture in shown)
        name = f"<b>{escape(manifest.classes[label])}</b> <small>{number}</small>"
        cards.append(f'<div>{name}<div class="pictures">{strip}</div></div>')
    parts = ["<h2>Classes</h2>", f'<div class="classes">{"".join(cards)}</div>' if cards else ""]
    count = len(totals)
    if cards and count > len(cards):
        more = (
            f"The first {len(cards)}; with pictures of all {count:,}: precache inspect --html --all-classes"
        )
        parts.append(f'<p class="note">{escape(more)}</p>')
    splits = list(per_class) if len(per_class) > 1 else []
    for first in range(0, count, _CLASSES_PER_FOLD):
        rows = [
            [escape(manifest.classes[label]), f"{totals[label]:,}"]
            + [f"{per_class[split][label]:,}" for split in splits]
            + [page.bar(totals[label] / max(1, *totals))]
            for label in range(first, min(first + _CLASSES_PER_FOLD, count))
        ]
        kinds = ["", "", *("" for _ in splits), "bar"]
        table = page.html_table(["class", "pictures", *map(escape, splits), ""], rows, kinds)
        title = f"Pictures in each class, {first + 1:,} to {first + len(rows):,} of {count:,}"
        parts.append(page.collapsible(title, table, shown=count <= _FIRST_CLASSES))
    return "".join(parts)


def _source_pictures(sizes: Sizes) -> str:
    """Charts of the source pictures' sizes and shapes."""
    return (
        '<h2>Source pictures</h2><div class="charts small">'
        f"{_histogram('shorter side, pixels', sizes.min(axis=1), _SIDES)}"
        f"{_histogram('longer side, pixels', sizes.max(axis=1), _SIDES)}"
        f"{_histogram('width / height', sizes[:, 0] / sizes[:, 1], _ASPECTS)}</div>"
    )


def _histogram(title: str, values: np.ndarray[Any, Any], edges: Sequence[float]) -> str:
    counts, _ = np.histogram(values, edges)
    low, median, high = np.quantile(values, (0, 0.5, 1))
    rows = [
        (f"{'under' if first == 0 else 'from'} {_number(first or last)}", f"{count:,}", page.bar(share))
        for first, last, count, share in zip(edges, edges[1:], counts, counts / counts.max(), strict=False)
        if first < high and last > low
    ]
    caption = f"from {_number(low)} to {_number(high)}, median {_number(median)}"
    shown = page.html_table([escape(title), "pictures", ""], rows, ["", "", "bar"])
    return f'<div>{shown}<p class="note">{caption}</p></div>'


def _left_out(title: str, files: Sequence[tuple[str, str]]) -> str:
    """A table of the first files that were left out, and why; nothing where there are none."""
    if not files:
        return ""
    rows = [(escape(path), escape(reason)) for path, reason in islice(files, _FILES)]
    more = f'<p class="note">and {len(files) - _FILES:,} more</p>' if len(files) > _FILES else ""
    return f"<h2>{title}: {len(files):,}</h2>{page.html_table(['path', 'reason'], rows, ['words'] * 2)}{more}"


def _data_uri(pixels: Pixels, side: int) -> str:
    if pixels.dtype != np.uint8:
        pixels = (pixels >> 8).astype(np.uint8)
    small = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    small.thumbnail((side, side), Image.Resampling.BILINEAR)
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    content = jpeg.encode_jpeg(np.asarray(small.convert("RGB")), _THUMBNAIL_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _name(place: Location) -> str:
    return place.name if isinstance(place, Url) else os.path.basename(os.path.realpath(place))
