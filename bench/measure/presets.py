"""Accelerators whose rate is published, to be emulated.

h100        7,158 images/s: ResNet-50 in MLPerf Training v4.0, with MXNet of NGC 24.04. An eighth of what the
            logs of eight tell as throughput: https://github.com/mlcommons/training_results_v4.0,
            NVIDIA/results/eos_ngc24.04_mxnet/resnet. v3.0 gave 7,006
h200        7,941 images/s: the same there, h200_ngc24.04_mxnet
a100        2,470 images/s: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5,
            training with mixed precision on one A100
h100-vit-s  7,716 images/s: the benchmarks of NVIDIA-BioNeMo's nvSubquadratic, ViT-S, one H100, compiled
mlperf-storage-h100, mlperf-storage-a100
            400 samples in 0.224 s and in 0.435 s: the sleep by which MLPerf Storage stands for ResNet-50, not
            the rate of its training: https://github.com/mlcommons/storage, configs/dlio/workload
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """How many images/s an accelerator trains on, and who says so, with which software."""

    images_per_s: float
    source: str


PRESETS = {
    "h100": Preset(7158, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "h200": Preset(7941, "ResNet-50, MLPerf Training v4.0, MXNet"),
    "a100": Preset(2470, "ResNet-50, NVIDIA DeepLearningExamples, PyTorch, AMP"),
    "h100-vit-s": Preset(7716, "ViT-S, NVIDIA-BioNeMo nvSubquadratic, compiled"),
    "mlperf-storage-h100": Preset(400 / 0.224, "ResNet-50, the sleep of MLPerf Storage"),
    "mlperf-storage-a100": Preset(400 / 0.435, "ResNet-50, the sleep of MLPerf Storage"),
}
DEFAULT_PRESET = "h100"
# \b keeps click from filling the lines
EPILOG = "\n".join(
    [
        "\b",
        "Emulated accelerators, images/s; x8 behind a name or a rate is 8 of them:",
        *(
            f"  {f'emulated:{name}':29}{preset.images_per_s:6,.0f}  {preset.source}"
            for name, preset in PRESETS.items()
        ),
        "PyTorch without MXNet's tuning is slower: --trainer-rate takes the images/s of your own training.",
    ]
)
"""For the help of commands that take a trainer."""
