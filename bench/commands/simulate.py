"""`bench simulate`: throughput past this machine, from rates measured on it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bench.report.row import Row, read_result
from bench.report.simulation import (
    DECODE,
    LINK,
    MAX_GPUS,
    SLOWEST,
    STEP,
    STORAGE,
    Prediction,
    Rates,
    simulate,
)
from bench.report.trust import disturbance, is_disturbed, miss, other_cpu, why_together
from bench.report.words import counted
from precache.console import commandline
from precache.console.commandline import STDOUT, ProgressBar, check_output, gathered, write_json
from precache.console.tables import new_console
from precache.errors import SettingError, check_range

_PATH = click.Path(path_type=Path)
_WIDTH = 100
_BOTTLENECKS = {STORAGE: "the storage", LINK: "the node's link to the storage", DECODE: "decoding"}
_GPUS_PER_NODE = 8
_DEFAULTS = {"batch_size": 64, "workers": 8, "image_bytes": 0.0}
_RATES = {
    "decode_ms": click.option(
        "--decode-ms", type=float, help="What one worker takes for one image.  [default: the result's]"
    ),
    "trainer_images_per_s": click.option(
        "--trainer-rate",
        "trainer_images_per_s",
        type=float,
        help="Images/s of one GPU.  [default: the result's]",
    ),
    "batch_size": click.option("--batch-size", type=int, help="Of one GPU.  [default: the result's, or 64]"),
    "workers": click.option("--workers", type=int, help="Of one GPU.  [default: the result's, or 8]"),
    "prefetch": click.option(
        "--prefetch", type=int, help="Batches that a loader holds ahead.  [default: 2 per worker]"
    ),
    "image_bytes": click.option(
        "--image-bytes", type=float, help="Read from storage per image.  [default: the result's]"
    ),
    "storage_mbps": click.option(
        "--storage-mbps", type=float, help="MB/s of the storage, shared.  [default: without limit]"
    ),
    "node_mbps": click.option(
        "--node-mbps", type=float, help="MB/s of each node's link to it.  [default: without limit]"
    ),
    "cpus": click.option("--cpus", type=int, help="Of each node, that its workers share.  [default: enough]"),
    "noise": click.option(
        "--noise", default=0.0, show_default=True, help="How much steps and decoding vary: 0.1 is 10%."
    ),
    "seed": click.option("--seed", default=0, show_default=True, help="Of the noise."),
}
"""What replaces a rate of the result, or its default."""


@click.command(name="simulate", cls=commandline.Command)
@click.option("--gpus", default="1,8,64,1024", show_default=True, help="How many GPUs train together.")
@click.option("--nodes", help="How many machines, for each number of GPUs.  [default: 8 GPUs each]")
@click.option("--result", "result_path", type=_PATH, help="Of 'bench loaders --json'.")
@click.option("--backend", help="Which row of the result to take.")
@click.option("--data", help="Which row of the result to take.")
@click.option("--trainer", help="Which row of the result to take.")
@gathered("given", dict, _RATES)
@click.option("--json", "json_path", type=_PATH, help="Write it here; '-' prints it.")
def command(
    gpus: str,
    nodes: str | None,
    result_path: Path | None,
    backend: str | None,
    data: str | None,
    trainer: str | None,
    given: dict[str, Any],
    json_path: Path | None,
) -> None:
    """Predict the images/s of many GPUs, and what would hold them up.

    The rates are those of a row of --result, or of the options; an option replaces the result's.
    """
    check_output(json_path)
    measured: dict[str, Any] = {}
    row = None
    if result_path is not None:
        row, measured = _measured(result_path, {"backend": backend, "data": data, "trainer_name": trainer})
    elif backend or data or trainer:
        raise SettingError("--backend, --data and --trainer choose a row of --result; give it, too")
    rates = _rates(measured, given)
    clusters = _clusters(gpus, nodes)
    predictions = []
    with ProgressBar("simulate", "cluster") as bar:
        for cluster in clusters:
            predictions.append(simulate(rates, *cluster))
            bar(len(predictions), len(clusters))
    if json_path != STDOUT:
        _print(rates, predictions)
        for line in _doubts(result_path, row, measured):
            click.echo(line)
    if json_path is not None:
        predicted = [asdict(prediction) for prediction in predictions]
        write_json(json_path, {"rates": asdict(rates), "predictions": predicted})


def _rates(measured: dict[str, Any], given: dict[str, Any]) -> Rates:
    """What was given on the command line, else what was measured, else the default."""
    values = {name: value for name, value in given.items() if value is not None and name != "decode_ms"}
    if given["decode_ms"] is not None:
        values["decode_s"] = given["decode_ms"] / 1e3
    values = {**_DEFAULTS, **measured, **values}
    for name, option in (("decode_s", "--decode-ms"), ("trainer_images_per_s", "--trainer-rate")):
        if name not in values:
            raise SettingError(f"{option} is not known; give it, or a --result that was measured with it")
    if values["image_bytes"] == 0 and not values.keys().isdisjoint(("storage_mbps", "node_mbps")):
        raise SettingError("--storage-mbps and --node-mbps need --image-bytes; give what is read per image")
    values.setdefault("prefetch", 2 * values["workers"])
    return Rates(**{"storage_mbps": None, "node_mbps": None, "cpus": None, **values})


def _doubts(path: Path | None, row: Row | None, measured: dict[str, Any]) -> list[str]:
    """What speaks against a prediction from that row: a busy machine, or what the row itself measured."""
    if path is None or row is None:
        return []
    lines = []
    share = other_cpu(read_result(path).settings)
    if is_disturbed(share):
        lines.append(f"{path}: {disturbance(share, then='')}")
    if row.together is not None and "trainer_images_per_s" in measured:
        alone = _rates(measured, {"decode_ms": None, "cpus": None, "noise": 0.0, "seed": 0})
        one = simulate(alone, 1, 1).images_per_s
        missed = miss(one, row.together.median, why_together(one, row.together.median))
        if missed:
            lines.append(
                f"{path} measured {row.together.median:,.0f} images/s for what this model gives {one:,.0f}: "
                f"{missed}."
            )
    return lines


def _measured(path: Path, wanted: dict[str, str | None]) -> tuple[Row, dict[str, Any]]:
    """The row of the result at `path` that has the wanted values, and the rates in it."""
    result = read_result(path)
    asked = {name: value for name, value in wanted.items() if value is not None}
    loaders = [row for row in result.rows if not row.peer]
    rows = [row for row in loaders if all(getattr(row, name) == value for name, value in asked.items())]
    if len(rows) != 1:
        known = "; ".join(map(_describe, loaders))
        raise SettingError(
            f"{path}: {len(rows)} rows are of {', '.join(asked.values()) or 'loaders'}; choose one with "
            f"--backend, --data and --trainer: {known}"
        )
    (row,) = rows
    workers = max(1, result.settings["workers"])  # 0: the calling process decodes
    measured = {
        "batch_size": result.settings["batch_size"],
        "workers": workers,
        "decode_s": workers / row.loader.median,
    }
    if row.image_bytes is not None:
        measured["image_bytes"] = row.image_bytes
    if row.trainer is not None:
        measured["trainer_images_per_s"] = row.trainer.median
    return row, measured


def _describe(row: Row) -> str:
    return f"{row.backend} on {row.data} with {row.trainer_name}"


def _clusters(gpus: str, nodes: str | None) -> list[tuple[int, int]]:
    """(GPUs, nodes) of each cluster; SettingError for what `simulate` would refuse, before it begins."""
    counts = _numbers("gpus", gpus)
    for count in counts:
        check_range("gpus", count, 1, MAX_GPUS)
    if nodes is None:
        return [(count, -(-count // _GPUS_PER_NODE)) for count in counts]
    machines = _numbers("nodes", nodes)
    if len(machines) != len(counts):
        raise SettingError(f"nodes {nodes!r} must have as many numbers as gpus {gpus!r}")
    for count, machine in zip(counts, machines, strict=True):
        check_range("nodes", machine, 1, count)
    return list(zip(counts, machines, strict=True))


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as 1,8,64, got {text!r}") from error


def _print(rates: Rates, predictions: list[Prediction]) -> None:
    click.echo(answer(predictions, storage_limited=rates.storage_mbps is not None))
    table = Table(box=None, pad_edge=False)
    for title in ("GPUs", "nodes", "images/s", "of ideal", "waits", "bottleneck", "needs MB/s"):
        table.add_column(title, justify="left" if title == "bottleneck" else "right", no_wrap=True)
    for one in predictions:
        ideal = one.gpus * rates.trainer_images_per_s
        table.add_row(
            f"{one.gpus:,}",
            f"{one.nodes:,}",
            f"{one.images_per_s:,.0f}",
            f"{one.images_per_s / ideal:.0%}",
            f"{max(0.0, one.wait_share):.0%}",
            one.binds,
            f"{one.needed_mbps:,.0f}" if rates.image_bytes else "-",
        )
    new_console(width=_WIDTH).print(table)
    click.echo("of ideal: images/s over those of GPUs that never wait.")
    if rates.image_bytes:
        click.echo("needs MB/s: what the storage must give so that no GPU waits.")
    shared = "without limit" if rates.storage_mbps is None else f"{rates.storage_mbps:,.0f} MB/s"
    click.echo(
        f"Per GPU: {rates.trainer_images_per_s:,.0f} images/s, batch {rates.batch_size}, "
        f"{counted(rates.workers, 'worker')} of {rates.decode_s * 1e3:.3g} ms per image,\n"
        f"{counted(rates.prefetch, 'batch', 'batches')} read ahead; {rates.image_bytes:,.0f} bytes per "
        f"image, storage {shared}; noise {rates.noise:.0%}."
    )


def answer(predictions: list[Prediction], *, storage_limited: bool) -> str:
    """From how many GPUs on they wait, and for what; what it takes where no limit of the storage is given."""
    bound = next((one for one in predictions if one.binds != STEP), None)
    if bound is None:
        most = max(predictions, key=lambda one: one.gpus)
        needs = most.needed_mbps if not storage_limited else None
        given = f", if the storage gives {counted(most.gpus, 'GPU')} {needs:,.0f} MB/s" if needs else ""
        return f"No GPU waits{given}: the training step is the bottleneck."
    if bound.binds == SLOWEST:
        return (
            f"With {bound.gpus:,} GPUs each waits {bound.wait_share:.0%} of the time for the slowest of them."
        )
    who, verb = ("1 GPU", "it waits") if bound.gpus == 1 else (f"{bound.gpus:,} GPUs", "they wait")
    what = _BOTTLENECKS[bound.binds]
    return f"With {who} {what} is the bottleneck: {verb} {bound.wait_share:.0%} of the time."
