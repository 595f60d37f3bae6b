"""From trials to the rows of a result: rates, stages, batch times, and what they mean."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from bench.findings import changes, stats, verdict
from bench.findings.batch_times import analyse
from bench.findings.changes import Arm
from bench.findings.result import Row
from bench.peers.serving import LIMIT
from bench.trial.peer_arm import PeerArm, Work, work_of
from bench.trial.run import Trial
from bench.trial.stages import DECODING
from bench.trial.trainers import NullTrainer
from loaders.dataset import RAW, open_split

AnyArm: TypeAlias = Arm | PeerArm
_DECODERS = ("dali", "nvjpeg", *DECODING)


@dataclass(frozen=True, slots=True)
class Trials:
    """What was measured, repeat by repeat.

    Attributes:
        runs: by arm, None for the trainer alone, and trainer's name.
        cold: of the loader alone, its files dropped from the cache before.
        transfer: by trainer's name, whose dtype it has.
        stages: images/s of each stage that could be run apart, see `bench.trial.stages`.
        not_warmed: arms whose files were too large to be read into the page cache before.
        cached: whether the loaders served from a cache of decoded pictures.
    """

    runs: dict[tuple[AnyArm | None, str], list[Trial]] = field(default_factory=dict)
    cold: dict[Arm, list[Trial]] = field(default_factory=dict)
    transfer: dict[str, list[Trial]] = field(default_factory=dict)
    stages: dict[Arm, list[dict[str, float]]] = field(default_factory=dict)
    not_warmed: set[AnyArm] = field(default_factory=set)
    cached: bool = False

    def rates(self, arm: AnyArm | None, trainer: str) -> list[float]:
        """Images/s."""
        return [trial.images_per_s for trial in self.runs[arm, trainer]]

    def of(self, arm: Arm, trainer: str) -> verdict.Measured:
        """All about one pipeline."""
        with_trainer = (None, trainer) in self.runs
        apart = self.stages.get(arm)
        rates = self.rates
        return verdict.Measured(
            loader=stats.estimate(rates(arm, NullTrainer.name)),
            cold=_estimate(self.cold.get(arm)),
            trainer=_estimate(self.runs.get((None, trainer))),
            together=_estimate(self.runs[arm, trainer]) if with_trainer else None,
            ratio=stats.ratio(rates(arm, trainer), rates(None, trainer)) if with_trainer else None,
            transfer=_estimate(self.transfer.get(trainer)),
            read=stats.estimate([stages["read"] for stages in apart]) if apart else None,
            decode=stats.estimate([stages["decode"] for stages in apart]) if apart else None,
            does="decode" if arm.backend in _DECODERS and not self.cached else "collate",
            warmed=arm.backend == "synthetic" or self.cached or arm not in self.not_warmed,
        )


def _estimate(trials: Sequence[Trial] | None) -> stats.Estimate | None:
    return stats.estimate([trial.images_per_s for trial in trials]) if trials else None


def make_rows(
    arms: Sequence[AnyArm],
    trainer_names: Sequence[str],
    trials: Trials,
    batch_size: int,
    workers: int,
    augment: str = "eval",
) -> tuple[Row, ...]:
    """Ours trainer by trainer, then the peers."""
    works = {
        arm: arm.work if isinstance(arm, PeerArm) else work_of(arm.backend, arm.path, augment) for arm in arms
    }
    ours = [arm for arm in arms if isinstance(arm, Arm)]
    peers = [arm for arm in arms if isinstance(arm, PeerArm)]
    rows = []
    for name in trainer_names:
        measured = {arm: trials.of(arm, name) for arm in ours}
        for arm in ours:
            row = _with_stages(_row(arm, name, trials, works), measured[arm], batch_size)
            row = _with_batches(row, trials.runs[arm, name], workers)
            if arm.backend != "synthetic":
                known = changes.known(arm, measured, trials.stages, workers)
                row = replace(
                    row,
                    binds=verdict.binding(measured[arm]),
                    advice=verdict.advise(measured[arm], known, changes.samples(arm)),
                    changes=[asdict(change) for change in known],
                )
            rows.append(row)
    return (*rows, *(_row(arm, NullTrainer.name, trials, works) for arm in peers))


def _row(arm: AnyArm, trainer_name: str, trials: Trials, works: dict[AnyArm, Work | None]) -> Row:
    rates = trials.rates
    peer = isinstance(arm, PeerArm)
    alone = trials.runs[arm, NullTrainer.name]
    fed = trials.runs[arm, trainer_name]
    with_trainer = (None, trainer_name) in trials.runs
    batch_s = [seconds for trial in fed for seconds in trial.batch_s]
    gaps = [trial.batch_s[first] for trial in fed for first in trial.epoch_starts]
    alike = {
        other.name: stats.ratio(rates(arm, NullTrainer.name), rates(other, NullTrainer.name))
        for other, work in works.items()
        if isinstance(other, PeerArm) and other != arm and work == works[arm]
    }
    of_limit = alike.pop(LIMIT, None)
    same_folder = [o for o in works if isinstance(o, PeerArm) and o.name == LIMIT and o.path == arm.path]
    if of_limit is None and works[arm] is not None and not peer and same_folder:
        # of random crops: the limit copies centres
        of_limit = stats.ratio(rates(arm, NullTrainer.name), rates(same_folder[0], NullTrainer.name))
    return Row(
        backend=arm.name if isinstance(arm, PeerArm) else arm.backend,
        data=_describe(arm),
        trainer_name=trainer_name,
        loader=stats.estimate(rates(arm, NullTrainer.name)),
        trainer=stats.estimate(rates(None, trainer_name)) if with_trainer else None,
        together=None if peer else stats.estimate(rates(arm, trainer_name)),
        ratio=stats.ratio(rates(arm, trainer_name), rates(None, trainer_name)) if with_trainer else None,
        first_batch_s=stats.estimate([trial.first_batch_s for trial in alone]),
        batch_s_median=stats.percentile(batch_s, 0.5),
        batch_s_p95=stats.percentile(batch_s, 0.95),
        peer=peer,
        of_limit=of_limit,
        over={} if peer else alike,
        epoch_gap_s=max(gaps, default=None),
    )


def _with_stages(row: Row, measured: verdict.Measured, batch_size: int) -> Row:
    return replace(
        row,
        cold=measured.cold,
        stalls=verdict.stalls(measured, batch_size),
        stages=verdict.stage_rates(measured),
        predicted=measured.predicted,
    )


def _with_batches(row: Row, fed: Sequence[Trial], workers: int) -> Row:
    """Of a fed trainer; where there is none, waiting is all that happens."""
    if row.ratio is None:
        return row
    last = fed[-1]
    spikes = asdict(analyse(last.wait_s, last.step_s, last.epoch_starts, workers))
    watched = last.watched
    return replace(
        row,
        data_wait=stats.estimate([trial.wait_share for trial in fed]),
        utilisation=stats.Estimate(*(min(1.0, part) for part in asdict(row.ratio).values())),
        first_step_s=stats.estimate([trial.first_step_s for trial in fed]),
        wait_s=list(last.wait_s),
        step_s=list(last.step_s),
        epoch_starts=list(last.epoch_starts),
        spikes=_plain(spikes),
        monitor=_plain(
            {
                "time_s": watched["time_s"],
                **watched["series"],
                **{name: watched[name] for name in ("peak", "mean", "flags", "missing")},
            }
        ),
    )


def _plain(values: Any) -> Any:
    """As JSON gives it back: lists for tuples, and None for the infinite, which JSON does not have."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _describe(arm: AnyArm) -> str:
    """The kind of data, in words."""
    if isinstance(arm, PeerArm) and arm.writer is not None:
        return arm.writer
    kind = open_split(arm.path, "train").kind
    return kind if kind != RAW else "raw tree"
