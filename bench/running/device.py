"""Where batches go and the trainer runs."""

import torch

from precache.errors import SettingError, check_choice


def choose_device(name: str) -> torch.device:
    """The device called `name`: `cpu`, `cuda`, or `auto`, the GPU where there is one.

    Raises:
        SettingError: unknown name, or a GPU is asked for that torch does not find.
    """
    check_choice("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("device 'cuda' asked for, but torch finds no GPU; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
