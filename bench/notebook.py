"""Run a notebook and save it with its outputs.

    python -m bench.notebook                      # bench/caltech256.ipynb, on the pictures in data/raw
    python -m bench.notebook --home elsewhere     # on those in elsewhere/data/raw

It runs in the folder `--home`, which has, or gets, the pictures. Where a cell fails, the notebook stays as it
was, and the exit code is 2.
"""

from pathlib import Path
from typing import Any

import click

from precache.console import commandline
from precache.errors import MissingDependencyError, SettingError, WorkerError
from precache.packages import install_extra
from precache.storage import atomic_write

NOTEBOOK = Path(__file__).with_name("caltech256.ipynb")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


@click.command(cls=commandline.Command)
@click.argument("notebook", type=click.Path(path_type=Path), default=NOTEBOOK)
@click.option(
    "--home", type=click.Path(path_type=Path), default=Path(), help="Folder to run in.  [default: .]"
)
def command(notebook: Path, home: Path) -> None:
    """Run every cell of NOTEBOOK (default bench/caltech256.ipynb) in --home, and save it with its outputs."""
    execute(notebook, home)
    click.echo(f"{notebook}: saved with its outputs")


def execute(path: Path, home: Path) -> None:
    """Run the notebook in the folder `home`, then write it anew.

    Raises:
        SettingError: no such notebook, or no such folder.
        MissingDependencyError: what runs notebooks is not installed.
        WorkerError: a cell failed.
    """
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError
        from traitlets.config import Config
    except ImportError as error:
        raise MissingDependencyError(
            f"running notebooks needs the extra notebook; run '{install_extra('notebook')}'"
        ) from error
    if not path.is_file():
        raise SettingError(f"{path}: there is no such notebook")
    if not home.is_dir():
        raise SettingError(f"home must be a folder that there is, got {home}")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=None,  # converting a large set takes hours
        kernel_name=_KERNEL["name"],
        resources={"metadata": {"path": str(home)}},
        coalesce_streams=True,
        # a socket of this user's, instead of a port that all users of the machine can reach
        config=Config(KernelManager={"transport": "ipc"}),
    )
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError) as error:
        raise WorkerError(f"{path}: {_failed(notebook, error)}; the notebook is as it was") from error
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of each cell
        if "outputs" in cell:  # stderr is progress, and warnings of libraries
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    with atomic_write(path) as file:
        file.write((nbformat.writes(notebook) + "\n").encode())


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
    command()
