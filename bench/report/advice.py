"""Advice on a change of a watched script, in words: which argument to give to whom. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.report.change import Change
from bench.report.waiting import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Library that makes the DataLoader itself, and takes arguments for it.

    Attributes:
        title: name of the library in sentences.
        taker: what takes the arguments, in sentences.
        names: the library's name of an argument by torch's name; others cannot be given.
    """

    title: str
    taker: str
    names: Mapping[str, str]


# arguments that a library calls as torch does
_SAME = {name: name for name in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")}
FRAMEWORKS = {
    "transformers": Framework(
        title="the Trainer of transformers",
        taker="TrainingArguments(...), or as --options to a script that parses them",
        names={name: f"dataloader_{name}" for name in _SAME},
    ),
    "timm": Framework(
        title="timm", taker="create_loader(...), or to timm's train.py as its --workers", names=_SAME
    ),
    "fastai": Framework(title="fastai", taker="the call that makes the DataLoaders", names=_SAME),
    "ultralytics": Framework(
        title="Ultralytics", taker="train(...), or to the command yolo", names={"num_workers": "workers"}
    ),
}
"""Known libraries by the name of their package."""


def advise(stream: Stream, change: Change) -> tuple[str, ...]:
    """Write lines on a change of a stream's loader; empty where its library does not take the argument."""
    library = framework_of(stream)
    names = _SAME if library is None else library.names
    given = [f"{names[name]}={value}" for name, value in change.arguments.items() if name in names]
    if not given:
        return ()
    if library is None:
        taker = f"the DataLoader made at {stream.info['where']}" if stream.info["where"] else "the DataLoader"
        lines = [f"Give {', '.join(given)} to {taker}."]
    else:
        lines = [f"Give {', '.join(given)} to {library.taker}."]
        lines.append(f"{library.title} makes the DataLoader, called at {stream.info['where']}.")
    if stream.remade and "persistent_workers" in change.arguments:
        lines.append("Make it once, before the first epoch: a new one each epoch starts its workers anew.")
    if change.arguments.get("num_workers") and stream.workers == 0 and stream.info["start"] != "fork":
        lines.append(
            f"Workers are started by {stream.info['start']}, so what the script runs has to be below "
            f"`if __name__ == '__main__':`."
        )
    return tuple(lines)


def framework_of(stream: Stream) -> Framework | None:
    """Library that makes the DataLoader of a stream; None: the script itself does."""
    libraries = stream.info["libraries"]
    if not libraries:
        return None
    name = libraries[0]
    return FRAMEWORKS.get(name) or Framework(title=name, taker=name, names=_SAME)
