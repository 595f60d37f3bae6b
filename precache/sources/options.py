"""What a user says about a source: which column is what, how deep classes lie, what is taken, and the like.

The fields of `SourceOptions` say which sources take which option, and what the command line says of it.
"""

from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from precache.dataset.columns import TARGETS
from precache.errors import SettingError, check_choice, check_range
from precache.recipe import flag_name
from precache.storage.urls import locate

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
TREE, CLASS_FOLDERS = "a tree of class folders", "class folders in an archive"
ARCHIVE, TARS = "an archive", "WebDataset tars"
TABLE, CONVERTED = "a table", "a converted dataset"
DATASET = "a dataset"
_COLUMNS = (TABLE, DATASET)
_PARTS = (TABLE, DATASET, TARS, ARCHIVE)


def is_table(path: Path) -> bool:
    """Whether the file's name is that of a table which is read here."""
    return path.suffix.lower() in TABLE_SUFFIXES


class OptionNotTakenError(SettingError):
    """An option was given that a source of this kind does not take.

    Attributes:
        option: its name in `SourceOptions`.
        kind: what messages call such a source.
        kinds: those that take it, called the same way.
    """

    def __init__(self, option: str, kind: str, kinds: tuple[str, ...]) -> None:
        listed = ", ".join(kinds)
        super().__init__(f"{flag_name(option)} is not for {kind}, only for {listed}", remedy="leave it out")
        self.args = (option, kind, kinds)  # what pickle makes the error from
        self.option, self.kind, self.kinds = option, kind, kinds


def _option(help_text: str, *kinds: str, default: Any = None) -> Any:
    """A field of SourceOptions, with its help; `kinds` of sources take it, or all."""
    return field(default=default, metadata={"help": help_text, "kinds": kinds})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Options of a source; each kind of source takes some of them and refuses the others. See `option_help`.

    A `separator` is between the classes of one text, so `target` is `classes`. A sample of several classes is
    taken for any of `classes`; with `ids`, both must hold. Boxes are `[k, 4]`, in pixels of the picture.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    root: str | None = _option("Folder of the pictures of a table.  [default: that of the table]", TABLE)
    image: str | None = _option(
        "Column of the pictures, in a table or dataset; in tars their part of a sample, as input.jpg.",
        *_PARTS,
    )
    label: str | None = _option(
        "Column of the labels, in a table or dataset; in tars their part of a sample, or a key of its .json.",
        *_PARTS,
    )
    target: str | None = _option(f"Kind of label: {', '.join(TARGETS)}.  [default: as it looks]", *_PARTS)
    separator: str | None = _option(
        "Separator between the classes of a label that names several, as ';'.", *_PARTS
    )
    split: str | None = _option("Column of the names of splits, in a table or dataset.", *_COLUMNS)
    fields: tuple[str, ...] = _option("Other columns to keep, as width,caption.", *_PARTS, default=())
    class_depth: int | None = _option(
        "How deep class folders lie in a tree; 0 if there are no classes.  [default: 1]",
        TREE,
        CLASS_FOLDERS,
        ARCHIVE,
    )
    mask: str | None = _option(
        "Folder of masks, with MASKS/cat/1.png for the picture cat/1.jpg; or the column of them in a table."
    )
    boxes: str | None = _option("Column of boxes, as [[left, top, right, bottom], ...].")
    classes: tuple[str, ...] = _option(
        "Take only samples of these classes of a converted dataset, as cat,dog.", CONVERTED, default=()
    )
    ids: str | None = _option(
        "File that names the samples to take from a converted dataset, one id or path per line. An id is a "
        "sample's number in messages and batches (batch.ids); a path is that in the source, as cat/1.jpg.",
        CONVERTED,
    )

    def __post_init__(self) -> None:
        for name in ("fields", "classes"):
            if isinstance(value := getattr(self, name), str):
                raise SettingError(f"{name} must be a list of names, got {value!r}")
        for name, value in self.given().items():
            texts = value if isinstance(value, list) else [value]
            if name != "class_depth" and not all(isinstance(text, str) for text in texts):
                raise SettingError(f"{name} must be text, got {value!r:.99}")
        for path in filter(None, (self.root, self.mask)):
            locate(path)  # raises
        if self.target is not None:
            check_choice("target", self.target, TARGETS)
        if self.class_depth is not None:
            object.__setattr__(self, "class_depth", check_range("class_depth", self.class_depth, 0))
        if self.separator == "":
            raise SettingError("separator must be one character or more, got ''")

    def given(self) -> dict[str, Any]:
        """Those that are not the default, as plain JSON values; `SourceOptions.from_json` takes them."""
        values = {name: getattr(self, name) for name in _fields()}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value not in (None, [])}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "SourceOptions":
        """What `given` gave; SettingError for anything else."""
        lists = {name: tuple(given.get(name, ())) for name in ("fields", "classes")}
        if unknown := sorted(set(given) - set(_fields())):
            raise SettingError(
                f"unknown option of a source {unknown[0]!r}; choose from: {', '.join(_fields())}"
            )
        return cls(**{**given, **lists})

    def only(self, kind: str) -> None:
        """Raise OptionNotTakenError where one is given that a source of this kind does not take."""
        for name in self.given():
            kinds = _fields()[name].metadata["kinds"]
            if kinds and kind not in kinds:
                raise OptionNotTakenError(name, kind, kinds)


def _fields() -> "dict[str, Field[Any]]":
    return {setting.name: setting for setting in fields(SourceOptions)}


def option_help() -> dict[str, str]:
    """What the command line says of each option, by its name."""
    return {name: setting.metadata["help"] for name, setting in _fields().items()}
