"""Reports on a converted dataset: JSON, lines of facts, an HTML page, and a CSV file of its duplicates."""

import base64
import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from precache import page
from precache.dataset.converted import ConvertedDataset
from precache.dataset.duplicates import Duplicates, iter_duplicates
from precache.dataset.index import Ints, SampleIndex, Sizes
from precache.dataset.manifest import Manifest
from precache.errors import DatasetError, printable, shell_command
from precache.formats import FORMATS
from precache.pictures import jpeg
from precache.pictures.images import CHANNELS, sides
from precache.pictures.jpeg import Pixels
from precache.recipe import Recipe
from precache.reporting import human_bytes, quantity
from precache.storage.urls import Location, Url

# These limits keep a page of any number of classes below a megabyte.
_SHEET_PICTURES, _SHEET_SIDE = 24, 192  # with more classes, one smaller picture of each
_SHEET_CLASSES = 300  # with more classes, this many of them
_FIRST_CLASSES, _PICTURES_PER_CLASS, _THUMBNAIL_SIDE = 20, 5, 96
_CLASSES_PER_FOLD = 100
_LISTED_FILES = 100
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
    """Summarise a manifest as JSON values, without the shards' names."""
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
        "statistics": msgspec.to_builtins(manifest.statistics),
        "shards": len(manifest.shards),
        "source": {"digest": manifest.source_digest, "options": manifest.source_options},
        "source_bytes": manifest.source_bytes,
        "stored_bytes": manifest.stored_bytes,
        "rejected": [
            {"id": picture.id, "path": picture.path, "reason": picture.reason}
            for picture in manifest.rejected
        ],
        "ignored": [{"path": path, "reason": reason} for path, reason in manifest.ignored],
    }


def write_html(dataset: ConvertedDataset, path: str | os.PathLike[str], *, all_classes: bool = False) -> None:
    """Write an HTML page, which needs no network: pictures, splits, classes, sizes, what was left out.

    Args:
        dataset: dataset to show.
        path: file to write.
        all_classes: show pictures of every class, not only of the first 20: some 15 kB per class.

    Raises:
        DatasetError: a shard or the index is damaged.
        ImageError: a stored picture is damaged.
        SettingError: `path` cannot be written.
    """
    manifest = dataset.manifest
    index = dataset.read_index()
    class_count = len(manifest.classes) if all_classes else _FIRST_CLASSES
    sheet_rows = _rows_of_sheet(index, manifest)
    class_rows = _rows_of_classes(index, manifest, class_count)
    pictures = _read_pictures(dataset, index, [row for rows in (sheet_rows, *class_rows) for row in rows])
    title = f"{_name(dataset.location)}: {quantity(manifest.samples, 'picture')}"
    if manifest.classes:
        title += f" in {quantity(len(manifest.classes), 'class', 'classes')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _sheet(manifest, index, {row: pictures[row] for row in sheet_rows}),
        _split_table(manifest),
        f"<h2>Facts</h2>{page.facts(facts(dataset))}",
        _class_tables(manifest, [[pictures[row] for row in rows] for rows in class_rows]),
        _source_size_charts(index.source_sizes),
        _left_out_table("Rejected", [(picture.path, picture.reason) for picture in manifest.rejected]),
        _left_out_table("Ignored", manifest.ignored),
    ]
    page.write(path, page.document(title, "".join(parts), style=_STYLE))


def write_duplicates(dataset: ConvertedDataset, path: Path) -> Duplicates:
    """Write group, split, label and path of each picture of equal content to a CSV file, and return these.

    Raises:
        DatasetError: the index is damaged.
        SettingError: `path` cannot be written.
    """
    duplicates, table = dataset.find_duplicates(), dataset.manifest.shards
    split_numbers = np.repeat(table.splits, table.samples)[duplicates.rows].tolist()
    splits = [table.split_names[number] for number in split_numbers]
    index = dataset.read_index()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("group", "split", "label", "path"))
    writer.writerows(iter_duplicates(duplicates, index, splits, dataset.manifest.classes))
    page.write(path, text.getvalue())
    return duplicates


def facts(dataset: ConvertedDataset) -> dict[str, str]:
    """Facts about the dataset, name -> text; the last are the command and the software that made it."""
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
    result = {
        "dataset": str(dataset.location),
        "format": manifest.recipe.format,
        "pictures": f"{manifest.samples:,}{labelled} ({splits})",
    }
    if fields:
        result["fields"] = printable(fields)
    result["on disk"] = f"{human_bytes(manifest.stored_bytes)} in {quantity(len(manifest.shards), 'shard')}"
    result["source"] = f"{quantity(manifest.scanned, 'file')}, {human_bytes(manifest.source_bytes)}: {counts}"
    # not the source's path, which is not on record: the same source may lie anywhere
    result["source digest"] = f"{manifest.source_digest} (SHA-256 of its paths, sizes and labels)"
    duplicates = dataset.find_duplicates()
    if len(duplicates):
        result["duplicates"] = f"{duplicates} (list them: --duplicates FILE)"
    result["stored as"] = _describe_storage(manifest.recipe)
    for split, statistics in manifest.statistics.items():
        result[f"pixels of {split}"] = str(statistics)
    command = shell_command("precache convert SRC", dataset.location)
    result["made with"] = f"{command} {manifest.to_flags()}"
    result["made by"] = _describe_software(manifest.made_by)
    return result


def _describe_storage(recipe: Recipe) -> str:
    """Describe the settings that the stored pixels depend on, in the words of the options."""
    kind = "pixels" if FORMATS[recipe.format].holds_pixels else f"JPEG of quality {recipe.quality}"
    if recipe.channels != "rgb":
        kind = f"{recipe.channels} {kind}"
    options = []
    if recipe.enlarge:
        options.append("enlarged")
    if recipe.allow_truncated:
        options.append("truncated pictures allowed")
    if recipe.decode == "scaled":
        options.append("decoded at a reduced scale")
    options.append(f"transparent on {recipe.background}")
    height, width = sides(recipe.size)
    size = f"{width}x{height}" if recipe.stored_size is not None else f"{width}"
    return f"{kind}, {size}, fit {recipe.fit}, resample {recipe.resample}, {', '.join(options)}"


def _describe_software(made_by: Mapping[str, str]) -> str:
    """Describe versions as 'pillow 12.1 with libjpeg-turbo 2.1.5, simplejpeg 1.9.0'."""
    pillow = f"{made_by.get('pillow_flavour', 'pillow')} {made_by.get('pillow', '')}".rstrip()
    if "pillow_jpeg" in made_by:
        pillow += f" with {made_by['pillow_jpeg']}"
    others = [f"{name} {version}" for name, version in made_by.items() if name not in _PILLOW]
    return ", ".join([pillow, *others])


@dataclass(frozen=True, slots=True)
class _StoredPicture:
    """Stored picture: the id of its sample, and its pixels."""

    id: int
    pixels: Pixels

    def image(self, side: int, title: str = "") -> str:
        """Make an HTML element of the picture, at most `side` pixels on a side."""
        name = escape(f"{title}, sample {self.id}" if title else f"sample {self.id}")
        return f'<img alt="{name}" title="{name}" src="{_data_uri(self.pixels, side)}">'


def _rows_of_sheet(index: SampleIndex, manifest: Manifest) -> list[int]:
    """Rows of the index for the sheet of pictures.

    The sheet begins with the first picture of each class; if there are very many classes, of some of them,
    spread evenly. If there are few, a second picture of each follows, and so on.
    """
    if manifest.target != "class":
        return list(range(min(_SHEET_PICTURES, len(index))))
    rows, starts, ends = _rows_by_class(index, manifest)
    classes = len(manifest.classes)
    labels = np.unique(np.linspace(0, classes - 1, min(_SHEET_CLASSES, classes)).round().astype(np.int64))
    pictures_per_class = -(-_SHEET_PICTURES // len(labels))
    positions = []
    for offset in range(pictures_per_class):
        for label in labels:
            if starts[label] + offset < ends[label]:
                positions.append(starts[label] + offset)
    sheet: list[int] = rows[positions[: max(_SHEET_PICTURES, len(labels))]].tolist()
    return sheet


def _rows_of_classes(index: SampleIndex, manifest: Manifest, count: int) -> list[list[int]]:
    """Rows of the index of the first pictures of each of the first `count` classes."""
    if manifest.target != "class":
        return []
    rows, starts, ends = _rows_by_class(index, manifest)
    return [
        rows[start : min(end, start + _PICTURES_PER_CLASS)].tolist()
        for start, end in zip(starts[:count], ends[:count], strict=True)
    ]


def _rows_by_class(index: SampleIndex, manifest: Manifest) -> tuple[Ints, Ints, Ints]:
    """Rows of the samples sorted by class, then the start and the end of each class in them."""
    rows = np.argsort(index.labels, kind="stable")
    labels = np.arange(len(manifest.classes))
    ranked = index.labels[rows]
    return rows, np.searchsorted(ranked, labels, "left"), np.searchsorted(ranked, labels, "right")


def _read_pictures(
    dataset: ConvertedDataset, index: SampleIndex, rows: list[int]
) -> dict[int, _StoredPicture]:
    """Read the pictures at `rows` of the index, compared with their checksums; reads only their shards."""
    recipe, shards = dataset.manifest.recipe, dataset.manifest.shards
    starts, wanted = shards.starts, set(rows)
    pictures: dict[int, _StoredPicture] = {}
    for number in np.unique(np.searchsorted(starts, sorted(wanted), "right") - 1).tolist():
        start, path = int(starts[number]), dataset.shard_path(shards[number])
        last = max(row for row in wanted if row < start + shards[number].samples)
        stored = islice(FORMATS[recipe.format].read_shard(path), last - start + 1)
        for row, sample in enumerate(stored, start):
            if row in wanted:
                index.check(row, sample.data, str(path), sample.damage)
                pixels = sample.pixels(str(path), CHANNELS[recipe.channels])
                pictures[row] = _StoredPicture(sample.id, pixels)
        if last not in pictures:
            raise DatasetError(
                f"ends before its sample {last - start + 1:,} (truncated?)",
                path=path,
                remedy=f"run: {shell_command('precache verify', dataset.location)}",
            )
    return pictures


def _sheet(manifest: Manifest, index: SampleIndex, pictures: Mapping[int, _StoredPicture]) -> str:
    """Make the sheet of pictures, row -> picture, with their classes below them."""
    figures, many = [], len(pictures) > _SHEET_PICTURES
    side = int(_SHEET_SIDE * (_SHEET_PICTURES / len(pictures)) ** 0.5) if many else _SHEET_SIDE
    for row, picture in pictures.items():
        name = manifest.classes[index.labels[row]] if manifest.target == "class" else ""
        caption = f"<figcaption>{escape(name)}</figcaption>" if name else ""
        figures.append(f"<figure>{picture.image(side, name)}{caption}</figure>")
    kind = "sheet many" if many else "sheet"
    return f'<div class="{kind}">{"".join(figures)}</div>'


def _split_table(manifest: Manifest) -> str:
    """Make a table of the splits; empty if there is only one."""
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


def _class_tables(manifest: Manifest, pictures: Sequence[Sequence[_StoredPicture]]) -> str:
    """Make cards of the first classes with their `pictures`, and folded tables of all classes' counts."""
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


def _source_size_charts(sizes: Sizes) -> str:
    """Make charts of the source pictures' sizes, int32 [n, 2], and aspect ratios."""
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


def _left_out_table(title: str, files: Sequence[tuple[str, str]]) -> str:
    """Make a table of path and reason of the first files that were left out; empty if there are none."""
    if not files:
        return ""
    rows = [(escape(path), escape(reason)) for path, reason in islice(files, _LISTED_FILES)]
    table = page.html_table(["path", "reason"], rows, ["words"] * 2)
    more = len(files) - _LISTED_FILES
    note = f'<p class="note">and {more:,} more</p>' if more > 0 else ""
    return f"<h2>{title}: {len(files):,}</h2>{table}{note}"


def _data_uri(pixels: Pixels, side: int) -> str:
    small = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    small.thumbnail((side, side), Image.Resampling.BILINEAR)
    content = jpeg.encode_jpeg(np.asarray(small.convert("RGB")), _THUMBNAIL_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _name(location: Location) -> str:
    return location.name if isinstance(location, Url) else os.path.basename(os.path.realpath(location))
