"""Facts of the machine: `python -m bench.evidence.facts DEVICE RESULT`."""

import subprocess
from pathlib import Path

import click
import torch

from bench.evidence.programs import failure, write_result
from precache.checks import doctor
from precache.console import commandline

_ASKED = (
    *("name", "driver_version", "vbios_version", "memory.total", "power.limit", "clocks.max.sm"),
    *("pcie.link.gen.max", "pcie.link.width.max", "persistence_mode", "mig.mode.current", "temperature.gpu"),
)


@click.command(cls=commandline.Command)
@click.argument("device")
@click.argument("result", type=click.Path(path_type=Path))
def facts(device: str, result: Path) -> None:
    """Write what DEVICE and this installation are to RESULT."""
    found = [(finding.subject, finding.found) for finding in doctor.examine()]
    if device == "cuda":
        found += [*_torch_facts(), *_driver_facts()]
    for subject, text in found:
        print(f"{subject}: {text}")
    write_result(result, device, facts=found)


def _torch_facts() -> list[tuple[str, str]]:
    properties = torch.cuda.get_device_properties(0)
    return [
        ("GPUs", str(torch.cuda.device_count())),
        ("compute capability", f"{properties.major}.{properties.minor}"),
        ("multiprocessors", str(properties.multi_processor_count)),
        ("device memory", f"{properties.total_memory / 2**30:.0f} GiB"),
        ("bfloat16 in hardware", str(torch.cuda.is_bf16_supported(including_emulation=False))),
    ]


def _driver_facts() -> list[tuple[str, str]]:
    query = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [("nvidia-smi", failure(error))]
    values = answer.splitlines()[0].split(",") if answer.strip() else []
    return [(name, value.strip()) for name, value in zip(_ASKED, values, strict=False)]


if __name__ == "__main__":
    facts()
