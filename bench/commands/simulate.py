"""`bench simulate`: what so many GPUs would train on, from rates that were measured with one.

The slowest decides, of all GPUs together, which take their steps at the same time:

    step       what the GPUs train on
    loader     what the loader of each GPU delivers, on CPUs of its own
    node link  what the link of each node to the storage gives
    storage    what the storage gives, which all share

Left out are queues that run empty because batches come unevenly, the network that gradients take (measure the
trainer's rate with it) and page caches: it is the most that one can have.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bench.report.row import Result, read_result
from bench.report.stats import NEGLIGIBLE_SHARE, disturbance, other_cpu
from bench.report.words import Table, say
from precache.cli import commandline
from precache.cli.commandline import STDOUT, check_output, gathered, write_json
from precache.errors import SettingError, check_range

STEP, LOADER, LINK, STORAGE = "step", "loader", "node link", "storage"
_BOTTLENECKS = {LOADER: "loading", LINK: "the node's link to the storage", STORAGE: "the storage"}
_PATH = click.Path(path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_RATES = {
    "loader_images_per_s": ("--loader-rate", "Images/s of the loader of one GPU.  [default: the result's]"),
    "trainer_images_per_s": ("--trainer-rate", "Images/s of one GPU.  [default: the result's]"),
    "image_bytes": ("--image-bytes", "Read from storage per image.  [default: the result's]"),
    "storage_mbps": ("--storage-mbps", "MB/s of the storage, shared.  [default: without limit]"),
    "node_mbps": ("--node-mbps", "MB/s of each node's link to it.  [default: without limit]"),
}
"""Arguments of `predict`: the option, and what it means; MB are 10^6 bytes."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What so many GPUs would do.

    Attributes:
        images_per_s: of all GPUs together.
        wait_share: of the GPUs' time, 0 to 1, that they wait for data.
        binds: the stage that is the bottleneck.
        needed_mbps: what the storage would have to give, in MB/s, for GPUs that never wait; 0: not known.
    """

    gpus: int
    nodes: int
    images_per_s: float
    wait_share: float
    binds: str
    needed_mbps: float


def predict(
    gpus: int,
    gpus_per_node: int,
    *,
    loader_images_per_s: float,
    trainer_images_per_s: float,
    image_bytes: float = 0.0,
    storage_mbps: float = math.inf,
    node_mbps: float = math.inf,
) -> Prediction:
    """The slowest stage of so many GPUs; SettingError where a number is out of range. Pure."""
    check_range("gpus", gpus, 1)
    check_range("gpus_per_node", gpus_per_node, 1)
    megabytes = image_bytes / 1e6
    needed = {  # seconds for an image of each GPU
        STEP: 1 / trainer_images_per_s,
        LOADER: 1 / loader_images_per_s,
        LINK: min(gpus, gpus_per_node) * megabytes / node_mbps,
        STORAGE: gpus * megabytes / storage_mbps,
    }
    slowest = max(needed, key=lambda stage: needed[stage])
    wait_share = 1 - needed[STEP] / needed[slowest]
    return Prediction(
        gpus,
        math.ceil(gpus / gpus_per_node),
        gpus / needed[slowest],
        wait_share,
        slowest if wait_share >= NEGLIGIBLE_SHARE else STEP,
        gpus * trainer_images_per_s * megabytes,
    )


@click.command(name="simulate", cls=commandline.Command)
@click.option("--gpus", default="1,8,64,1024", show_default=True, help="How many GPUs train together.")
@click.option("--gpus-per-node", default=8, show_default=True, help="How many of them a machine has.")
@click.option("--result", "result_path", type=_PATH, help="Of 'bench loaders --json'.")
@click.option("--backend", help="Which row of the result to take.")
@gathered(
    "given",
    dict,
    {name: click.option(flag, name, type=_POSITIVE, help=text) for name, (flag, text) in _RATES.items()},
)
@click.option("--json", "json_path", type=_PATH, help="Write it here; '-' prints it.")
def command(
    gpus: str,
    gpus_per_node: int,
    result_path: Path | None,
    backend: str | None,
    given: dict[str, float | None],
    json_path: Path | None,
) -> None:
    """Predict the images/s of many GPUs, and what would hold them up.

    The rates are those of a row of --result, or of the options; an option replaces the result's. The
    slowest of training, loading, storage and the nodes' links to it decides.
    """
    check_output(json_path)
    if backend is not None and result_path is None:
        raise SettingError("--backend chooses a row of --result; give it, too")
    result = None if result_path is None else read_result(result_path)
    rates = {} if result is None else measured_rates(result, backend)
    rates |= {name: value for name, value in given.items() if value is not None}
    for name in ("loader_images_per_s", "trainer_images_per_s"):
        if name not in rates:
            flag = _RATES[name][0]
            raise SettingError(f"{flag} is not known; give it, or a --result that was measured with it")
    if "image_bytes" not in rates and rates.keys() & {"storage_mbps", "node_mbps"}:
        raise SettingError("--storage-mbps and --node-mbps need --image-bytes; give what is read per image")
    try:
        counts = [int(part) for part in gpus.split(",")]
    except ValueError as error:
        raise SettingError(f"gpus must be numbers as in 1,8,64, got {gpus!r}") from error
    predictions = [predict(count, gpus_per_node, **rates) for count in counts]
    if json_path != STDOUT:
        _show(rates, predictions)
        if result is not None and (doubt := disturbance(other_cpu(result.settings), then="")):
            say(doubt)
    if json_path is not None:
        write_json(json_path, {"rates": rates, "predictions": [asdict(one) for one in predictions]})


def measured_rates(result: Result, backend: str | None) -> dict[str, float]:
    """Arguments of `predict`, of the one row of the result that `backend` names; SettingError for others."""
    loaders = [row for row in result.rows if not row.peer]
    rows = [row for row in loaders if backend in (None, row.backend)]
    if len(rows) != 1:
        known = "; ".join(f"{row.label} with {row.trainer_name}" for row in loaders)
        raise SettingError(
            f"the result has {len(rows)} rows of {backend or 'loaders'}: {known}; choose one with --backend, "
            f"or give --loader-rate and --trainer-rate in its place"
        )
    row = rows[0]
    rates = {
        "loader_images_per_s": row.loader.median,
        "trainer_images_per_s": None if row.trainer is None else row.trainer.median,
        "image_bytes": row.image_bytes,
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _show(rates: dict[str, float], predictions: Sequence[Prediction]) -> None:
    """From how many GPUs on they wait and for what; a row per cluster; what that is reckoned from."""
    waiting = next((one for one in predictions if one.binds != STEP), None)
    if waiting is None:
        say("No GPU waits, if the storage gives what is needed below: the training step is the bottleneck.")
    else:
        who = "1 GPU waits" if waiting.gpus == 1 else f"{waiting.gpus:,} GPUs wait"
        say(f"{who} {waiting.wait_share:.0%} of the time: {_BOTTLENECKS[waiting.binds]} is the bottleneck.")
    rows = [
        (
            *(f"{one.gpus:,}", f"{one.nodes:,}", f"{one.images_per_s:,.0f}", f"{one.wait_share:.0%}"),
            *(one.binds, f"{one.needed_mbps:,.0f}" if one.needed_mbps else "-"),
        )
        for one in predictions
    ]
    titles = ("GPUs", "nodes", "images/s", "GPUs wait", "bottleneck", "needs MB/s")
    Table(titles, rows, words=("bottleneck",)).show()
    say(
        f"needs MB/s: what the storage must give so that no GPU waits. Reckoned from "
        f"{rates['trainer_images_per_s']:,.0f} images/s of a GPU and {rates['loader_images_per_s']:,.0f} of "
        f"its loader, on CPUs of its own; where batches come unevenly, it is less."
    )
