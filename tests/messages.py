"""Write `tests/golden_messages.txt`: the help of each command, and the answers to typical mistakes.

`python -m tests.messages` writes that file again; look at its difference before it is committed.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

import loaders
from bench.cli import main as bench
from precache import Recipe, convert
from precache.cli.main import main as precache
from precache.errors import PrecacheError
from precache.example_data.sample_tree import make_sample
from tests.command import ROOT, run_here

GOLDEN = ROOT / "tests/golden_messages.txt"
COMMANDS = """
precache frobnicate
precache convert photos out
precache convert nowhere out --format shards
precache convert fotos out --format shards
precache convert empty out --format shards
precache convert flat out --format shards
precache convert notes.txt out --format shards
precache convert table.csv out --format shards
precache convert photos photos/out --format shards
precache convert photos flat --format shards
precache convert photos out --format sharks
precache convert photos out --format dali --splits a=2
precache convert photos shards --format shards --size 16
precache convert broken out --format shards --workers 0
precache convert photos out --format shards --update
precache verify shards photos
precache verify shards --root photos
precache convert photos out --format shards --splits 0.8
precache convert photos out --format shards --quality 50
precache verify shards --deep --across dali
precache verify damaged
precache inspect photos
precache inspect shards --html no/such/page.html
precache check shards
precache fetch imagenet
precache push photos s3://bucket/photos
precache export photos pictures
bench accuracy photos x=dalli:shards
bench convert photos --against fcv
bench loaders photos --device cpu --backend dalli
bench loaders photos --device cpu --backend shards
bench loaders photos --device cpu --cache ram --cold
bench profile photos --out out --device cpu --batch-size 71
bench recommend photos --gpus 0
bench report notes.txt
precache auto photos out
loaders.build("nowhere")
loaders.build("notes.txt")
loaders.build("shards", split="val")
loaders.build("shards", batch_size=0)
loaders.build("shards", num_workers=4)
loaders.build("shards", sampling=loaders.Sampling(classes=["cat"]))
loaders.build("shards", ranks=loaders.Ranks(rank=0, world_size=3, per_node=2))
""".strip().splitlines()


def help_commands() -> Iterator[str]:
    for program, group in (("precache", precache), ("bench", bench)):
        context = click.Context(group)
        yield f"{program} --help"
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            options = {option for parameter in command.params for option in parameter.opts}
            yield f"{program} {name} {'--help-all' if '--help-all' in options else '--help'}"


def answers() -> str:
    """Commands with their exit codes and their output, run in a folder that is made for them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        _fill(folder)
        parts = [_answer(command, folder) for command in [*help_commands(), *COMMANDS]]
    text = "\n".join(parts).replace(str(folder), "WORKING-FOLDER")
    return re.sub(r"[0-9.]+ [KMGT]iB are free|(?<=one per CPU )\([0-9]+\)", "...", text)  # of this machine


def _fill(folder: Path) -> None:
    make_sample(folder / "photos", images=20, classes=2, seed=1, like="caltech", workers=0)
    class_folder = next(path for path in (folder / "photos").iterdir() if path.is_dir())
    class_folder.rename(folder / "photos/0")
    for name in ("empty", "flat", "broken/cat"):
        (folder / name).mkdir(parents=True)
    (folder / "flat/picture.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "broken/cat/1.jpg").write_bytes(b"<html>")
    (folder / "notes.txt").write_text("mine")
    (folder / "table.csv").write_text("path,label\nnowhere.jpg,cat\n")
    recipe = Recipe(format="shards", size=32)
    for name in ("shards", "damaged"):
        convert(folder / "photos", folder / name, recipe, workers=0)
    shard = folder / "damaged/train-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def _answer(command: str, folder: Path) -> str:
    if command.startswith(("bench ", "precache ")):
        done = run_here(*shlex.split(command), cwd=folder)
        output, outcome = done.stdout + done.stderr, f"exit code {done.returncode}"
    else:
        output, outcome = _called(command, folder)
    return f"$ {command}\n{output.rstrip()}\n[{outcome}]\n"


def _called(expression: str, folder: Path) -> tuple[str, str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        eval(expression, {"loaders": loaders}).close()
        return "", "no error"
    except PrecacheError as error:
        return str(error), type(error).__name__
    finally:
        os.chdir(before)


if __name__ == "__main__":
    GOLDEN.write_text(answers())
