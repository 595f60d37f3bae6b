"""The tests that need a GPU: `python -m bench.evidence.gpu_tests TESTS SCRATCH RESULT --device cuda`."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

import click

import bench
from bench.evidence.programs import write_result
from precache.console import commandline
from precache.errors import SettingError, WorkerError

_ROOT = Path(bench.__file__).resolve().parent.parent
_PATH = click.Path(path_type=Path)
_FAILED_TESTS, _NONE_COLLECTED = 1, 5  # exit codes of pytest


@click.command(cls=commandline.Command)
@click.argument("tests")
@click.argument("scratch", type=_PATH)
@click.argument("result", type=_PATH)
@click.option("--device", default="cuda", show_default=True, help="For the description of the machine.")
def gpu_tests(tests: str, scratch: Path, result: Path, device: str) -> None:
    """Run what is marked `gpu` under TESTS, and write what passed to RESULT."""
    if not (_ROOT / tests).exists():
        raise SettingError(
            f"{_ROOT / tests}: no tests here; run 'bench evidence' from a checkout of the project"
        )
    report = scratch.resolve() / "junit.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", tests, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    if device == "cuda" and find_spec("xdist") is not None:
        command += ["-n", "4"]  # processes: more would share the GPU's memory without being faster
    code = subprocess.call([*command, f"--junitxml={report}"], cwd=_ROOT)
    if code not in (0, _FAILED_TESTS, _NONE_COLLECTED) or not report.exists():
        raise WorkerError(f"pytest ended with exit code {code}; what it printed stands above")
    write_result(result, device, **read_report(report))


def read_report(path: Path) -> dict[str, object]:
    """Of a JUnit XML file: how many tests passed, and those that failed or were skipped, with the reason."""
    passed = 0
    failed, skipped = {}, {}
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            failed[name] = " ".join((problem.get("message") or "").split())[:300]
        elif skip is not None:
            skipped[name] = skip.get("message") or ""
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


if __name__ == "__main__":
    gpu_tests()
