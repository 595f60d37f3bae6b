"""What a user says about a source: which column is what, how deep classes lie, and the like."""

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from precache.dataset.targets import TARGETS
from precache.errors import SettingError, check_choice, check_range
from precache.storage.urls import locate

LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
"""What the column of the labels is called more often than not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Options of a source; each kind of source takes some of them, and refuses the others.

    Attributes:
        root: folder that the paths in a table are relative to; default that of the table.
        image: column of the pictures' paths, or key of the pictures of a dataset.
        label: column or key of what they are labelled with.
        target: one of TARGETS: what the label is. Default: what its values say.
        separator: between the classes of one text, where `target` is `classes`.
        split: column or key of their split.
        fields: columns or keys of what else is to be kept.
        class_depth: how many folders deep the classes of a tree lie; 0: a flat folder without classes.
        mask: folder of the pictures' masks, under the same paths but for the extension; or the column of a
            table that has their paths.
        boxes: which of the fields are boxes, `[k, 4]`: left, top, right and bottom in pixels of the picture.
        where: what of a converted dataset is taken: `label in (cat, dog)`, or `id in FILE`.

    Raises:
        SettingError: a value is out of range or unknown.
    """

    root: str | None = None
    image: str | None = None
    label: str | None = None
    target: str | None = None
    separator: str | None = None
    split: str | None = None
    fields: tuple[str, ...] = ()
    class_depth: int | None = None
    where: str | None = None
    mask: str | None = None
    boxes: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            texts = value if name == "fields" else [value]
            if name != "class_depth" and not all(isinstance(text, str) for text in texts):
                raise SettingError(f"{name} must be text, got {value!r:.99}")
        for path in filter(None, (self.root, self.mask)):
            locate(path)  # raises
        if self.target is not None:
            check_choice("target", self.target, TARGETS)
        if isinstance(self.fields, str):
            raise SettingError(f"fields must be a list of names, got {self.fields!r}")
        if self.class_depth is not None:
            check_range("class_depth", self.class_depth, 0)
        if self.separator == "":
            raise SettingError("separator must be one character or more, got ''")

    def given(self) -> dict[str, Any]:
        """Those that are not the default, as plain JSON values; `SourceOptions.from_json` takes them."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        values["fields"] = list(self.fields)
        return {name: value for name, value in values.items() if value not in (None, [])}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "SourceOptions":
        """What `given` gave; TypeError for anything else."""
        return cls(**{**given, "fields": tuple(given.get("fields", ()))})

    def to_flags(self) -> str:
        """The flags of `precache convert` that give these, to paste into a shell."""
        given = {_flag(name): value for name, value in self.given().items()}
        given["--field"] = ",".join(self.fields)
        return " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in given.items() if value != "")

    def only(self, kind: str, *names: str) -> None:
        """Raise SettingError where one is given that a source of this kind, a phrase, does not take."""
        for name in self.given():
            if name not in names:
                raise SettingError(f"{_flag(name)} is not for {kind}; leave it out")


def find_label(
    where: Any, names: Sequence[str], options: SourceOptions, taken: Collection[str | None], usual: str = ""
) -> tuple[str | None, str]:
    """Which column, or key, has the labels, None: none has; and a phrase on what nobody has said.

    Args:
        where: what messages call the table, or the dataset.
        names: of all columns.
        taken: those that hold something else.
        usual: what goes without saying.

    Raises:
        SettingError: several may be it.
    """
    if options.target == "none" or options.label is not None:
        return (None if options.target == "none" else options.label), ""
    left = [name for name in names if name not in taken]
    found = [name for name in left if name in LABEL_NAMES]
    if len(found) > 1:
        raise SettingError(
            f"{where}: several columns may be the labels: {', '.join(map(repr, found))}; say which with "
            f"--label, or leave all out with --target none"
        )
    if found:
        note = f"labels are taken from {found[0]!r}; --label names others, --target none takes none"
        return found[0], "" if found[0] == usual else note
    if options.target is not None or options.separator is not None:
        flag = f"--target {options.target}" if options.separator is None else "--separator"
        raise SettingError(f"{where}: {flag} needs labels; name their column with --label")
    none = f"pictures get no labels, as no column is named {', '.join(LABEL_NAMES)}; name theirs with --label"
    return None, none if left else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-").replace("fields", "field")
