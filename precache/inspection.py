"""What a converted dataset holds: as JSON, as tables, and as one HTML page to look at."""

import base64
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.table import Table

from precache import jpeg
from precache.commandline import human_bytes, printable
from precache.converted import ConvertedDataset
from precache.errors import SettingError
from precache.formats import FORMATS, StoredSample
from precache.jpeg import Pixels
from precache.manifest import Manifest, count_reasons
from precache.storage import atomic_write
from precache.tables import new_console

_PICTURES_PER_CLASS = 5
_THUMBNAIL = 112
_THUMBNAIL_QUALITY = 85
_ASPECTS = (0, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 0.95, 1.05, 4 / 3, 3 / 2, 2, 3, np.inf)
_SIDES = (0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, np.inf)
_STYLE = """
:root { color-scheme: light dark; --bar: #4a7fb5; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; }
td { overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.bar { min-width: 6rem; } td.bar div { background: var(--bar); height: .8rem; border-radius: 2px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: start; }
.wide { overflow-x: auto; }
td.name { min-width: 8rem; max-width: 16rem; }
.pictures { display: flex; gap: 2px; flex-wrap: wrap; min-width: 8rem; }
.pictures img { width: 4rem; height: 4rem; object-fit: cover; }
.note { opacity: .7; }
"""


def summary(manifest: Manifest) -> dict[str, Any]:
    """The manifest's content as JSON values, without the shards' names."""
    return {
        "format": manifest.recipe.format,
        "recipe": manifest.recipe.to_json(),
        "made_by": manifest.made_by,
        "samples": manifest.samples,
        "splits": {
            split: {"samples": sum(counts), "classes": dict(zip(manifest.classes, counts, strict=True))}
            for split, counts in manifest.samples_per_class.items()
        },
        "shards": len(manifest.shards),
        "source_bytes": manifest.source_bytes,
        "stored_bytes": manifest.stored_bytes,
        "rejected": [{"id": r.id, "path": r.path, "reason": r.reason} for r in manifest.rejected],
        "ignored": [{"path": path, "reason": reason} for path, reason in manifest.ignored],
    }


def print_tables(dataset: ConvertedDataset) -> None:
    """Print facts, samples per class, and what is left out."""
    manifest = dataset.manifest
    console = new_console()
    facts = Table(box=None, show_header=False)
    for name, value in _facts(dataset).items():
        facts.add_row(name, printable(value))
    console.print(facts)
    classes = Table(box=None)
    classes.add_column("class")
    for split in manifest.samples_per_class:
        classes.add_column(printable(split), justify="right")
    for label, name in enumerate(manifest.classes):
        counts = (f"{per_class[label]:,}" for per_class in manifest.samples_per_class.values())
        classes.add_row(printable(name), *counts)
    console.print(classes)
    for rejected in manifest.rejected:
        console.print(printable(f"rejected {rejected.path}: {rejected.reason}"))
    for reason, count in count_reasons([reason for _, reason in manifest.ignored]).items():
        console.print(printable(f"ignored {count:,}: {reason}"))


def write_html(dataset: ConvertedDataset, path: str | os.PathLike[str]) -> None:
    """Write one page that needs no network: facts, distributions, pictures of each class, rejected ones.

    Raises:
        DatasetError: a shard or the index is damaged.
        ImageError: a stored picture is.
        SettingError: `path` cannot be written.
    """
    manifest = dataset.manifest
    sizes = dataset.read_source_sizes()
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(dataset).items()
    )
    rejected = ((r.path, r.reason) for r in manifest.rejected)
    title = escape(f"{os.path.basename(os.path.realpath(dataset.path))}: {manifest.samples:,} pictures")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1><dl>{facts}</dl>"
        '<h2>Source pictures</h2><div class="charts">'
        f"{_histogram('shorter side, pixels', sizes.min(axis=1), _SIDES)}"
        f"{_histogram('longer side, pixels', sizes.max(axis=1), _SIDES)}"
        f"{_histogram('width / height', sizes[:, 0] / sizes[:, 1], _ASPECTS)}</div>"
        f"<h2>Rejected</h2>{_path_table(rejected)}<h2>Ignored</h2>{_path_table(manifest.ignored)}"
        '<h2>Classes</h2><p class="note">With the first pictures in stored order, as stored, shown smaller.'
        f"</p>{_class_table(dataset)}"
        "</body></html>\n"
    )
    try:
        with atomic_write(Path(path)) as file:
            file.write(page.encode(errors="backslashreplace"))
    except OSError as error:
        raise SettingError(f"{path}: cannot be written ({error.strerror}); name another file") from error


def _facts(dataset: ConvertedDataset) -> dict[str, str]:
    manifest = dataset.manifest
    splits = ", ".join(f"{split} {sum(counts):,}" for split, counts in manifest.samples_per_class.items())
    return {
        "dataset": str(dataset.path),
        "format": manifest.recipe.format,
        "samples": f"{manifest.samples:,} in {len(manifest.classes):,} classes ({splits})",
        "shards": f"{len(manifest.shards):,}",
        "on disk": f"{human_bytes(manifest.stored_bytes)} (source: {human_bytes(manifest.source_bytes)})",
        "recipe": ", ".join(f"{name} {value}" for name, value in manifest.recipe.to_json().items()),
        "made by": ", ".join(f"{name} {value}" for name, value in manifest.made_by.items()),
        "scanned": f"{manifest.scanned:,}",
        "rejected": f"{len(manifest.rejected):,}",
        "ignored": f"{len(manifest.ignored):,}",
    }


def _histogram(title: str, values: np.ndarray[Any, Any], edges: Sequence[float]) -> str:
    counts, _ = np.histogram(values, edges)
    low, median, high = np.quantile(values, (0, 0.5, 1))
    rows = "".join(
        f"<tr><td>{'under' if first == 0 else 'from'} {_number(first or last)}</td>"
        f"{_bar(int(count), counts.max())}</tr>"
        for first, last, count in zip(edges, edges[1:], counts, strict=False)
        if first < high and last > low
    )
    caption = f"from {_number(low)} to {_number(high)}, median {_number(median)}"
    return (
        f'<table><thead><tr><th>{escape(title)}</th><th class="number">pictures</th><th></th></tr></thead>'
        f'<tbody>{rows}</tbody><tfoot><tr><td colspan="3" class="note">{caption}</td></tr>'
        "</tfoot></table>"
    )


def _class_table(dataset: ConvertedDataset) -> str:
    """Each class: how many pictures, and the first ones."""
    manifest = dataset.manifest
    counts = [sum(per_class) for per_class in zip(*manifest.samples_per_class.values(), strict=True)]
    shown = _first_pictures(dataset)
    rows = []
    for label, name in enumerate(manifest.classes):
        pictures = "".join(
            f'<img alt="sample {sample_id}" title="sample {sample_id}" src="{_data_uri(pixels)}">'
            for sample_id, pixels in shown[label]
        )
        rows.append(
            f'<tr><td class="name">{escape(name)}</td>{_bar(counts[label], max(counts))}'
            f'<td><div class="pictures">{pictures}</div></td></tr>'
        )
    head = '<tr><th>class</th><th class="number">pictures</th><th></th><th></th></tr>'
    body = "".join(rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _bar(count: int, most: int) -> str:
    return (
        f'<td class="number">{count:,}</td>'
        f'<td class="bar"><div style="width:{100 * count / most:.1f}%"></div></td>'
    )


def _first_pictures(dataset: ConvertedDataset) -> dict[int, list[tuple[int, Pixels]]]:
    """Label -> (id, stored pixels) of its first samples in stored order; reads only their shards."""
    shown: dict[int, list[tuple[int, Pixels]]] = defaultdict(list)
    taken: dict[int, int] = defaultdict(int)
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    for split in dict.fromkeys(shard.split for shard in dataset.manifest.shards):
        index = dataset.read_index(split)
        labels = index.labels
        start = 0
        for shard in dataset.manifest.split_shards(split):
            wanted = set()
            for row, label in enumerate(labels[start : start + shard.samples].tolist()):
                if taken[label] < _PICTURES_PER_CLASS:
                    taken[label] += 1
                    wanted.add(row)
            path = dataset.shard_path(shard)
            for row, sample in _rows(read_shard(path), wanted) if wanted else ():
                index.check(start + row, sample.data, str(path), sample.damage)
                shown[int(labels[start + row])].append((sample.id, sample.pixels(str(path))))
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
    side = min(_THUMBNAIL, len(pixels))
    small = Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR)
    content = jpeg.encode_jpeg(np.asarray(small), _THUMBNAIL_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _path_table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{escape(path)}</td><td>{escape(reason)}</td></tr>" for path, reason in rows)
    if not body:
        return '<p class="note">None.</p>'
    head = "<tr><th>path</th><th>reason</th></tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"
