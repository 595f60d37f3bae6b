"""What a converted dataset holds: as JSON, as tables, and as one HTML page to look at."""

import base64
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np
from PIL import Image
from rich.table import Table

from precache import jpeg
from precache.console import page
from precache.console.commandline import human_bytes, printable
from precache.console.notices import counted
from precache.console.tables import new_console
from precache.dataset.converted import ConvertedDataset
from precache.errors import shell_command
from precache.formats import FORMATS, StoredSample
from precache.images import channel_count
from precache.jpeg import Pixels
from precache.manifest import Manifest, count_reasons
from precache.pictures.sizes import sides
from precache.recipe import Recipe
from precache.storage.urls import Location, Url

_PICTURES_PER_CLASS = 5
_FIRST_CLASSES = 10
_THUMBNAIL = 112
_PILLOW = ("pillow", "pillow_flavour", "pillow_jpeg")
_THUMBNAIL_QUALITY = 85
_ASPECTS = (0, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 0.95, 1.05, 4 / 3, 3 / 2, 2, 3, np.inf)
_SIDES = (0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, np.inf)


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
        "updates": [{"added": update.added, "removed": update.removed} for update in manifest.updates],
        "removed": manifest.removed,
        "source_bytes": manifest.source_bytes,
        "stored_bytes": manifest.stored_bytes,
        "rejected": [rejected.to_json() for rejected in manifest.rejected],
        "ignored": [{"path": path, "reason": reason} for path, reason in manifest.ignored],
    }


def print_tables(dataset: ConvertedDataset, *, all_classes: bool = False) -> None:
    """Print samples per class, the first ten unless `all_classes`, what is left out, and last the facts."""
    manifest = dataset.manifest
    console = new_console()
    shown = len(manifest.classes) if all_classes else _FIRST_CLASSES
    classes = Table(box=None)
    classes.add_column("class")
    for split in manifest.samples_per_class:
        classes.add_column(printable(split), justify="right")
    for label, name in enumerate(manifest.classes[:shown]):
        counts = (f"{per_class[label]:,}" for per_class in manifest.samples_per_class.values())
        classes.add_row(printable(name), *counts)
    if manifest.classes:
        console.print(classes)
    if (more := len(manifest.classes) - shown) > 0:
        console.print(f"and {more:,} more: --all-classes")
    for rejected in manifest.rejected:
        console.print(printable(f"rejected {rejected.path}: {rejected.reason}"))
    for reason, count in count_reasons([reason for _, reason in manifest.ignored]).items():
        console.print(printable(f"ignored {count:,}: {reason}"))
    console.print()
    facts = Table(box=None, show_header=False)
    values = _facts(dataset)
    command = values.pop("made with")
    for name, value in values.items():
        facts.add_row(name, printable(value))
    console.print(facts)
    console.print(printable(f" made with: {command}"), soft_wrap=True)  # in one piece, to paste into a shell


def write_html(dataset: ConvertedDataset, path: str | os.PathLike[str]) -> None:
    """Write one page that needs no network: facts, distributions, pictures of each class, rejected ones.

    Raises:
        DatasetError: a shard or the index is damaged.
        ImageError: a stored picture is.
        SettingError: `path` cannot be written.
    """
    manifest = dataset.manifest
    sizes = dataset.read_source_sizes()
    rejected = ((r.path, r.reason) for r in manifest.rejected)
    title = f"{_name(dataset.place)}: {counted(manifest.samples, 'picture')}"
    content = (
        f"<h1>{escape(title)}</h1>{page.facts(_facts(dataset))}"
        '<h2>Source pictures</h2><div class="charts small">'
        f"{_histogram('shorter side, pixels', sizes.min(axis=1), _SIDES)}"
        f"{_histogram('longer side, pixels', sizes.max(axis=1), _SIDES)}"
        f"{_histogram('width / height', sizes[:, 0] / sizes[:, 1], _ASPECTS)}</div>"
        f"<h2>Rejected</h2>{_path_table(rejected)}<h2>Ignored</h2>{_path_table(manifest.ignored)}"
        '<h2>Classes</h2><p class="note">With the first pictures in stored order, as stored, shown smaller.'
        f"</p>{_class_table(dataset) if manifest.classes else _unlabelled_table(dataset)}"
    )
    page.write(path, page.document(title, content))


def _facts(dataset: ConvertedDataset) -> dict[str, str]:
    manifest = dataset.manifest
    splits = ", ".join(f"{split} {count:,}" for split, count in manifest.split_samples.items())
    left_out = f"{len(manifest.rejected):,} rejected, {len(manifest.ignored):,} ignored"
    labelled = {
        "class": f" in {counted(len(manifest.classes), 'class', 'classes')}",
        "classes": f", with any of {counted(len(manifest.classes), 'class', 'classes')}",
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
        "on disk": f"{human_bytes(manifest.stored_bytes)} in {counted(len(manifest.shards), 'shard')}",
        "source": f"{counted(manifest.scanned, 'file')}, {human_bytes(manifest.source_bytes)}: "
        f"{manifest.samples:,} converted, {left_out}",
        **_updates(manifest),
        "stored as": _stored_as(manifest.recipe),
        **{f"pixels of {split}": str(found) for split, found in manifest.statistics.items()},
        "made with": f"{shell_command('precache convert SRC', dataset.place)} {manifest.to_flags()}",
        "made by": _software(manifest.made_by),
    }


def _updates(manifest: Manifest) -> dict[str, str]:
    """What became of it since it was converted; nothing if nothing did."""
    if not manifest.updates:
        return {}
    added = sum(update.added for update in manifest.updates)
    removed = sum(manifest.removed.values())
    facts = {"updates": f"{len(manifest.updates):,}: {added:,} pictures added, {removed:,} removed"}
    if removed:
        wasted = sum(shard.files[0].bytes for shard in manifest.shards) * removed // manifest.stored_samples
        are = "is" if removed == 1 else "are"
        facts["removed"] = (
            f"{counted(removed, 'picture')} {are} still stored, and served no more: about "
            f"{human_bytes(wasted)}; converting again with --overwrite reclaims them"
        )
    return facts


def _stored_as(recipe: Recipe) -> str:
    """What the pixels of a picture depend on, in the words of the options."""
    kind = "pixels" if FORMATS[recipe.format].holds_pixels else f"JPEG of quality {recipe.quality}"
    if recipe.channels != "rgb":
        kind = f"{recipe.channels}{'-band' * recipe.channels.isdigit()} {kind}"
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


def _histogram(title: str, values: np.ndarray[Any, Any], edges: Sequence[float]) -> str:
    counts, _ = np.histogram(values, edges)
    low, median, high = np.quantile(values, (0, 0.5, 1))
    rows = [
        (f"{'under' if first == 0 else 'from'} {_number(first or last)}", *_counted(int(count), counts.max()))
        for first, last, count in zip(edges, edges[1:], counts, strict=False)
        if first < high and last > low
    ]
    caption = f"from {_number(low)} to {_number(high)}, median {_number(median)}"
    shown = page.html_table([escape(title), "pictures", ""], rows, ["", "", "bar"])
    return f'<div>{shown}<p class="note">{caption}</p></div>'


def _class_table(dataset: ConvertedDataset) -> str:
    """Each class: how many pictures, and the first ones; of samples with several classes, only the former."""
    manifest = dataset.manifest
    counts = [sum(per_class) for per_class in zip(*manifest.samples_per_class.values(), strict=True)]
    shown = _first_pictures(dataset)
    rows = []
    for label, name in enumerate(manifest.classes):
        rows.append((escape(name), *_counted(counts[label], max(counts)), _drawn(shown[label])))
    more = _unlabelled_table(dataset) if manifest.target == "classes" else ""
    return page.html_table(["class", "pictures", "", ""], rows, ["", "", "bar", "words"]) + more


def _unlabelled_table(dataset: ConvertedDataset) -> str:
    """The first pictures of all, where they have not one class each."""
    rows = [(f"{dataset.manifest.samples:,}", _drawn(_first_pictures(dataset)[-1]))]
    return page.html_table(["pictures", ""], rows, ["", "words"])


def _drawn(pictures: Iterable[tuple[int, Pixels]]) -> str:
    images = "".join(
        f'<img alt="sample {sample_id}" title="sample {sample_id}" src="{_data_uri(pixels)}">'
        for sample_id, pixels in pictures
    )
    return f'<div class="pictures">{images}</div>'


def _counted(count: int, most: int) -> tuple[str, str]:
    """A count and its bar."""
    return f"{count:,}", page.bar(count / max(1, most))


def _first_pictures(dataset: ConvertedDataset) -> dict[int, list[tuple[int, Pixels]]]:
    """Label -> (id, stored pixels) of its first samples in stored order; reads only their shards.

    Those that have not one class each are of label -1.
    """
    shown: dict[int, list[tuple[int, Pixels]]] = defaultdict(list)
    taken: dict[int, int] = defaultdict(int)
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    for split in dict.fromkeys(shard.split for shard in dataset.manifest.shards):
        index = dataset.read_index(split, removed=True)
        labels, served = index.labels, index.served
        start = 0
        for shard in dataset.manifest.split_shards(split):
            wanted = set()
            for row, label in enumerate(labels[start : start + shard.samples].tolist()):
                if taken[label] < _PICTURES_PER_CLASS and served[start + row]:
                    taken[label] += 1
                    wanted.add(row)
            path = dataset.shard_path(shard)
            for row, sample in _rows(read_shard(path), wanted) if wanted else ():
                index.check(start + row, sample.data, str(path), sample.damage)
                shown[int(labels[start + row])].append(
                    (sample.id, sample.pixels(str(path), channel_count(dataset.manifest.recipe.channels)))
                )
            start += shard.samples
    return shown


def _rows(samples: Iterable[StoredSample], wanted: set[int]) -> Iterable[tuple[int, StoredSample]]:
    last = max(wanted)
    for row, sample in enumerate(samples):
        if row in wanted:
            yield row, sample
        if row == last:
            return


def _data_uri(pixels: Pixels) -> str:
    if pixels.dtype != np.uint8:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.shape[2] not in (1, 3, 4):
        pixels = np.ascontiguousarray(pixels[..., : 3 if pixels.shape[2] > 3 else 1])
    small = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    small.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BILINEAR)
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small)
    content = jpeg.encode_jpeg(np.asarray(small.convert("RGB")), _THUMBNAIL_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _path_table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [(escape(path), escape(reason)) for path, reason in rows]
    if not lines:
        return '<p class="note">None.</p>'
    return page.html_table(["path", "reason"], lines, ["words", "words"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _name(place: Location) -> str:
    return place.name if isinstance(place, Url) else os.path.basename(os.path.realpath(place))
