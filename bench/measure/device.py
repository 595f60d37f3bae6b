"""Where batches go and the trainer runs."""

import torch

from precache.errors import SettingError, check_choice

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
