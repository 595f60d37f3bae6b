"""A result of `bench convert` as text, for a terminal and for Markdown."""

from bench.findings import stats
from bench.findings.words import counted
from bench.machine.hardware import versions_of
from bench.trial.conversion import OURS, ConversionResult, Whole
from precache.recipe import Recipe


def text(result: ConversionResult) -> str:
    """The result for a terminal, and for Markdown."""
    settings, ours = result.settings, result.wholes[0]
    workers = settings["workers"]
    total_s = sum(1 / stage.median for stage in result.stages.values())
    lines = ["| stage | images/s per CPU | share of the time |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {_spread(stage)} | {1 / stage.median / total_s:.0%} |"
        for name, stage in result.stages.items()
    ]
    lines += ["", "| whole conversion | images/s | precache is |", "| --- | --- | --- |"]
    lines += [_whole_line(whole) for whole in result.wholes]
    stage, share = result.costliest
    rate = ours.images_per_s.median
    lines += [
        "",
        f"The conversion reaches {rate:,.0f} images/s, start-up included. That is "
        f"{rate / result.decode_limit:.0%} of what {counted(workers, 'CPU')} that only decode would reach "
        f"({result.decode_limit:,.0f}), and {rate / result.stages_limit:.0%} of what they would reach with "
        f"all stages and nothing else ({result.stages_limit:,.0f}). "
        f"{stage.capitalize()} takes {share:.0%} of the stages' time{_advice(stage, result.machine)}. "
        f"All processes together used {result.peak_bytes / 2**20:,.0f} MiB of memory at most.",
        "",
        f"{_conditions(result)}.",
    ]
    return "\n".join(lines)


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


def _whole_line(whole: Whole) -> str:
    ratio = f"{whole.ratio.median:.2f}x ({whole.ratio.low:.2f} to {whole.ratio.high:.2f})"
    return f"| {whole.name} | {_spread(whole.images_per_s)} | {'' if whole.name == OURS else ratio} |"


def _advice(stage: str, machine: dict[str, str]) -> str:
    if stage == "resize" and machine["pillow_flavour"] == "pillow":
        return ": Pillow-SIMD resizes faster ('precache doctor' prints how to install it)"
    if stage == "decode":
        return ": for large photographs, --decode scaled decodes less"
    if stage == "encode":
        return ": --format shards does not encode"
    return ""


def _spread(estimate: stats.Estimate) -> str:
    return f"{estimate.median:,.0f} ({estimate.low:,.0f} to {estimate.high:,.0f})"
