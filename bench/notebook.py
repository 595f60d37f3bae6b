"""Run a notebook and save it with its outputs.

    python -m bench.notebook                      # bench/caltech256.ipynb, on the pictures in data/raw
    python -m bench.notebook --home elsewhere     # on those in elsewhere/data/raw

It runs in the folder `--home`, which has, or gets, the pictures. Where a cell fails, the notebook stays as it
was, and the exit code is 2.
"""

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from precache.cli import commandline
from precache.errors import MissingDependencyError, SettingError, WorkerError
from precache.packages import install_extra
from precache.storage import atomic_write

NOTEBOOK = Path(__file__).with_name("caltech256.ipynb")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


@click.command(cls=commandline.Command)
@click.argument("notebook", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=NOTEBOOK)
@click.option(
    "--home", type=click.Path(exists=True, file_okay=False), default=".", help="To run in.  [default: .]"
)
def command(notebook: Path, home: str) -> None:
    """Run every cell of NOTEBOOK (default bench/caltech256.ipynb) in --home, and save it with its outputs."""
    execute(notebook, home)
    click.echo(f"{notebook}: saved with its outputs")


def execute(path: Path, home: str) -> None:
    """Run the notebook in the folder `home`, then write it anew.

    Raises:
        SettingError: no notebook.
        MissingDependencyError: what runs notebooks is not installed.
        WorkerError: a cell failed.
    """
    try:
        import ipykernel  # noqa: F401  # what runs the cells
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError
    except ImportError as error:
        raise MissingDependencyError(
            f"running notebooks needs the extra notebook; run '{install_extra('notebook')}'"
        ) from error
    try:
        notebook = nbformat.read(path, as_version=4)
    except ValueError as error:
        raise SettingError(f"{path}: is not a notebook ({str(error).splitlines()[0]})") from error
    client = NotebookClient(
        notebook,
        on_notebook_start=_handlers_kept(),
        timeout=None,  # converting a large set takes hours
        kernel_name=_KERNEL["name"],
        resources={"metadata": {"path": home}},
        coalesce_streams=True,
    )
    try:
        client.execute(stderr=subprocess.DEVNULL)  # what a kernel logs; that of cells is in their outputs
    except (CellExecutionError, DeadKernelError) as error:
        raise WorkerError(f"{path}: {_failed(notebook, error)}; the notebook is as it was") from error
    _clean(notebook)
    with atomic_write(path) as file:
        file.write((nbformat.writes(notebook) + "\n").encode())


def _handlers_kept() -> Callable[..., None]:
    """What brings today's handlers of signals back, in the place of nbclient's.

    Those end the kernel at once, and call that an error. It ends with this process, too.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def bring_back(**_: object) -> None:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # else it tells of the cell that was cut off
        loop = asyncio.get_running_loop()
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    return bring_back


def _clean(notebook: Any) -> None:
    """Leave out what is of this run alone: times, versions, progress and warnings on stderr."""
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def _failed(notebook: Any, error: Exception) -> str:
    """Which cell failed and why, on one line; of a command, what it said last."""
    for number, cell in enumerate(notebook.cells):
        outputs = cell.get("outputs", ())
        if any(output.output_type == "error" for output in outputs):
            said = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
            last = "".join(said).strip().splitlines()[-1:] if "%%bash" in cell.source else []
            reason = last[0] if last else f"{getattr(error, 'ename', '')}: {getattr(error, 'evalue', error)}"
            return f"cell {number} failed: {reason}"
    return str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(commandline.run(command, "bench.notebook"))
