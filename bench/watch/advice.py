"""What to write into a watched script: from the record of its loader and the script's own text.

It reads the script, and changes nothing. An advice is lines to change, options to give or commands to run;
where the script has no such line, it is a sentence. `replacements` are those of a dataset or a loader.
"""

import ast
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.watch.script import DATALOADER, Changes, Edit, Script, argument, function_name, is_open
from precache.packages import pillow_install_command
from precache.pictures.sizes import Size
from precache.recipe import Recipe

Record = Mapping[str, Any]
"""Record of a loader, see `bench.watch.describe`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change of a script.

    Attributes:
        name: of the change.
        commands: to run first, in a shell.
        options: to add to the command line of the script.
        edits: lines of the script.
        says: sentences: what stays as it was, what does not, and where to write what has no line.
        root: of the pictures that are served.
        size: that they are served in.
        recipe: how they are to be converted; None: they are not.
        pictures: that the commands convert; 0: none.
    """

    name: str
    commands: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    says: tuple[str, ...] = ()
    root: str = ""
    size: Size = 0
    recipe: Recipe | None = None
    pictures: int = 0

    @property
    def keeps_loader(self) -> bool:
        """Whether it changes the dataset, and the script's DataLoader stays."""
        return self.name.startswith("ImageDataset")

    def lines(self, folder: str) -> list[str]:
        """Text of it; paths below `folder` are relative to it."""
        found = [f"$ {command}" for command in self.commands]
        if self.options:
            found.append(f"Add to the script's command line: {' '.join(self.options)}")
        for edit in self.edits:
            found.append(f"{_below(edit.path, folder)}:{edit.line}")
            found += [f"- {line}" for line in edit.old]
            found += [f"+ {line}" for line in edit.new]
        return [*found, *self.says]


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Where a library that makes the DataLoader takes its arguments.

    Attributes:
        title: of it.
        function: the call that takes them ends so; "": the line of the script that calls the library.
        names: torch's name -> its own; what is not in it cannot be given.
        command: of the library, that takes NAME=VALUE in a shell.
    """

    title: str
    function: str
    names: Mapping[str, str]
    command: str = ""


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


def put_simd(source: Record) -> Advice:
    """Put Pillow-SIMD into the place of Pillow, in the Python of the script."""
    command = pillow_install_command("pillow-simd")
    if "python" in source:
        command = command.replace(shlex.quote(sys.executable), shlex.quote(source["python"]))
    return Advice(name="pillow-simd", commands=(command,))


def set_arguments(source: Record, values: Mapping[str, Any], *, remade: bool = False) -> Advice | None:
    """Advise to make the loader with these arguments of torch's DataLoader; None: its library takes none.

    Args:
        remade: whether the script makes the loader anew in each epoch.
    """
    name, made = next(iter(values)), source["made"]
    texts = {key: repr(value) for key, value in values.items()}
    says = []
    if values.get("num_workers") and source["start"] != "fork" and not source["guarded"]:
        says.append(
            f"Put what the script runs below `if __name__ == '__main__':` first, for workers are started by "
            f"{source['start']}."
        )
    try:
        if source["libraries"]:
            return _of_framework(name, source, texts, says)
        script = read_script(made)
        call = script.find_call(made) if script else None
        if script is not None and call is not None and is_open(call):
            return _of_call(name, source, script, call, texts, says, remade)
    except SyntaxError:  # of what a change would make of the script
        pass
    where = f"made at {made['path']}:{made['line']}" if made else "of the script"
    given = ", ".join(f"{key}={text}" for key, text in texts.items())
    return Advice(name=name, says=(*says, f"Give {given} to the DataLoader {where}."))


def _of_call(
    name: str,
    source: Record,
    script: Script,
    call: ast.Call,
    texts: dict[str, str],
    says: list[str],
    remade: bool,
) -> Advice:
    """The script's own call of the DataLoader, moved before a loop where its workers are to go on."""
    loop = None
    if "persistent_workers" in texts and (remade or script.is_repeated(call)):
        loop = script.loop_to_leave(call)
        if loop is None:
            says.append(
                f"The DataLoader is made anew in each epoch ({os.path.basename(script.path)}:{call.lineno}), "
                f"and so its workers start anew: make it once."
            )
            texts = {key: text for key, text in texts.items() if key != "persistent_workers"}
    options, left = _split_options(script, source, call, texts, DATALOADER)
    if "persistent_workers" in left and "num_workers" not in left:
        left["persistent_workers"] = _where_there_are(argument(call, "num_workers", DATALOADER))
    changes = Changes(script)
    changes.set_arguments(call, left, DATALOADER)
    if loop is not None:
        changes.move_before(loop, call, script.free_name())
    return Advice(name=name, options=options, edits=changes.edits(), says=tuple(says))


def _where_there_are(workers: ast.expr | None) -> str:
    """The text of `persistent_workers` beside a number of workers that stays; torch refuses it beside 0."""
    if workers is None or isinstance(workers, ast.Constant):
        return "True"
    return f"{ast.unparse(workers)} > 0"


def _of_framework(name: str, source: Record, texts: Mapping[str, str], says: list[str]) -> Advice | None:
    """Where a library makes the DataLoader: its own argument, or the option that gives it."""
    library, made = source["libraries"][0], source["made"]
    framework = FRAMEWORKS.get(library) or Framework(title=library, function="", names=_SAME)
    own = {framework.names[key]: text for key, text in texts.items() if key in framework.names}
    if not own:
        return None
    script = read_script(made)
    scripts = [] if script is None else [script, *_scripts_beside(source, script)]
    if framework.command and made and os.path.basename(made["path"]) == framework.command:
        options = tuple(f"{key}={text}" for key, text in own.items())
        return Advice(name=name, options=options, says=tuple(says))
    if library == "transformers" and any("HfArgumentParser" in one.text for one in scripts):
        return Advice(name=name, options=tuple(f"--{key} {text}" for key, text in own.items()))
    for one in scripts:
        call = _call_of_framework(one, made, framework, library in FRAMEWORKS)
        if call is not None:
            options, left = _split_options(one, source, call, own, ())
            changes = Changes(one)
            changes.set_arguments(call, left, ())
            return Advice(name=name, options=options, edits=changes.edits(), says=tuple(says))
    given = ", ".join(f"{key}={text}" for key, text in own.items())
    where = f", called at {made['path']}:{made['line']}" if made else ""
    to = f"{framework.function}(...)" if framework.function else framework.title
    says.append(f"Give {given} to {to}: {framework.title} makes the DataLoader{where}.")
    return Advice(name=name, says=tuple(says))


def _call_of_framework(script: Script, made: Record, framework: Framework, is_known: bool) -> Any:
    """The call that takes the arguments of the DataLoader; None: it is not known, or one of several."""
    at_place = script.find_call(made) if script.path == made["path"] else None
    if at_place is not None and not is_known:  # any function may be the one, if it takes workers now
        return at_place if argument(at_place, "num_workers", ()) is not None else None
    if at_place is not None and function_name(at_place).endswith(framework.function):
        return at_place
    calls = [call for call in script.calls if function_name(call).endswith(framework.function)]
    return calls[0] if framework.function and len(calls) == 1 else None


def _split_options(
    script: Script, source: Record, call: Any, texts: Mapping[str, str], positions: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Options of the command line for those arguments that come from there, and the others."""
    options, left = [], {}
    scripts = [script, *_scripts_beside(source, script)]
    for name, text in texts.items():
        value = argument(call, name, positions) or script.unpacked_value(call, name)
        known = [option for one in scripts if (option := one.option_for(value))]
        if known and text not in ("True", "False"):
            options.append(f"{known[0]} {text}")
        else:
            left[name] = text
    return tuple(options), left


def _scripts_beside(source: Record, script: Script) -> list[Script]:
    """The script that was started, where the line is of another file; modules beside it that it imports."""
    found = []
    main = read_script({"path": source["main"]})
    if main is not None and main.path != script.path:
        found.append(main)
    start = main or script
    folder = os.path.dirname(start.path)
    for name in sorted(start.imported_names()):
        module = read_script({"path": os.path.join(folder, f"{name}.py")})
        if module is not None and module.path not in (script.path, start.path):
            found.append(module)
    return found


def read_script(made: Record | None) -> Script | None:
    """The script with this line; None where there is none that can be read."""
    if not made or not made["path"] or not Path(made["path"]).is_file():
        return None
    try:
        return Script(made["path"])
    except (OSError, SyntaxError, ValueError):
        return None


def _below(path: str, folder: str) -> str:
    below = os.path.relpath(path, folder)
    return path if below.startswith(os.pardir) else below
