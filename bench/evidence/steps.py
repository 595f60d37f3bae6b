"""The steps of `bench evidence`, as data: what each answers, the program that measures it, its time limit.

A program is a list of arguments for Python. Names in braces are filled in from the `Scale` and from where
things lie, see `arguments`; one that becomes empty is left out.
"""

import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report.choice import stored_size

LONGEST_S = 480
"""No step may take longer: machines are often lent for ten minutes at a time."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure.

    Attributes:
        name: of its result file and its log.
        answers: the question that it answers, in plain words.
        limit_s: after so many seconds it is killed; three times what is planned for an H200 with 16 cores.
        program: arguments for Python. It writes JSON with the key "machine" to {result}, and exits with 0.
    """

    name: str
    answers: str
    limit_s: int
    program: tuple[str, ...]

    @property
    def planned_s(self) -> float:
        """With less time left it is not begun."""
        return self.limit_s / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        device: where batches go and the trainer runs.
        photos, photo: how many photographs, and their mean size in pixels.
        mixed: pictures of the tree in which each kind is (PNG, grey, CMYK, turned).
        stored: of `precache convert --size`, pixels.
        size: side of the square that is served, pixels.
        batch_size, batches, warmup, repeats: of each trial of `bench loaders`.
        resnet50, vit: names of trainers.
        amp: of the trainer.
        compile: the option of `bench loaders`, or nothing.
        workers: that `bench sweep` tries.
        tests: where pytest looks for tests marked `gpu`.
        batch_small: samples of a batch of the races and of the memory over epochs.
        epochs: over which memory is watched.
        hardware_s, hardware_repeats: of each measurement of `bench hardware`.
    """

    device: str
    photos: int
    photo: str
    mixed: int
    stored: int
    size: int
    batch_size: int
    batches: int
    warmup: int
    repeats: int
    resnet50: str
    vit: str
    amp: str
    compile: str
    workers: str
    tests: str
    batch_small: int
    epochs: int
    hardware_s: float
    hardware_repeats: int


FULL = Scale(
    device="cuda",
    photos=5120,  # 20 batches of 256
    photo="500x400",
    mixed=512,
    stored=stored_size(224),
    size=224,
    batch_size=256,
    batches=40,
    warmup=20,  # cuDNN tunes, torch compiles
    repeats=2,
    resnet50="resnet50",
    vit="vit_s_16",
    amp="auto",  # bfloat16 where the GPU has it
    compile="--compile",
    workers="1,2,4,8,16",
    tests="tests",
    batch_small=32,
    epochs=20,
    hardware_s=0.5,
    hardware_repeats=3,
)

SMOKE = Scale(
    device="cpu",
    photos=64,
    photo="50x40",
    mixed=64,
    stored=stored_size(32),
    size=32,
    batch_size=8,
    batches=3,
    warmup=1,
    repeats=1,
    resnet50="emulated:2000",
    vit="emulated:4000",
    amp="",
    compile="",
    workers="1",
    tests="tests/loaders/test_transfer.py",
    batch_small=16,
    epochs=3,
    hardware_s=0.01,
    hardware_repeats=1,
)


def _loaders(trainer: str, folder: str, backends: str, *more: str) -> tuple[str, ...]:
    timing = ("--batches", "{batches}", "--warmup", "{warmup}", "--repeats", "{repeats}")
    shape = ("--batch-size={batch_size}", "--size={size}", "--device={device}", "--amp={amp}")
    what = ("{data}/" + folder, "--backend", backends, "--trainer", trainer)
    return ("-m", "bench", "loaders", *what, *shape, *timing, *more, "--quiet", "--json", "{result}")


_COMPILE = "{compile}"

PREPARE = Step(
    "pictures",
    "the pictures to measure on, generated on all cores",
    300,
    (
        *("-m", "bench.evidence.pictures", "{data}", "--photos={photos}", "--mean={photo}"),
        *("--mixed={mixed}", "--stored={stored}", "--json", "{result}"),
    ),
)
"""Runs before the others; what is there already it leaves as it is."""

STEPS = (
    Step("facts", "Which machine is this?", 60, ("-m", "bench.evidence.facts", "{device}", "{result}")),
    Step(
        "resnet50",
        "Does ResNet-50 wait for decoded shards?",
        240,
        _loaders("{resnet50}", "shards", "shards,synthetic"),
    ),
    Step(
        "races",
        "Does every loader serve the same pictures while the training stream is stalled?",
        300,
        (
            *("-m", "bench.evidence.races", "{data}", "{result}", "--device={device}"),
            *("--batch-size={batch_small}", "--size={size}"),
        ),
    ),
    Step(
        "tests",
        "Do the tests that need a GPU pass?",
        300,
        ("-m", "bench.evidence.gpu_tests", "{tests}", "{scratch}", "{result}", "--device={device}"),
    ),
    Step(
        "resnet50-device",
        "Does ResNet-50 wait for pictures that are kept on the device?",
        180,
        _loaders("{resnet50}", "squares", "shards", "--cache", "device"),
    ),
    Step(
        "photos",
        "Does ResNet-50 wait for photographs of 500x400 that are decoded as it goes?",
        300,
        _loaders("{resnet50}", "photos", "dali,nvjpeg,pytorch"),
    ),
    Step(
        "stored",
        "Does ResNet-50 wait for JPEGs as `precache convert` stores them?",
        300,
        _loaders("{resnet50}", "webdataset", "dali,nvjpeg,webdataset"),
    ),
    Step(
        "compiled",
        "Does the compiled ResNet-50 wait for decoded shards?",
        360,
        _loaders("{resnet50}", "shards", "shards,synthetic", _COMPILE),
    ),
    Step(
        "compiled-device",
        "Does the compiled ResNet-50 wait for pictures that are kept on the device?",
        240,
        _loaders("{resnet50}", "squares", "shards", _COMPILE, "--cache", "device"),
    ),
    Step(
        "compiled-photos",
        "Does the compiled ResNet-50 wait for photographs of 500x400?",
        300,
        _loaders("{resnet50}", "photos", "dali,nvjpeg", _COMPILE),
    ),
    Step(
        "vit",
        "Does ViT-S/16 wait for decoded shards?",
        240,
        _loaders("{vit}", "shards", "shards,synthetic"),
    ),
    Step(
        "vit-device",
        "Does ViT-S/16 wait for pictures that are kept on the device?",
        180,
        _loaders("{vit}", "squares", "shards", "--cache", "device"),
    ),
    Step(
        "vit-photos",
        "Does ViT-S/16 wait for photographs of 500x400 that are decoded as it goes?",
        300,
        _loaders("{vit}", "photos", "dali,nvjpeg,pytorch"),
    ),
    Step(
        "hardware",
        "What do memory, disk, bus and GPU give?",
        150,
        (
            *("-m", "bench", "hardware", "--data", "{data}/photos", "--scratch", "{data}"),
            *("--seconds={hardware_s}", "--repeats={hardware_repeats}", "--json", "{result}"),
        ),
    ),
    Step(
        "memory",
        "Does the memory stay flat over epochs?",
        180,
        (
            *("-m", "bench.evidence.memory", "{data}", "{result}", "--device={device}"),
            *("--batch-size={batch_small}", "--size={size}", "--epochs={epochs}"),
        ),
    ),
    Step(
        "workers",
        "How many threads or processes must decode?",
        300,
        (
            *("-m", "bench.evidence.workers", "{data}", "{scratch}", "{result}", "--device={device}"),
            *("--trainer={resnet50}", "--workers={workers}", "--batch-size={batch_size}"),
            *("--size={size}", "--batches={batches}", "--warmup={warmup}", "--amp={amp}", "--pin=on"),
        ),
    ),
    Step(
        "resnet50-ram",
        "Does ResNet-50 wait for pictures that are kept in main memory?",
        180,
        _loaders("{resnet50}", "shards", "shards", "--cache", "ram"),
    ),
)


def arguments(step: Step, scale: Scale, places: Mapping[str, Path]) -> list[str]:
    """The program of `step` with everything filled in; `places` has data, result and scratch."""
    values = {**asdict(scale), **{name: str(path) for name, path in places.items()}}
    filled = []
    for word in step.program:
        names = [name for _, name, _, _ in string.Formatter().parse(word) if name]
        if not names or all(values[name] != "" for name in names):
            filled.append(word.format(**values))
    return filled
