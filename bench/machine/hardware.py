"""What machine this is, and in which precision its device computes."""

import platform
from datetime import date
from importlib import metadata
from pathlib import Path

import psutil
import torch

from precache.engines import available_cpus
from precache.errors import SettingError, check_choice
from precache.packages import DALI
from precache.pictures.kinds import decoder_versions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
AMP = ("auto", *DTYPES)
AMP_HELP = "Precision of a model: bf16, fp16, off, or auto: bf16 where a GPU has it, else fp16; off on a CPU."
WARMUP = {"cpu": 4, "cuda": 20}
WARMUP_HELP = f"Batches before the timed ones.  [default: {WARMUP['cpu']}; on a GPU {WARMUP['cuda']}]"
_PACKAGES = ("torch", "torchvision", "numpy", "webdataset", *DALI)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Machine, versions and date, as text: they go with every figure."""
    return {
        "date": date.today().isoformat(),
        "cpu": f"{_cpu_model()}, {available_cpus()} CPUs",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        **(_gpu_versions() if device.type == "cuda" else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if _installed(name)},
        **decoder_versions(),
    }


def _gpu_versions() -> dict[str, str]:
    """Versions of what runs on the GPU; one that cannot be read is left out."""
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    cudnn = f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else None  # of 92600: 9.26.0
    driver = Path("/sys/module/nvidia/version")
    has_nccl = torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]
    found = {
        "driver": driver.read_text().strip() if driver.exists() else None,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }
    return {name: version for name, version in found.items() if version is not None}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def choose_warmup(warmup: int | None, device: torch.device) -> int:
    """`warmup`, by default as many batches as it takes until a step takes as long as the next.

    cuDNN tunes, and torch.compile compiles, in a first step that is not counted among these. After it a
    GPU's clock still rises and its allocator and its queue still fill, over a second of steps of ResNet-50.
    """
    return WARMUP[device.type] if warmup is None else warmup


def resolve_amp(amp: str, device: torch.device) -> str:
    """Precision in which a model computes on `device`: `bf16`, `fp16`, or `off` for float32.

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
