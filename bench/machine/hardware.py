"""Description of this machine's hardware, and the precision in which its device computes."""

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
_PACKAGES = ("torch", "torchvision", "numpy", "timm", *DALI)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return machine, versions and date as text, by name; they are printed with every figure."""
    return {
        "date": date.today().isoformat(),
        "cpu": f"{_cpu_model()}, {available_cpus()} CPUs",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        **(_gpu_versions() if device.type == "cuda" else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if is_installed(name)},
        **decoder_versions(),
    }


def _gpu_versions() -> dict[str, str]:
    """Return the versions of driver, CUDA, cuDNN and NCCL; one that cannot be read is left out."""
    versions = {}
    driver = Path("/sys/module/nvidia/version")
    if driver.exists():
        versions["driver"] = driver.read_text().strip()
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if cudnn:  # 92600 is 9.26.0
        versions["cudnn"] = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if nccl:
            versions["nccl"] = ".".join(map(str, nccl))
    return versions


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def is_installed(package: str) -> bool:
    """Whether a package is installed, by its name on PyPI."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def choose_warmup(warmup: int | None, device: torch.device) -> int:
    """Return `warmup`, or where it is None the number of batches after which steps take an even time.

    cuDNN tunes, and torch.compile compiles, in a first step that is not counted among these. After it a
    GPU's clock still rises and its allocator and its queue still fill, over a second of steps of ResNet-50.
    """
    return WARMUP[device.type] if warmup is None else warmup


def resolve_amp(amp: str, device: torch.device) -> str:
    """Return the precision in which a model computes on `device`: `bf16`, `fp16`, or `off` for float32.

    `auto` is bf16 on GPUs that have it, fp16 on others, and off on a CPU.

    Raises:
        SettingError: unknown name, or the GPU does not have that precision.
    """
    check_choice("amp", amp, AMP)
    if device.type != "cuda":
        return "off" if amp == "auto" else amp
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, it is slower than float32
    if amp == "bf16" and not has_bf16:
        raise SettingError(
            f"amp 'bf16' is only emulated on {torch.cuda.get_device_name(device)}", remedy="use 'fp16'"
        )
    if amp != "auto":
        return amp
    return "bf16" if has_bf16 else "fp16"
