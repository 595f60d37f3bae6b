"""Which device computes, and in which precision."""

import torch

from precache.errors import SettingError, check_choice

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
AMP = ("auto", *DTYPES)
AMP_HELP = "Precision of a model: bf16, fp16, off, or auto: bf16 where a GPU has it, else fp16; off on a CPU."
WARMUP = {"cpu": 4, "cuda": 20}
WARMUP_HELP = f"Batches before the timed ones.  [default: {WARMUP['cpu']}; on a GPU {WARMUP['cuda']}]"


def choose_device(name: str) -> torch.device:
    """The device called `name`: `cpu`, `cuda`, or `auto`, the GPU where there is one.

    Raises:
        SettingError: unknown name, or a GPU is asked for that torch does not find.
    """
    check_choice("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("device 'cuda' asked for, but torch finds no GPU; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_warmup(warmup: int | None, device: torch.device) -> int:
    """`warmup`, by default as many batches as it takes until a step takes as long as the next.

    cuDNN tunes, and torch.compile compiles, in a first step that is not counted among these. After it a
    GPU's clock still rises and its allocator and its queue still fill, over a second of steps of ResNet-50.
    """
    return WARMUP[device.type] if warmup is None else warmup


def resolve_amp(amp: str, device: torch.device) -> str:
    """In which precision a model computes on `device`: `bf16`, `fp16`, or `off` for float32.

    `auto` is bf16 on GPUs that have it, fp16 on others, and off on a CPU.

    Raises:
        SettingError: unknown name, or the GPU does not have it.
    """
    check_choice("amp", amp, AMP)
    if device.type != "cuda":
        return "off" if amp == "auto" else amp
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, it is slower than float32
    if amp == "bf16" and not has_bf16:
        raise SettingError(f"amp 'bf16' is only emulated on {torch.cuda.get_device_name(device)}; use 'fp16'")
    return amp if amp != "auto" else "bf16" if has_bf16 else "fp16"
