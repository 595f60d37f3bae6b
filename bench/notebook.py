"""Run a notebook and save it with its outputs.

    python -m bench.notebook                      # bench/caltech256.ipynb, on the pictures in data/raw
    python -m bench.notebook --home elsewhere     # on those in elsewhere/data/raw

It runs in the folder `--home`, which has, or gets, the pictures. Where a cell fails, the notebook stays as it
was, and the exit code is 2.
"""

import subprocess
import sys
from pathlib import Path

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
    try:
        import ipykernel  # noqa: F401  # what runs the cells
        import nbclient
        import nbformat
        from nbclient.exceptions import CellExecutionError, DeadKernelError
    except ImportError as error:
        raise MissingDependencyError(
            f"running notebooks needs the extra notebook; run '{install_extra('notebook')}'"
        ) from error
    try:
        content = nbformat.read(notebook, as_version=4)
    except ValueError as error:
        raise SettingError(f"{notebook}: is not a notebook ({str(error).splitlines()[0]})") from error
    client = nbclient.NotebookClient(
        content,
        timeout=None,  # converting a large set takes hours
        kernel_name=_KERNEL["name"],
        resources={"metadata": {"path": home}},
        coalesce_streams=True,
    )
    try:
        client.execute(stderr=subprocess.DEVNULL)  # what a kernel logs; that of cells is in their outputs
    except (CellExecutionError, DeadKernelError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise WorkerError(f"{notebook}: a cell failed: {reason}; the notebook is as it was") from error
    # left out is what is of this run alone: times, versions, progress and warnings on stderr
    content.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in content.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    with atomic_write(notebook) as file:
        file.write((nbformat.writes(content) + "\n").encode())
    click.echo(f"{notebook}: saved with its outputs")


if __name__ == "__main__":
    sys.exit(commandline.run(command, "bench.notebook"))
