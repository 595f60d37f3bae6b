"""Accelerators whose rate is published, to be emulated.

mlperf-h100     400 samples in 0.224 s: batch size and computation_time of the ResNet-50 workload of MLPerf
mlperf-a100     Storage, 400 in 0.435 s: https://github.com/mlcommons/storage, configs/dlio/workload
a100-resnet50   2,470 images/s: NVIDIA DeepLearningExamples, PyTorch, Classification/ConvNets/resnet50v1.5,
                training with mixed precision on one A100
h100-vit-s      7,716 images/s: the benchmarks of NVIDIA-BioNeMo's nvSubquadratic, ViT-S, one H100, compiled
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """How many images/s an accelerator trains on, and who says so."""

    images_per_s: float
    source: str


PRESETS = {
    "mlperf-h100": Preset(400 / 0.224, "MLPerf Storage, ResNet-50, one H100"),
    "mlperf-a100": Preset(400 / 0.435, "MLPerf Storage, ResNet-50, one A100"),
    "a100-resnet50": Preset(2470, "NVIDIA DeepLearningExamples, AMP, one A100"),
    "h100-vit-s": Preset(7716, "NVIDIA-BioNeMo nvSubquadratic, compiled, one H100"),
}
# \b keeps click from filling the lines
EPILOG = "\n".join(
    [
        "\b",
        "Emulated accelerators, images/s; x8 behind a name or a rate is 8 of them:",
        *(
            f"  {f'emulated:{name}':23}{preset.images_per_s:6,.0f}  {preset.source}"
            for name, preset in PRESETS.items()
        ),
    ]
)
"""For the help of commands that take a trainer."""
