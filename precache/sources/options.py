"""Options of sources: which column holds what, how deep class folders lie, which samples are selected.

Each field of `SourceOptions` also lists the kinds of sources that take it, and its help on the command line.
"""

from dataclasses import Field, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from precache.dataset.columns import TARGETS
from precache.errors import SettingError, check_choice, check_range
from precache.recipe import flag_name
from precache.storage.urls import local_path

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".feather", ".arrow")
TREE, TARS = "a tree of class folders", "WebDataset tars"
TABLE, DATASET = "a table", "a dataset"
CONVERTED = "a converted dataset"
LISTS = ("fields", "classes", "without")
"""Options that are lists of names or paths."""
_WITH_COLUMNS = (TABLE, DATASET)
_WITH_COLUMNS_OR_PARTS = (TABLE, DATASET, TARS)


def is_table(path: Path) -> bool:
    """Return whether the file's name is that of a table which can be read."""
    return path.suffix.lower() in TABLE_SUFFIXES


class OptionNotTakenError(SettingError):
    """An option was given that a source of this kind does not take.

    Attributes:
        option: name of the option in `SourceOptions`.
        kind: name of such a source in messages.
        kinds: names of the sources that take the option.
    """

    def __init__(self, option: str, kind: str, kinds: tuple[str, ...]) -> None:
        takers = ", ".join(kinds)
        super().__init__(f"{flag_name(option)} is not for {kind}, only for {takers}", remedy="leave it out")
        self.args = (option, kind, kinds)  # the arguments that pickle makes the error from
        self.option, self.kind, self.kinds = option, kind, kinds


def _option(help_text: str, *kinds: str, default: Any = None) -> Any:
    """Make a field of `SourceOptions` with its help, and the kinds of sources that take it (none: all)."""
    return field(default=default, metadata={"help": help_text, "kinds": kinds})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Options of a source; each kind of source takes some of them and refuses the others.

    The help of each option is in its field, see `option_help`. A `separator` splits a text into the names of
    several classes, so `target` is `classes` then. `classes` selects samples that have any of these classes,
    and `ids` restricts them further. `without` names converted datasets, whose pictures `convert` leaves out.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    root: str | None = _option("Folder of the pictures of a table.  [default: that of the table]", TABLE)
    image: str | None = _option(
        "Column of the pictures, in a table or dataset; in tars their part of a sample, as input.jpg.",
        *_WITH_COLUMNS_OR_PARTS,
    )
    label: str | None = _option(
        "Column of the labels, in a table or dataset; in tars their part of a sample, or a key of its .json.",
        *_WITH_COLUMNS_OR_PARTS,
    )
    target: str | None = _option(
        f"Kind of label: {', '.join(TARGETS)}.  [default: as it looks]", *_WITH_COLUMNS_OR_PARTS
    )
    separator: str | None = _option(
        "Separator between the classes of a label that names several, as ';'.", *_WITH_COLUMNS_OR_PARTS
    )
    split: str | None = _option("Column of the names of splits, in a table or dataset.", *_WITH_COLUMNS)
    fields: tuple[str, ...] = _option(
        "Other columns to keep, as width,caption.", *_WITH_COLUMNS_OR_PARTS, default=()
    )
    class_depth: int | None = _option(
        "How deep class folders lie in a tree; 0 if there are no classes.  [default: 1]", TREE
    )
    classes: tuple[str, ...] = _option(
        "Take only samples of these classes of a converted dataset, as cat,dog.", CONVERTED, default=()
    )
    ids: str | None = _option(
        "File that names the samples to take from a converted dataset, one id or path per line. An id is a "
        "sample's number in messages and batches (batch.ids); a path is that in the source, as cat/1.jpg.",
        CONVERTED,
    )
    without: tuple[str, ...] = _option(
        "Converted dataset whose pictures are left out, by their paths; give it for each, or as A,B.",
        default=(),
    )

    def __post_init__(self) -> None:
        for name in LISTS:
            if isinstance(value := getattr(self, name), str | PathLike):
                raise SettingError(f"{name} must be a list, got {value!r}")
        object.__setattr__(self, "without", tuple(map(str, self.without)))
        for name, value in self.to_json().items():
            texts = value if isinstance(value, list) else [value]
            if name != "class_depth" and not all(isinstance(text, str) for text in texts):
                raise SettingError(f"{name} must be text, got {value!r:.99}")
        if self.root is not None:
            object.__setattr__(self, "root", str(local_path(self.root)))  # it raises SettingError for a URL
        object.__setattr__(self, "without", tuple(str(local_path(path)) for path in self.without))
        if self.target is not None:
            check_choice("target", self.target, TARGETS)
        if self.class_depth is not None:
            object.__setattr__(self, "class_depth", check_range("class_depth", self.class_depth, 0))
        if self.separator == "":
            raise SettingError("separator must be one character or more, got ''")

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from the default as JSON values, which `from_json` takes."""
        values = {}
        for name in _fields():
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
            if value is not None and not (isinstance(value, list) and not value):
                values[name] = value
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SourceOptions":
        """Make the options from what `to_json` returned; SettingError for an unknown name."""
        lists = {name: tuple(values.get(name, ())) for name in LISTS}
        if unknown := sorted(set(values) - set(_fields())):
            raise SettingError(
                f"unknown option of a source {unknown[0]!r}; choose from: {', '.join(_fields())}"
            )
        return cls(**{**values, **lists})

    def check_kind(self, kind: str) -> None:
        """Raise OptionNotTakenError if an option is given that a source of this kind does not take."""
        for name in self.to_json():
            kinds = _fields()[name].metadata["kinds"]
            if kinds and kind not in kinds:
                raise OptionNotTakenError(name, kind, kinds)


def _fields() -> "dict[str, Field[Any]]":
    return {setting.name: setting for setting in fields(SourceOptions)}


def option_help() -> dict[str, str]:
    """Return the help on the command line for each option, by its name."""
    return {name: setting.metadata["help"] for name, setting in _fields().items()}
