"""A result of `bench convert` on the terminal."""

from rich.table import Table

from bench.machine.hardware import versions_of
from bench.measure.conversion import OURS, ConversionResult
from bench.report import stats
from bench.report.words import counted
from precache.console.tables import new_console
from precache.recipe import Recipe

WIDTH = 100


def show(result: ConversionResult) -> None:
    """Print what takes the time, the tables, and under which conditions the figures hold."""
    console = new_console(width=WIDTH)
    console.print(answer(result))
    for table in (_stages(result), _wholes(result)):
        console.print()
        console.print(table)
    console.print()
    console.print(_limits(result))
    console.print(f"{_conditions(result)}.")


def answer(result: ConversionResult) -> str:
    """What takes the time, first of all that is printed."""
    stage, share = result.costliest
    rate = result.wholes[0].images_per_s.median
    return (
        f"Converting reaches {rate:,.0f} images/s, start-up included. {stage.capitalize()} takes "
        f"{share:.0%} of the stages' time{_advice(stage, result.machine)}."
    )


def _stages(result: ConversionResult) -> Table:
    total_s = sum(1 / stage.median for stage in result.stages.values())
    table = _table("stage", "images/s per CPU", "low-high", "share of the time")
    for name, stage in result.stages.items():
        table.add_row(name, *_spread(stage), f"{1 / stage.median / total_s:.0%}")
    return table


def _wholes(result: ConversionResult) -> Table:
    """Ours, and how many times as many images/s that is as each other writer's, where there are any."""
    compared = len(result.wholes) > 1
    table = _table("whole conversion", "images/s", "low-high", *["precache is"] * compared)
    for whole in result.wholes:
        ratio = whole.ratio
        times = f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})" if whole.name != OURS else "-"
        table.add_row(whole.name, *_spread(whole.images_per_s), *[times] * compared)
    return table


def _limits(result: ConversionResult) -> str:
    rate = result.wholes[0].images_per_s.median
    cpus = counted(result.settings["workers"], "CPU")
    return (
        f"That is {rate / result.decode_limit:.0%} of what {cpus} that only decode would reach "
        f"({result.decode_limit:,.0f}), and {rate / result.stages_limit:.0%} of what they would reach with "
        f"all stages and nothing else ({result.stages_limit:,.0f}). All processes together used "
        f"{result.peak_bytes / 2**20:,.0f} MiB of memory at most."
    )


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _conditions(result: ConversionResult) -> str:
    """Under which conditions the figures hold."""
    settings, machine = result.settings, result.machine
    recipe = Recipe(**settings["recipe"])
    workers = counted(settings["workers"], "worker")
    versions = versions_of(machine, ("pillow", "simplejpeg"))
    versions += [f"python {machine['python']}", *settings["peers"].values()]
    return "; ".join(
        (
            f"{settings['source']}: {settings['images']:,} pictures, "
            f"{settings['source_bytes'] / 2**20:,.0f} MiB",
            f"{recipe.to_flags()}, {workers}, page cache {settings['page_cache']}",
            f"median of {counted(settings['repeats'], 'run')}, taking turns, and their range",
            f"{machine['cpu']}, {machine['memory']}",
            ", ".join(versions),
            machine["date"],
        )
    )


def _advice(stage: str, machine: dict[str, str]) -> str:
    if stage == "resize" and machine["pillow_flavour"] == "pillow":
        return ": Pillow-SIMD resizes faster ('precache doctor' prints how to install it)"
    if stage == "decode":
        return ": for large photographs, --decode scaled decodes less"
    if stage == "encode":
        return ": --format shards does not encode"
    return ""


def _spread(estimate: stats.Estimate) -> tuple[str, str]:
    return f"{estimate.median:,.0f}", f"{estimate.low:,.0f}-{estimate.high:,.0f}"
