"""A machine whose loaders give the rates that a test says: what follows from them is the same everywhere."""

from dataclasses import replace
from pathlib import Path

from bench.measure.recommend import Recommendation, train_images
from bench.measure.settings import Settings
from bench.report import forecast
from bench.report.forecast import AS_IT_IS, Inputs, Loaded, Profile
from bench.report.row import RAW_TREE, TODAY_BACKEND
from precache.conversion.shard_writer import predict_bytes
from precache.recipe import Recipe
from precache.sources.base import Scan

TRAINER = 2000.0


class Machine:
    """It keeps what it was asked.

    Attributes:
        rates: images/s of each loader, by format.
        after: those that are another once they are measured on the whole tree.
        turns: those that are another in each turn of the sample.
    """

    def __init__(self) -> None:
        self.rates = {
            TODAY_BACKEND: 250.0,
            RAW_TREE: 500.0,
            "shards": 8000.0,
            "webdataset": 1500.0,
            "dali": 1400.0,
        }
        self.after: dict[str, float] = {}
        self.turns: list[dict[str, float]] = []
        self.asked: list[tuple[str, ...]] = []
        self.first_epochs: set[bool] = set()
        self.other_cpu = 0.0

    def recommend(
        self,
        scan: Scan,
        recipe: Recipe,
        settings: Settings,
        *,
        formats: tuple[str, ...],
        pictures: int = 0,
        limit_s: float = 0.0,
        on_progress: object = None,
    ) -> Recommendation:
        """Instead of `bench.measure.recommend.recommend`."""
        self.asked.append(formats)
        inputs = Inputs(
            images=len(scan.samples),
            train_images=train_images(scan),
            cpus=2,
            gpus=1,
            trainer_images_per_s=TRAINER,
            disk_bytes_per_s=5e8,
            read_s=0.001,
            memory_bytes=16e9,
        )
        machine = {"cpu": "a CPU", "memory": "16 GiB", "accelerator": "none", "date": "2026-11-21"}
        written = {
            "source": scan.root.name, "stored_size": recipe.size, "quality": recipe.quality,
            "size": settings.size, "batch_size": settings.batch_size, "workers": 2, "augment": "train",
            "trainer": "emulated:2000", "repeats": 1, "sample_pictures": 16, "other_cpu": self.other_cpu,
        }  # fmt: skip
        profiles = self._profiles(scan, recipe, formats)
        return Recommendation(written, machine, inputs, profiles, forecast.predict(profiles, inputs), {})

    def serve(self, path: Path, name: str, settings: Settings, *, first_epoch: bool = True) -> Loaded:
        """Instead of `bench.measure.recommend.serve`."""
        self.first_epochs.add(first_epoch)
        rate = {**self.rates, **self.after}[name]
        return Loaded(rate, TRAINER, min(rate, TRAINER), 1e-6)

    def share(self) -> float:
        """Of the CPUs, as `bench.machine.monitor.OtherProcesses` says it."""
        return self.other_cpu

    def _profiles(self, scan: Scan, recipe: Recipe, formats: tuple[str, ...]) -> list[Profile]:
        def image_bytes(name: str) -> float:
            return predict_bytes(scan, replace(recipe, format=name)) / len(scan.samples)

        def run(rate: float) -> Loaded:
            return Loaded(rate, TRAINER, min(rate, TRAINER), 1e-6)

        return [
            Profile(
                name=name,
                image_bytes=1e4 if name in AS_IT_IS else image_bytes(name),
                runs=[run({**self.rates, **turn}[name]) for turn in self.turns or [{}]],
                cpus=2,
                startup_s=1.0,
                image_s=0.01,
            )
            for name in (*AS_IT_IS, *formats)
        ]
