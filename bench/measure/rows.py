"""From trials to the rows of a result: rates, stages, batch times, and what they mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bench.measure import imagefolder
from bench.measure.candidates import Candidate
from bench.measure.peer_arm import PeerArm, Work, work_of
from bench.measure.stages import DECODING
from bench.measure.trainers import NullTrainer
from bench.measure.trial import Trial
from bench.peers.serving import LIMIT
from bench.report import changes, stats, verdict
from bench.report.batch_times import analyse
from bench.report.changes import Means, Pipeline
from bench.report.regression import Key
from bench.report.row import Advice, Batches, Rates, Row, Stages, Watched

AnyArm: TypeAlias = Candidate | PeerArm
_DECODERS = ("dali", "nvjpeg", imagefolder.NAME, *DECODING)


@dataclass(frozen=True, slots=True)
class Trials:
    """What was measured, repeat by repeat.

    Attributes:
        runs: by arm, None for the trainer alone, and trainer's name.
        cold: of the loader alone, its files dropped from the cache before.
        transfer: by trainer's name, whose dtype it has.
        stages: images/s of each stage that could be run apart, see `bench.measure.stages`.
        not_warmed: arms whose files were too large to be read into the page cache before.
        cached: whether the loaders served from a cache of decoded pictures.
    """

    runs: dict[tuple[AnyArm | None, str], list[Trial]] = field(default_factory=dict)
    cold: dict[AnyArm, list[Trial]] = field(default_factory=dict)
    transfer: dict[str, list[Trial]] = field(default_factory=dict)
    stages: dict[Candidate, list[dict[str, float]]] = field(default_factory=dict)
    not_warmed: set[AnyArm] = field(default_factory=set)
    cached: bool = False

    def rates(self, arm: AnyArm | None, trainer: str) -> list[float]:
        """Images/s."""
        return [trial.images_per_s for trial in self.runs[arm, trainer]]

    def of(self, arm: Candidate, trainer: str) -> verdict.Measured:
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


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes the row of one arm with one trainer, at once, from all that was measured.

    Attributes:
        arms: those of ours.
        works: of each arm, what serving costs; those that have it alike are compared.
    """

    trials: Trials
    arms: Sequence[Candidate]
    works: Mapping[AnyArm, Work | None]
    batch_size: int
    means: Means

    def ours(self, arm: Candidate, trainer: str) -> Row:
        """Of a backend of ours."""
        runs, measured = self.trials.runs[arm, trainer], self.measured(trainer)
        return Row(
            backend=arm.backend,
            data=arm.described,
            trainer_name=trainer,
            rates=self._rates(arm, measured[arm]),
            batches=self._batches(arm, trainer, measured[arm].ratio),
            stages=Stages(
                rates=verdict.stage_rates(measured[arm]),
                stalls=verdict.stalls(measured[arm], self.batch_size),
                predicted=measured[arm].predicted,
                binds=None if arm.backend == "synthetic" else verdict.binding(measured[arm]),
            ),
            advice=self._advice(arm, measured, runs[-1].watched),
            monitor=runs[-1].watched if measured[arm].ratio is not None else None,
            image_bytes=None if self.trials.cached else arm.image_bytes,  # a full cache reads nothing
        )

    def peer(self, arm: PeerArm) -> Row:
        """Of another library's loader, alone."""
        rates = self.trials.rates(arm, NullTrainer.name)
        return Row(
            backend=arm.name,
            data=arm.described,
            trainer_name=NullTrainer.name,
            peer=True,
            rates=Rates(
                loader=stats.estimate(rates),
                cold=_estimate(self.trials.cold.get(arm)),
                of_limit=self._alike(arm).get(LIMIT),
            ),
            batches=self._batches(arm, NullTrainer.name, None),
        )

    def measured(self, trainer: str) -> dict[Candidate, verdict.Measured]:
        """All pipelines with one trainer."""
        return {arm: self.trials.of(arm, trainer) for arm in self.arms}

    def _rates(self, arm: Candidate, measured: verdict.Measured) -> Rates:
        over = self._alike(arm)
        of_limit = over.pop(LIMIT, None)
        same_folder = [
            o for o in self.works if isinstance(o, PeerArm) and (o.name, o.path) == (LIMIT, arm.path)
        ]
        if of_limit is None and self.works[arm] is not None and same_folder:
            of_limit = self._ratio(arm, same_folder[0])  # of random crops: the limit copies centres
        return Rates(
            loader=measured.loader,
            cold=measured.cold,
            trainer=measured.trainer,
            together=measured.together or measured.loader,
            ratio=measured.ratio,
            of_limit=of_limit,
            over=over,
        )

    def _alike(self, arm: AnyArm) -> dict[str, stats.Estimate]:
        """Its rate over that of each peer that does the same work."""
        return {
            other.name: self._ratio(arm, other)
            for other, work in self.works.items()
            if isinstance(other, PeerArm) and other != arm and work == self.works[arm]
        }

    def _ratio(self, arm: AnyArm, other: AnyArm) -> stats.Estimate:
        rates = self.trials.rates
        return stats.ratio(rates(arm, NullTrainer.name), rates(other, NullTrainer.name))

    def _batches(self, arm: AnyArm, trainer: str, ratio: stats.Estimate | None) -> Batches:
        """Where no trainer was fed, waiting is all that happens: then there are no parts."""
        fed, alone = self.trials.runs[arm, trainer], self.trials.runs[arm, NullTrainer.name]
        batch_s = [seconds for trial in fed for seconds in trial.batch_s]
        gaps = [trial.batch_s[first] for trial in fed for first in trial.epoch_starts]
        whole = Batches(
            first_batch_s=stats.estimate([trial.first_batch_s for trial in alone]),
            batch_s_median=stats.percentile(batch_s, 0.5),
            batch_s_p95=stats.percentile(batch_s, 0.95),
            epoch_gap_s=max(gaps, default=None),
        )
        return whole if ratio is None else _with_parts(whole, fed, ratio, self.means.workers)

    def _advice(
        self, arm: Candidate, measured: Mapping[Candidate, verdict.Measured], watched: Watched | None
    ) -> Advice:
        if arm.backend == "synthetic":
            return Advice()
        pipelines = {other: self._pipeline(other, measured[other]) for other in self.arms}
        here = pipelines.pop(arm)
        means = replace(self.means, cpu_share=watched.mean.get("cpu_share") if watched else None)
        known = changes.known(here, list(pipelines.values()), means)
        return Advice(verdict.advise(measured[arm], known), tuple(known))

    def _pipeline(self, arm: Candidate, measured: verdict.Measured) -> Pipeline:
        return Pipeline(
            backend=arm.backend,
            folder=str(arm.path),
            kind=arm.data.kind,
            samples=len(arm.data.ids),
            file_bytes=arm.file_bytes,
            measured=measured,
            stages=self.trials.stages.get(arm, ()),
        )


def _with_parts(whole: Batches, fed: Sequence[Trial], ratio: stats.Estimate, workers: int) -> Batches:
    last = fed[-1]
    return replace(
        whole,
        first_step_s=stats.estimate([trial.first_step_s for trial in fed]),
        data_wait=stats.estimate([trial.wait_share for trial in fed]),
        utilisation=stats.Estimate(*(min(1.0, part) for part in (ratio.median, ratio.low, ratio.high))),
        wait_s=last.wait_s,
        step_s=last.step_s,
        epoch_starts=last.epoch_starts,
        spikes=analyse(last.wait_s, last.step_s, last.epoch_starts, workers),
    )


def make_rows(
    arms: Sequence[AnyArm],
    trainer_names: Sequence[str],
    trials: Trials,
    batch_size: int,
    means: Means,
    size: int,
    augment: str = "eval",
) -> tuple[Row, ...]:
    """Ours trainer by trainer, then the peers."""
    ours = [arm for arm in arms if isinstance(arm, Candidate)]
    works = {arm: work_of(arm, size, augment) if isinstance(arm, Candidate) else arm.work for arm in arms}
    maker = RowMaker(trials, ours, works, batch_size, means)
    rows = [maker.ours(arm, name) for name in trainer_names for arm in ours]
    return (*rows, *(maker.peer(arm) for arm in arms if isinstance(arm, PeerArm)))


def arm_names(arms: Sequence[AnyArm]) -> dict[str, Candidate]:
    """Ours by their names in a result, `shards on shards (2)`: see `bench.report.regression.Key`."""
    found: dict[str, Candidate] = {}
    for arm in arms:
        if isinstance(arm, Candidate):
            rank = 1
            while (name := Key(arm.backend, arm.described, "", rank).arm) in found:
                rank += 1
            found[name] = arm
    return found
