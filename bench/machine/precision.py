"""In which precision a model computes, and which of them a device has."""

import torch

from precache.errors import SettingError, check_choice

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
AMP = ("auto", *DTYPES)
AMP_HELP = "Precision of a model: bf16, fp16, off, or auto: bf16 where a GPU has it, else fp16; off on a CPU."


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
