"""Compare what `bench recommend` predicts for trees with what `bench loaders` then measures.

    python -m bench.lab.forecast TREE ... --rates 500,2000

Each tree is converted as recommended, and every loader is measured on the whole of it. The last row counts
the predictions that came within their range: `bench.report.forecast.HELD`.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import click
import torch

from bench.lab import harness
from bench.machine.hardware import describe_machine
from bench.report import loaders, recommendation
from bench.report.forecast import stored_size
from bench.report.result import Result, Row, parse_document
from bench.report.stats import Estimate
from bench.report.table import Table
from bench.report.words import machine_line
from precache import Recipe, convert

_FORMATS = ("shards", "webdataset")
_BACKENDS = ("imagefolder", "pytorch", *_FORMATS)


_MAKERS: dict[str, Callable[..., Result]] = {
    "recommend": recommendation.make_result,
    "loaders": loaders.make_result,
}


def _run(path: Path, command: str, *words: object) -> tuple[Row, ...]:
    """Run a command of bench that keeps its result in the file at `path`, and return its rows."""
    line = [sys.executable, "-m", "bench", command, *map(str, words), "--json", str(path), "--quiet"]
    subprocess.run(line, check=True)
    document = parse_document(path.read_bytes(), path)
    return _MAKERS[command](document.machine, document.settings, document.trials, document.skipped).rows


def _compare(
    tree: Path, rates: Sequence[int], size: int, repeats: int
) -> list[tuple[list[str], Estimate, float]]:
    """Predict and measure each loader of a tree; return names, what was predicted, and what came."""
    pairs: list[tuple[list[str], Estimate, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders, convert_s = [], {}
        for name in _FORMATS:
            folders.append(Path(scratch) / name)
            start_s = time.perf_counter()
            convert(tree, folders[-1], Recipe(format=name, size=stored_size(size)))
            convert_s[name] = time.perf_counter() - start_s
        for rate in rates:
            words = ("--size", size, "--trainer-rate", rate)
            before = _run(Path(scratch) / f"{rate}.json", "recommend", tree, *words)
            options = ("--backend", ",".join(_BACKENDS), "--augment", "train", "--repeats", repeats)
            came = _run(Path(scratch) / f"{rate}-came.json", "loaders", tree, *folders, *options, *words)
            rows = {row.key["backend"]: row for row in came}
            for row in before:
                backend = row.key["backend"]
                if backend not in rows:
                    continue
                names = [tree.name, f"{rate:,}", backend]
                rate_came = rows[backend].values["fed_images_per_s"].median
                pairs.append(([*names, "images/s"], row.values["fed_images_per_s"], rate_came))
                if backend in convert_s:
                    pairs.append(([*names, "seconds"], row.values["convert_s"], convert_s[backend]))
    return pairs


@click.command()
@click.argument(
    "trees", type=click.Path(path_type=Path, exists=True, file_okay=False), nargs=-1, required=True
)
@click.option("--rates", default="500,2000", show_default=True, help="Images/s of the trainers.")
@click.option("--size", default=224, show_default=True, help="Side of the pictures that are served.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each loader on the whole tree.")
def command(trees: tuple[Path, ...], rates: str, size: int, repeats: int) -> None:
    """Print predictions beside what came, and count those that held."""
    pairs = []
    for tree in trees:
        pairs += _compare(tree, [int(rate) for rate in rates.split(",")], size, repeats)
    rows, right, errors = [], 0, []
    for names, predicted, came in pairs:
        # a trainer that never waits may be timed at a little more than its rate
        holds = predicted.low <= came <= predicted.high * 1.005
        right += holds
        errors.append(abs(came / predicted.median - 1))
        rows.append([*names, f"{predicted:,.0f}", f"{came:,.0f}", "yes" if holds else "no"])
    summary = f"{right} of {len(pairs)} held, {median(errors):.0%} off in the median"
    titles = ("tree", "trainer", "loader", "what", "predicted", "came", "held")
    click.echo(Table(titles, [*rows, [summary, *[""] * 6]]).markdown())
    click.echo(f"\n{machine_line(describe_machine(torch.device('cpu')), ('python', 'torch', 'pillow'))}")


if __name__ == "__main__":
    harness.main(command, "forecast")
