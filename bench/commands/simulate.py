"""`bench simulate`: throughput past this machine, from rates measured on it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bench.findings.result import Row
from bench.findings.result_file import read_result
from bench.findings.simulation import SLOWEST, STEP, Prediction, Rates, simulate
from precache import commandline
from precache.commandline import STDOUT, ProgressBar, check_output, write_json
from precache.errors import SettingError
from precache.tables import new_console

_WIDTH = 100
_GPUS_PER_NODE = 8
_DEFAULTS = {"batch_size": 64, "workers": 8, "image_bytes": 0.0}


@click.command(name="simulate", cls=commandline.Command)
@click.option("--gpus", default="1,8,64,1024", show_default=True, help="GPUs, all in one training run.")
@click.option("--nodes", help="Machines, for each number of GPUs.  [default: 8 GPUs each]")
@click.option("--result", "result_path", type=click.Path(path_type=Path), help="Of 'bench loaders --json'.")
@click.option("--backend", help="Which row of the result.")
@click.option("--data", help="Which row of the result.")
@click.option("--trainer", help="Which row of the result.")
@click.option("--decode-ms", type=float, help="Of one image in one worker.  [default: the result's]")
@click.option(
    "--trainer-rate", "trainer_images_per_s", type=float, help="Images/s of one GPU.  [default: the result's]"
)
@click.option("--batch-size", type=int, help="Of one GPU.  [default: the result's, or 64]")
@click.option("--workers", type=int, help="Of one GPU.  [default: the result's, or 8]")
@click.option("--prefetch", type=int, help="Batches that a loader holds ahead.  [default: 2 per worker]")
@click.option("--image-bytes", type=float, help="Read from storage per image.  [default: the result's]")
@click.option("--storage-mbps", type=float, help="MB/s of the storage, shared.  [default: never binds]")
@click.option("--node-mbps", type=float, help="MB/s of each node's link to it.  [default: never binds]")
@click.option("--cpus", type=int, help="Of each node, that its workers share.  [default: enough]")
@click.option("--noise", default=0.0, show_default=True, help="Deviation of steps and decoding, relative.")
@click.option("--seed", default=0, show_default=True, help="Of the noise.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write it here; '-' prints it.")
def command(
    gpus: str,
    nodes: str | None,
    result_path: Path | None,
    backend: str | None,
    data: str | None,
    trainer: str | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Predict the throughput of many GPUs from measured rates."""
    check_output(json_path)
    measured = {}
    if result_path is not None:
        measured = _measured(result_path, {"backend": backend, "data": data, "trainer_name": trainer})
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


def _measured(path: Path, wanted: dict[str, str | None]) -> dict[str, Any]:
    """The rates in the row of the result at `path` that has the wanted values."""
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
    return measured


def _describe(row: Row) -> str:
    return f"{row.backend} on {row.data} with {row.trainer_name}"


def _clusters(gpus: str, nodes: str | None) -> list[tuple[int, int]]:
    """(GPUs, nodes) of each cluster."""
    counts = _numbers("gpus", gpus)
    if nodes is None:
        return [(count, -(-count // _GPUS_PER_NODE)) for count in counts]
    machines = _numbers("nodes", nodes)
    if len(machines) != len(counts):
        raise SettingError(f"nodes {nodes!r} must have as many numbers as gpus {gpus!r}")
    return list(zip(counts, machines, strict=True))


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as 1,8,64, got {text!r}") from error


def _print(rates: Rates, predictions: list[Prediction]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("GPUs", "nodes", "images/s", "of ideal", "waits", "binds", "needs MB/s"):
        table.add_column(title, justify="left" if title == "binds" else "right", no_wrap=True)
    for one in predictions:
        ideal = one.gpus * rates.trainer_images_per_s
        table.add_row(
            f"{one.gpus:,}",
            f"{one.nodes:,}",
            f"{one.images_per_s:,.0f}",
            f"{one.images_per_s / ideal:.0%}",
            f"{one.wait_share:.0%}",
            one.binds,
            f"{one.needed_mbps:,.0f}" if rates.image_bytes else "-",
        )
    new_console(width=_WIDTH).print(table)
    click.echo("of ideal: of GPUs that never wait. needs MB/s: what the storage must give for that.")
    bound = next((one for one in predictions if one.binds not in (STEP, SLOWEST)), None)
    if bound is not None:
        who, verb = ("1 GPU", "it waits") if bound.gpus == 1 else (f"{bound.gpus:,} GPUs", "they wait")
        click.echo(f"With {who} {bound.binds} binds: {verb} {bound.wait_share:.0%} of the time.")
    shared = "unlimited" if rates.storage_mbps is None else f"{rates.storage_mbps:,.0f} MB/s"
    click.echo(
        f"Per GPU: {rates.trainer_images_per_s:,.0f} images/s, batch {rates.batch_size}, {rates.workers} "
        f"workers of {rates.decode_s * 1e3:.3g} ms per image,\nprefetch {rates.prefetch} batches; "
        f"{rates.image_bytes:,.0f} bytes per image, storage {shared}; noise {rates.noise:.0%}."
    )
