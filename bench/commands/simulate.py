"""`bench simulate`: what so many GPUs would train on, from rates that were measured on this machine.

The slowest stage decides, of all GPUs together, which take their steps at the same time:

    step       what the GPUs train on
    decode     what the workers of each GPU deliver; those of a node share its CPUs
    node link  what the link of each node to the storage gives
    storage    what the storage gives, which all share

Left out are queues that run empty because batches come unevenly, the network that gradients take (measure the
trainer's rate with it) and page caches: it is the most that one can have.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.report.row import Result, Row, read_result
from bench.report.trust import disturbance, is_disturbed, miss, other_cpu, why_together
from bench.report.verdict import NEGLIGIBLE_SHARE
from bench.report.words import Table, counted
from precache.console import commandline
from precache.console.commandline import STDOUT, check_output, gathered, write_json
from precache.errors import SettingError, check_range

STORAGE, LINK, DECODE, STEP = "storage", "node link", "decode", "step"
_BOTTLENECKS = {STORAGE: "the storage", LINK: "the node's link to the storage", DECODE: "decoding"}
_GPUS_PER_NODE = 8
_PATH = click.Path(path_type=Path)
_OPTIONS = {
    "decode_s": ("--decode-ms", float, "What one worker takes for one image.  [default: the result's]"),
    "trainer_images_per_s": ("--trainer-rate", float, "Images/s of one GPU.  [default: the result's]"),
    "workers": ("--workers", int, "Of one GPU.  [default: the result's, or 8]"),
    "image_bytes": ("--image-bytes", float, "Read from storage per image.  [default: the result's]"),
    "storage_mbps": ("--storage-mbps", float, "MB/s of the storage, shared.  [default: without limit]"),
    "node_mbps": ("--node-mbps", float, "MB/s of each node's link to it.  [default: without limit]"),
    "cpus": ("--cpus", int, "Of each node, that its workers share.  [default: enough]"),
}
"""What replaces a field of Rates that the result has, or its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one GPU, its loader and the storage do; checked once.

    Attributes:
        decode_s: seconds per image of one worker.
        trainer_images_per_s: of one GPU on data that is there.
        workers: per GPU.
        image_bytes: read from storage per image; None: not known.
        storage_mbps: of the storage that all GPUs share, in MB/s (10^6 bytes); None: without limit.
        node_mbps: of each node's link to it, in MB/s; None: without limit.
        cpus: of a node; where its GPUs have more workers, those take turns. None: enough.
    """

    decode_s: float
    trainer_images_per_s: float
    workers: int = 8
    image_bytes: float | None = None
    storage_mbps: float | None = None
    node_mbps: float | None = None
    cpus: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise SettingError(f"{name} must be a positive number, got {value!r}")
        if self.image_bytes is None and (self.storage_mbps or self.node_mbps):
            raise SettingError(
                "--storage-mbps and --node-mbps need --image-bytes; give what is read per image"
            )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What so many GPUs would do.

    Attributes:
        images_per_s: of all GPUs together.
        wait_share: of the GPUs' time, 0 to 1, that they wait for data.
        busy: share of the time, 0 to 1, that each stage works.
        binds: the stage that is the bottleneck.
        needed_mbps: what the storage would have to give, in MB/s, for GPUs that never wait; 0: not known.
    """

    gpus: int
    nodes: int
    images_per_s: float
    wait_share: float
    busy: dict[str, float]
    binds: str
    needed_mbps: float


def simulate(rates: Rates, gpus: int, nodes: int) -> Prediction:
    """The slowest stage of so many GPUs; SettingError where `gpus` or `nodes` is out of range. Pure."""
    check_range("gpus", gpus, 1)
    check_range("nodes", nodes, 1, gpus)
    fullest = -(-gpus // nodes)  # GPUs of the node that has the most, for which all others wait
    megabytes = (rates.image_bytes or 0.0) / 1e6
    turns = max(1.0, fullest * rates.workers / (rates.cpus or math.inf))
    needed = {  # seconds for an image of each GPU
        STEP: 1 / rates.trainer_images_per_s,
        DECODE: rates.decode_s * turns / rates.workers,
        LINK: fullest * megabytes / (rates.node_mbps or math.inf),
        STORAGE: gpus * megabytes / (rates.storage_mbps or math.inf),
    }
    slowest = max(needed, key=lambda stage: needed[stage])
    wait_share = 1 - needed[STEP] / needed[slowest]
    return Prediction(
        gpus,
        nodes,
        gpus / needed[slowest],
        wait_share,
        {stage: seconds / needed[slowest] for stage, seconds in needed.items()},
        slowest if wait_share >= NEGLIGIBLE_SHARE else STEP,
        gpus * rates.trainer_images_per_s * megabytes,
    )


@click.command(name="simulate", cls=commandline.Command)
@click.option("--gpus", default="1,8,64,1024", show_default=True, help="How many GPUs train together.")
@click.option("--nodes", help="How many machines, for each number of GPUs.  [default: 8 GPUs each]")
@click.option("--result", "result_path", type=_PATH, help="Of 'bench loaders --json'.")
@click.option("--backend", help="Which row of the result to take.")
@click.option("--data", help="Which row of the result to take.")
@click.option("--trainer", help="Which row of the result to take.")
@gathered(
    "given",
    dict,
    {name: click.option(flag, name, type=kind, help=text) for name, (flag, kind, text) in _OPTIONS.items()},
)
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

    The rates are those of a row of --result, or of the options; an option replaces the result's. The
    slowest of training, decoding, storage and the nodes' links to it decides.
    """
    check_output(json_path)
    measured: dict[str, Any] = {}
    doubts: list[str] = []
    if result_path is not None:
        result = read_result(result_path)
        wanted = {"backend": backend, "data": data, "trainer_name": trainer}
        row = _choose(result_path, result, {name: value for name, value in wanted.items() if value})
        measured = _measured(result, row)
        doubts = [f"{result_path}: {doubt}" for doubt in _doubts(result, row)]
    elif backend or data or trainer:
        raise SettingError("--backend, --data and --trainer choose a row of --result; give it, too")
    rates = _rates(measured, given)
    counts = _numbers("gpus", gpus)
    machines = (
        [-(-count // _GPUS_PER_NODE) for count in counts] if nodes is None else _numbers("nodes", nodes)
    )
    if len(machines) != len(counts):
        raise SettingError(f"nodes {nodes!r} must have as many numbers as gpus {gpus!r}")
    predictions = [simulate(rates, *cluster) for cluster in zip(counts, machines, strict=True)]
    if json_path != STDOUT:
        _show(rates, predictions)
        for doubt in doubts:
            click.echo(doubt)
    if json_path is not None:
        predicted = [asdict(prediction) for prediction in predictions]
        write_json(json_path, {"rates": asdict(rates), "predictions": predicted})


def _choose(path: Path, result: Result, wanted: dict[str, str]) -> Row:
    """The one row of the result at `path` that has the wanted values."""
    loaders = [row for row in result.rows if not row.peer]
    rows = [row for row in loaders if all(getattr(row, name) == value for name, value in wanted.items())]
    if len(rows) != 1:
        known = "; ".join(f"{row.label} with {row.trainer_name}" for row in loaders)
        raise SettingError(
            f"{path}: {len(rows)} rows are of {', '.join(wanted.values()) or 'loaders'}; choose one with "
            f"--backend, --data and --trainer: {known}"
        )
    return rows[0]


def _measured(result: Result, row: Row) -> dict[str, Any]:
    """The fields of Rates by that row; None where it does not have one."""
    workers = max(1, result.settings["workers"])  # 0: the calling process decodes
    return {
        "workers": workers,
        "decode_s": workers / row.loader.median,
        "image_bytes": row.image_bytes,
        "trainer_images_per_s": None if row.trainer is None else row.trainer.median,
    }


def _doubts(result: Result, row: Row) -> list[str]:
    """What speaks against a prediction from that row: a busy machine, or what the row itself measured."""
    share = other_cpu(result.settings)
    doubts = [disturbance(share, then="")] if is_disturbed(share) else []
    if row.together is not None and row.predicted is not None:
        one, together = row.predicted, row.together.median
        missed = miss(one, together, why_together(one, together))
        if missed:
            doubts.append(f"measured {together:,.0f} images/s of one GPU, predicted {one:,.0f}; {missed}.")
    return doubts


def _rates(measured: dict[str, Any], given: dict[str, Any]) -> Rates:
    """What was given on the command line, else what was measured, else the default."""
    values = {name: value for name, value in measured.items() if value is not None}
    values |= {name: value for name, value in given.items() if value is not None}
    if given["decode_s"] is not None:
        values["decode_s"] /= 1e3  # given in ms
    for name in ("decode_s", "trainer_images_per_s"):
        if name not in values:
            flag = _OPTIONS[name][0]
            raise SettingError(f"{flag} is not known; give it, or a --result that was measured with it")
    return Rates(**values)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as 1,8,64, got {text!r}") from error


def _show(rates: Rates, predictions: Sequence[Prediction]) -> None:
    click.echo(_answer(rates, predictions))
    rows = [
        (
            f"{one.gpus:,}",
            f"{one.nodes:,}",
            f"{one.images_per_s:,.0f}",
            f"{one.wait_share:.0%}",
            one.binds,
            f"{one.needed_mbps:,.0f}" if one.needed_mbps else "-",
        )
        for one in predictions
    ]
    titles = ("GPUs", "nodes", "images/s", "GPUs wait", "bottleneck", "needs MB/s")
    Table(titles, rows, words=("bottleneck",)).show()
    per_image = "" if rates.image_bytes is None else f" and {rates.image_bytes:,.0f} bytes"
    click.echo(
        f"needs MB/s: what the storage must give so that no GPU waits. Per GPU: "
        f"{rates.trainer_images_per_s:,.0f} images/s,\n{counted(rates.workers, 'worker')}; "
        f"{rates.decode_s * 1e3:.3g} ms{per_image} per image. Where batches come unevenly, it is less."
    )


def _answer(rates: Rates, predictions: Sequence[Prediction]) -> str:
    """From how many GPUs on they wait, and for what; what it takes where no limit of the storage is given."""
    bound = next((one for one in predictions if one.binds != STEP), None)
    if bound is None:
        most = max(predictions, key=lambda one: one.gpus)
        told = rates.image_bytes and rates.storage_mbps is None
        given = (
            f", if the storage gives {counted(most.gpus, 'GPU')} {most.needed_mbps:,.0f} MB/s" if told else ""
        )
        return f"No GPU waits{given}: the training step is the bottleneck."
    who, verb = ("1 GPU", "it waits") if bound.gpus == 1 else (f"{bound.gpus:,} GPUs", "they wait")
    what = _BOTTLENECKS[bound.binds]
    return f"With {who} {what} is the bottleneck: {verb} {bound.wait_share:.0%} of the time."
