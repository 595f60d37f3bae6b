"""Result of `bench loaders --ranks N`: images/s of all ranks together, and which is the slowest. Pure.

The `key` of a trial is {"kind", "backend", "data", "trainer", "ranks", "rank", "repeat"}.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import stats
from bench.report.result import Result, Row, Trial, name_data
from bench.report.sentences import describe_trainer, name_loader
from bench.report.stats import NEGLIGIBLE_SHARE, Estimate
from bench.report.words import machine_line
from precache.reporting import quantity

ALONE, OWN_PACE, IN_STEP = "one rank alone", "own pace", "in step"
"""Kinds of trials, `key["kind"]`."""


def make_result(
    machine: Mapping[str, str],
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    skipped: Mapping[str, str],
) -> Result:
    """Make the result from trials of ranks.

    Args:
        settings: settings that all trials share; `ranks`, and `data` as in `bench.report.loaders`.
        trials: one for each rank, repeat and kind.
        skipped: loaders that could not be measured, and why.
    """
    loaders: list[tuple[str, str]] = []
    for trial in trials:
        loader = (trial.key["backend"], trial.key["data"])
        if loader not in loaders:
            loaders.append(loader)
    rows: list[Row] = []
    paragraphs = []
    for backend, data in loaders:
        own = [trial for trial in trials if (trial.key["backend"], trial.key["data"]) == (backend, data)]
        made, sentences = _make_rows(backend, name_data(data, settings), own, settings["ranks"])
        rows += made
        paragraphs.append(tuple(sentences))
    was_warm = all(trial.numbers["page_cache_is_warm"] for trial in trials)
    workers = settings["workers"]
    conditions = [
        machine_line(machine),
        f"data: {', '.join(settings['data'])}",
        f"trainer {describe_trainer(settings['trainers'][0], settings['launches'])}, batch "
        f"{settings['batch_size']} of {settings['size']}x{settings['size']} a rank, augment "
        f"{settings['augment']}, "
        f"{'the CPUs shared out' if workers is None else quantity(workers, 'worker') + ' each'}, page cache "
        f"{'warm' if was_warm else 'not warmed: larger than memory'}, medians of "
        f"{quantity(settings['repeats'], 'run')}, taking turns",
    ]
    return Result(
        command="loaders",
        question="Is the loader fast enough for several ranks?",
        machine=dict(machine),
        settings=dict(settings),
        trials=tuple(trials),
        rows=tuple(rows),
        thing="ranks",
        columns=("fed_images_per_s", "wait_share", "own_images_per_s", "others_wait_share", "speedup"),
        answer=tuple(paragraphs),
        bars="fed_images_per_s",
        conditions=tuple(f"{sentence}." for sentence in conditions),
        skipped=dict(skipped),
    )


def _make_rows(backend: str, data: str, trials: Sequence[Trial], ranks: int) -> tuple[list[Row], list[str]]:
    """Make the rows of one rank alone, of all in step, and of each rank, and the sentences about them."""

    def rates(kind: str, rank: int, name: str = "images_per_s") -> list[float]:
        own = [trial for trial in trials if trial.key["kind"] == kind and trial.key["rank"] == rank]
        return [trial.numbers[name] for trial in sorted(own, key=lambda trial: trial.key["repeat"])]

    loader = name_loader(backend, data)
    key = {"backend": backend, "data": data, "trainer": trials[0].key["trainer"]}
    alone = rates(ALONE, 0)
    totals = [sum(repeat) for repeat in zip(*(rates(IN_STEP, rank) for rank in range(ranks)), strict=True)]
    waits = [
        max(repeat)
        for repeat in zip(*(rates(IN_STEP, rank, "wait_share") for rank in range(ranks)), strict=True)
    ]
    speedup = stats.ratio(totals, alone)
    rows = [
        Row(
            name=f"{loader}, one rank alone",
            key={**key, "ranks": 1},
            values={
                "fed_images_per_s": stats.estimate(alone),
                "wait_share": stats.estimate(rates(ALONE, 0, "wait_share")),
            },
            baseline=True,
        ),
        Row(
            name=f"{loader}, {ranks} ranks in step",
            key={**key, "ranks": ranks},
            values={
                "fed_images_per_s": stats.estimate(totals),
                "wait_share": stats.estimate(waits),
                "speedup": speedup,
            },
        ),
    ]
    own_paces = [stats.estimate(rates(OWN_PACE, rank)) for rank in range(ranks)]
    for rank in range(ranks):
        in_step = rates(IN_STEP, rank)
        rows.append(
            Row(
                name=f"{loader}, rank {rank} of {ranks}",
                key={**key, "ranks": ranks, "rank": rank},
                values={
                    "fed_images_per_s": stats.estimate(in_step),
                    "own_images_per_s": own_paces[rank],
                    "wait_share": stats.estimate(rates(IN_STEP, rank, "wait_share")),
                    "others_wait_share": _lost_share(in_step, rates(OWN_PACE, rank)),
                },
            )
        )
    sentences = [
        f"{loader}: {ranks} ranks in step train {stats.estimate(totals).median:,.0f} images/s, "
        f"{speedup:.2f} times one rank alone ({stats.estimate(alone).median:,.0f})."
    ]
    if ranks > 1:
        slowest = min(range(ranks), key=lambda rank: own_paces[rank].median)
        fastest = max(pace.median for pace in own_paces)
        is_distinct = own_paces[slowest].median <= (1 - NEGLIGIBLE_SHARE) * fastest and all(
            own_paces[slowest].high < pace.low for rank, pace in enumerate(own_paces) if rank != slowest
        )
        noise = "" if is_distinct else "; that is within noise"
        sentences.append(
            f"The slowest is rank {slowest}: at its own pace {own_paces[slowest].median:,.0f} images/s, the "
            f"fastest {fastest:,.0f}{noise}."
        )
    return rows, sentences


def _lost_share(in_step: Sequence[float], own_pace: Sequence[float]) -> Estimate:
    """Share of its own pace, 0 to 1, that a rank loses by keeping step."""
    return stats.estimate([max(0.0, 1 - step / own) for step, own in zip(in_step, own_pace, strict=True)])
