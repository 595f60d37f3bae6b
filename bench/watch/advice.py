"""Advice on a watched script: where to write which argument of the DataLoader.

It follows from the record of the loader (`bench.watch.describe`) and the text of the script, which is read
and never changed. An advice has lines to change, options to add to the command line or commands to run; where
the script has no such line, it has a sentence. `bench.watch.replacements` advises other datasets and loaders.
"""

import ast
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.watch.script import DATALOADER, Changes, Edit, Script, argument, function_name, has_plain_positions
from precache.packages import pillow_install_command
from precache.pictures.sizes import Size
from precache.recipe import Recipe

Record = Mapping[str, Any]
"""Record of a loader, or a part of one, see `bench.watch.describe`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Change of a script, as text to paste.

    Attributes:
        name: name of the change.
        commands: shell commands to run first.
        options: options to add to the command line of the script.
        edits: changed lines of the script.
        notes: sentences on what stays the same, what does not, and where to write what has no line.
        root: root folder of the pictures that are served.
        size: size that they are served in.
        recipe: recipe that they are converted with; None: they are not converted.
        pictures: number of pictures that the commands convert.
    """

    name: str
    commands: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    notes: tuple[str, ...] = ()
    root: str = ""
    size: Size = 0
    recipe: Recipe | None = None
    pictures: int = 0

    @property
    def keeps_loader(self) -> bool:
        """Whether the script's DataLoader stays, and only its dataset changes."""
        return self.name.startswith("ImageDataset")

    def lines(self, folder: str) -> list[str]:
        """Write the advice as lines; paths below `folder` are relative to it."""
        lines = [f"$ {command}" for command in self.commands]
        if self.options:
            lines.append(f"Add to the script's command line: {' '.join(self.options)}")
        for edit in self.edits:
            lines.append(f"{_relative_path(edit.path, folder)}:{edit.line}")
            lines += [f"- {line}" for line in edit.old]
            lines += [f"+ {line}" for line in edit.new]
        return [*lines, *self.notes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Library that makes the DataLoader itself, and the call that takes arguments for it.

    Attributes:
        title: name of the library in sentences.
        function: end of the name of the function that takes the arguments; "": the function that the script
            calls at the recorded line.
        names: the library's name of an argument by torch's name; others cannot be given.
        command: shell command of the library that takes NAME=VALUE; "" where there is none.
    """

    title: str
    function: str
    names: Mapping[str, str]
    command: str = ""


# arguments that a library calls as torch does
_SAME = {name: name for name in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")}
FRAMEWORKS = {
    "transformers": Framework(
        title="the Trainer of transformers",
        function="TrainingArguments",
        names={name: f"dataloader_{name}" for name in _SAME},
    ),
    "timm": Framework(title="timm", function="create_loader", names=_SAME),
    "fastai": Framework(title="fastai", function="", names=_SAME),
    "ultralytics": Framework(
        title="Ultralytics", function="train", names={"num_workers": "workers"}, command="yolo"
    ),
}
"""Known libraries by the name of their package."""


def put_simd(record: Record) -> Advice:
    """Advise to install Pillow-SIMD instead of Pillow, for the Python of the script."""
    command = pillow_install_command("pillow-simd")
    if "python" in record:
        command = command.replace(shlex.quote(sys.executable), shlex.quote(record["python"]))
    return Advice(name="pillow-simd", commands=(command,))


def set_arguments(record: Record, values: Mapping[str, Any], *, remade: bool = False) -> Advice | None:
    """Advise to give arguments to torch's DataLoader.

    Args:
        record: record of the loader.
        values: arguments by torch's names.
        remade: whether the script makes a new loader in each epoch.

    Returns:
        The advice; None where a library makes the DataLoader and takes none of these arguments.
    """
    name = next(iter(values))  # the first argument names the change
    made = record["made"]
    texts = {key: repr(value) for key, value in values.items()}
    notes = []
    if values.get("num_workers") and record["start"] != "fork" and not record["guarded"]:
        notes.append(
            f"Put what the script runs below `if __name__ == '__main__':` first, for workers are started by "
            f"{record['start']}."
        )
    try:
        if record["libraries"]:
            return _advise_framework(name, record, texts, notes)
        script = read_script(made)
        call = script.find_call(made) if script else None
        if script is not None and call is not None and has_plain_positions(call):
            return _advise_call(name, record, script, call, texts, notes, remade)
    except SyntaxError:  # the changed script could not be parsed
        pass
    where = f"made at {made['path']}:{made['line']}" if made else "of the script"
    given = ", ".join(f"{key}={text}" for key, text in texts.items())
    return Advice(name=name, notes=(*notes, f"Give {given} to the DataLoader {where}."))


def _advise_call(
    name: str,
    record: Record,
    script: Script,
    call: ast.Call,
    texts: dict[str, str],
    notes: list[str],
    remade: bool,
) -> Advice:
    """Advise to change the script's own call of the DataLoader, and to move it out of a loop.

    It has to leave the loop where workers are to persist from epoch to epoch.
    """
    loop = None
    if "persistent_workers" in texts and (remade or script.is_repeated(call)):
        loop = script.loop_to_leave(call)
        if loop is None:
            notes.append(
                f"The DataLoader is made anew in each epoch ({os.path.basename(script.path)}:{call.lineno}), "
                f"and so its workers start anew: make it once."
            )
            texts = {key: text for key, text in texts.items() if key != "persistent_workers"}
    options, remaining = _split_options(script, record, call, texts, DATALOADER)
    if "persistent_workers" in remaining and "num_workers" not in remaining:
        remaining["persistent_workers"] = _persistence_text(argument(call, "num_workers", DATALOADER))
    changes = Changes(script)
    changes.set_arguments(call, remaining, DATALOADER)
    if loop is not None:
        changes.move_before(loop, call, script.free_name())
    return Advice(name=name, options=options, edits=changes.edits(), notes=tuple(notes))


def _persistence_text(workers: ast.expr | None) -> str:
    """Text of the value of `persistent_workers`, which torch refuses where there are 0 workers.

    Args:
        workers: the script's expression for the number of workers.
    """
    if workers is None or isinstance(workers, ast.Constant):
        return "True"
    return f"{ast.unparse(workers)} > 0"


def _advise_framework(name: str, record: Record, texts: Mapping[str, str], notes: list[str]) -> Advice | None:
    """Advise to give arguments to the library that makes the DataLoader, by a call or an option."""
    library, made = record["libraries"][0], record["made"]
    framework = FRAMEWORKS.get(library) or Framework(title=library, function="", names=_SAME)
    own = {framework.names[key]: text for key, text in texts.items() if key in framework.names}
    if not own:
        return None
    script = read_script(made)
    scripts = [] if script is None else [script, *_scripts_beside(record, script)]
    if framework.command and made and os.path.basename(made["path"]) == framework.command:
        options = tuple(f"{key}={text}" for key, text in own.items())
        return Advice(name=name, options=options, notes=tuple(notes))
    if library == "transformers" and any("HfArgumentParser" in candidate.text for candidate in scripts):
        return Advice(name=name, options=tuple(f"--{key} {text}" for key, text in own.items()))
    for candidate in scripts:
        call = _find_framework_call(candidate, made, framework, library in FRAMEWORKS)
        if call is not None:
            options, remaining = _split_options(candidate, record, call, own, ())
            changes = Changes(candidate)
            changes.set_arguments(call, remaining, ())
            return Advice(name=name, options=options, edits=changes.edits(), notes=tuple(notes))
    given = ", ".join(f"{key}={text}" for key, text in own.items())
    where = f", called at {made['path']}:{made['line']}" if made else ""
    recipient = f"{framework.function}(...)" if framework.function else framework.title
    notes.append(f"Give {given} to {recipient}: {framework.title} makes the DataLoader{where}.")
    return Advice(name=name, notes=tuple(notes))


def _find_framework_call(script: Script, made: Record, framework: Framework, is_known: bool) -> Any:
    """Find the call that takes the arguments of the DataLoader; None: it is not known, or one of several."""
    call = script.find_call(made) if script.path == made["path"] else None
    if call is not None and not is_known:  # a function that takes workers today takes other arguments, too
        return call if argument(call, "num_workers", ()) is not None else None
    if call is not None and function_name(call).endswith(framework.function):
        return call
    calls = [call for call in script.calls if function_name(call).endswith(framework.function)]
    return calls[0] if framework.function and len(calls) == 1 else None


def _split_options(
    script: Script, record: Record, call: Any, texts: Mapping[str, str], positions: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Split arguments into options of the command line, where they come from there, and the others."""
    options, remaining = [], {}
    scripts = [script, *_scripts_beside(record, script)]
    for name, text in texts.items():
        value = argument(call, name, positions) or script.unpacked_value(call, name)
        known = [option for candidate in scripts if (option := candidate.option_for(value))]
        if known and text not in ("True", "False"):
            options.append(f"{known[0]} {text}")
        else:
            remaining[name] = text
    return tuple(options), remaining


def _scripts_beside(record: Record, script: Script) -> list[Script]:
    """Scripts that may also set the argument: the script that was started, and modules that it imports."""
    scripts = []
    main = read_script({"path": record["main"]})
    if main is not None and main.path != script.path:
        scripts.append(main)
    start = main or script
    folder = os.path.dirname(start.path)
    for name in sorted(start.imported_names()):
        module = read_script({"path": os.path.join(folder, f"{name}.py")})
        if module is not None and module.path not in (script.path, start.path):
            scripts.append(module)
    return scripts


def read_script(position: Record | None) -> Script | None:
    """Read the script that a position is in; None where it cannot be read."""
    if not position or not position["path"] or not Path(position["path"]).is_file():
        return None
    try:
        return Script(position["path"])
    except (OSError, SyntaxError, ValueError):
        return None


def _relative_path(path: str, folder: str) -> str:
    """Path relative to a folder, if it is below the folder."""
    relative = os.path.relpath(path, folder)
    return path if relative.startswith(os.pardir) else relative
