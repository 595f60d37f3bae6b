"""Layout of a tree: which of its folders are splits, and whether folders are classes at all.

A folder is a split if it has the usual name of one (`SPLIT_FOLDERS`) and holds class folders; a class holds
its pictures itself. Names without an extension are those of pictures, 1 of 1.jpg. What comes are the classes
of each split, the pictures that are ignored, and words of each warning or of the error.

    TREE                                               WHAT COMES
    bus/1 cat/2                                        bus cat
    train/b/1 train/c/2 val/a/3                        train: b c; val: a
    Train/b/1 VALID/b/2                                train: b; val: b
    Testing/b/1 Training/b/2                           test: b; train: b
    dev/b/1 evaluation/b/2 train_set/b/3               val: b; test: b; train: b
    train2017/b/1 val2017/b/2                          train: b; val: b
    train/n1/images/1 val/n1/images/2                  train: n1; val: n1
    __MACOSX/train/b/1 lost+found/2 train/b/3          train: b
    steam_train/1 test_tube/2                          steam_train test_tube
    steam_train/a/1 train_station/a/2                  steam_train train_station

A single split is alone, or lies beside pictures that are in no class folder; what is in no class folder of a
split is ignored. A folder without any picture is an empty split.

    train/b/1 val/a/3 val/x                            train: b; val: a; ignored: val/x
    train/b/1 train/c/2 train/x                        train: b c; ignored: train/x
    train/b/1 test/3 test/4 x                          train: b; ignored: test/3 test/4 x
    train/b/1 train/c/2 some/3                         train: b c; ignored: some/3
    train/b/1 val/b/2 more/b/3                         train: b; val: b; ignored: more/b/3
    train/a/1 val/a/2 valid/                           train: a; val: a
    train/a/1 val/a/2 valid/a/3                        error: 'val' and 'valid'

Otherwise a class has the name of a split.

    bus/1 train/2 train/3 train/old/4                  bus train; warning: taken for classes: 'train'
    bus/a/1 train/a/2                                  bus train; warning: 'train'
    test/1 train/2                                     test train; warning: --class-depth 0

Class folders may lie deeper, or there are none.

    a/b/1 a/x d/e/2 above, depth 2                     a/b d/e; ignored: a/x above
    train/a/b/1 test/a/b/2, depth 2                    test: a/b; train: a/b
    test/1 train/2 val/3, depth 0                      test: no classes; train: no classes; val: no classes
    1 train/2, depth 0                                 no classes
    birds/heron/1 birds/owl/2 pets/dog/3               birds pets; warning: --class-depth 2
    photos/heron/1 photos/owl/2                        photos; warning: photos/photos instead
    train/x/heron/1 train/x/owl/2 val/x/heron/3        train: x; val: x; warning: --class-depth 2
    n1/images/1 n2/images/2                            n1 n2
    heron/1 heron/2023/2 heron/2024/3                  heron
    a/b/1, depth 3                                     error: --class-depth 2
    1                                                  error: --class-depth 0
    notes/                                             error: precache sample
    default/a/b/0.tar                                  error: /default/a

Labels may be in a table, or in a file for each picture.

    1 labels.csv                                       error: labels.csv DST --root FOLDER
    train/1 labels.csv sample_submission.csv           train; warning: 'train'; warning: are in labels.csv
    a/1 b/2 labels.csv                                 a b; warning: labels.csv DST --root
    images/1 masks/1                                   error: images DST --class-depth 0
    train/images/1 train/masks/1 val/images/2          error: train/images DST --class-depth 0
    images/train/1 images/val/2 masks/train/1          error: images DST --class-depth 0
    JPEGImages/1 SegmentationClass/1                   error: JPEGImages DST --class-depth 0
    image_2/1 gt_2/1                                   error: image_2 DST --class-depth 0
    images/cat/1 images/dog/2 annotations/trimaps/1    error: images DST
    images/1 cat/2                                     cat images
    masks/1 hats/2                                     hats masks
    photos/1 labels/2 maps/3                           labels maps photos
"""

import re
from dataclasses import dataclass
from pathlib import Path

from precache.errors import NothingFoundError, SourceError, shell_command
from precache.reporting import abridge
from precache.sources.entries import Entry, has_picture
from precache.sources.options import is_table

SPLIT_FOLDERS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Split of each folder name, in lower case; the names are those of Hugging Face's `imagefolder`."""
_PICTURE_FOLDERS = frozenset(
    ("images", "image", "imgs", "img", "jpegimages", "pictures", "photos", "inputs", "input", "rgb")
)
_ANNOTATION_FOLDERS = frozenset((
    "masks", "mask", "annotations", "annotation", "labels", "label", "segmentations", "segmentation",
    "segmentationclass", "segmentationobject", "groundtruth", "ground_truth", "gt", "trimaps",
))  # fmt: skip
"""Names of folders that lie side by side where each picture is labelled by a file, in lower case."""
_SHARD_SUFFIXES = (".parquet", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def split_of(folder: str) -> str | None:
    """Return the split in a folder's name, as `train` for Training, train_set, train2017; else None."""
    return SPLIT_FOLDERS.get(re.sub(r"[-_ ]?set$", "", folder.lower().rstrip("0123456789")))


@dataclass(frozen=True, slots=True)
class Layout:
    """Splits of a tree, and the entries beside them.

    Attributes:
        splits: name and folder of each split; empty for a tree without splits.
        others: files and folders beside the splits.
        warnings: one line each.
    """

    splits: tuple[tuple[str, Entry], ...] = ()
    others: tuple[Entry, ...] = ()
    warnings: tuple[str, ...] = ()


def find_layout(top: Entry, root: Path, class_depth: int) -> Layout:
    """Find the splits of a tree: folders named as splits that hold class folders, or pictures at depth 0.

    Raises:
        SourceError: two folders are one split, such as val and valid.
    """
    entries = top.entries()
    folders = [entry for entry in entries if entry.is_dir() and entry.reason_to_ignore() is None]
    candidates = [folder for folder in folders if split_of(folder.name)]
    non_empty = [folder for folder in candidates if has_picture(folder, class_depth)]
    others = [folder for folder in folders if folder not in candidates]
    if not non_empty or not _are_splits(top, candidates, non_empty, others, class_depth):
        meant_as_splits = non_empty
        if not non_empty and not others:
            meant_as_splits = candidates
        if not meant_as_splits or class_depth == 0 or not has_picture(top, 1):
            return Layout()
        names = abridge([repr(folder.name) for folder in meant_as_splits])
        remedy = f"for splits put other class folders out of {root}"
        if not non_empty:
            remedy = "for splits of pictures without labels pass --class-depth 0, or class_depth=0"
        warning = f"{root}: folders named as splits are taken for classes: {names}; {remedy}"
        return Layout(warnings=(warning,))
    splits: dict[str, Entry] = {}
    for folder in non_empty:
        split = str(split_of(folder.name))
        first = splits.setdefault(split, folder)
        if first is not folder:
            raise SourceError(
                f"the folders {first.name!r} and {folder.name!r} are both the split {split!r}",
                path=root,
                remedy="merge them, or move one out of the tree",
            )
    for folder in candidates:
        # a folder without any picture is an empty split; one with pictures outside class folders is no split
        if not has_picture(folder):
            splits.setdefault(str(split_of(folder.name)), folder)
    by_folder = sorted(splits.items(), key=lambda split_and_folder: split_and_folder[1].name)
    return Layout(tuple(by_folder), tuple(entry for entry in entries if entry not in splits.values()))


def _are_splits(
    top: Entry, candidates: list[Entry], non_empty: list[Entry], others: list[Entry], class_depth: int
) -> bool:
    """Return whether folders that are named as splits are splits, and not classes with such names.

    Args:
        candidates: folders of `top` that are named as splits.
        non_empty: the candidates with pictures `class_depth` folders deep.
        others: the other folders of `top`.
    """
    if class_depth == 0:
        has_pictures_beside = any(_is_picture(entry) for entry in top.entries()) or any(
            map(has_picture, others)
        )
        return len(non_empty) > 1 or not has_pictures_beside
    if not any(_has_mostly_folders(folder) for folder in non_empty):
        return False
    if len(non_empty) > 1:
        return True
    if any(has_picture(folder, class_depth) for folder in others):
        return False
    is_train = split_of(non_empty[0].name) == "train" and _has_mostly_folders(non_empty[0], at_least=2)
    return len(candidates) > 1 or is_train or not any(map(has_picture, others))


def _has_mostly_folders(folder: Entry, at_least: int = 1) -> bool:
    """Return whether a folder holds `at_least` so many folders, and more of them than pictures."""
    used = [entry for entry in folder.entries() if entry.reason_to_ignore() is None]
    folder_count = sum(entry.is_dir() for entry in used)
    return folder_count >= at_least and folder_count > len(used) - folder_count


def _is_picture(entry: Entry) -> bool:
    return not entry.is_dir() and entry.reason_to_ignore() is None


def check_no_annotations(folder: Entry, path: Path) -> None:
    """Raise SourceError if the folder at `path` has pictures beside the masks or labels of each."""
    folders = [entry for entry in folder.entries() if entry.is_dir()]
    annotations = [entry.name for entry in folders if _base_name(entry) in _ANNOTATION_FOLDERS]
    pictures = [entry for entry in folders if _base_name(entry) in _PICTURE_FOLDERS]
    if not annotations or not pictures or not has_picture(pictures[0]):
        return
    others = [entry for entry in folders if _base_name(entry) not in _ANNOTATION_FOLDERS | _PICTURE_FOLDERS]
    if any(entry.reason_to_ignore() is None and has_picture(entry) for entry in others):
        return  # classes, two of which happen to have such names
    inner = [entry.name for entry in pictures[0].entries() if entry.is_dir()]
    has_classes = _has_mostly_folders(pictures[0]) and not all(map(split_of, inner))
    flags = () if has_classes else ("--class-depth", "0")
    command = shell_command("precache convert", path / pictures[0].name, "DST", *flags)
    raise SourceError(
        f"{pictures[0].name!r} and {annotations[0]!r} are pictures and what labels them, not classes",
        path=path,
        remedy=f"for the pictures alone, without these labels, run: {command}",
    )


def _base_name(folder: Entry) -> str:
    """Return the name of a folder without numbers: image_2 is a folder of images."""
    return re.sub(r"[-_0-9]+$", "", folder.name.lower())


def no_pictures_error(top: Entry, root: Path, class_depth: int) -> NothingFoundError:
    """Return the error for a tree without samples, which says what to pass if its layout is another."""
    if (folder := _folder_of_shards(top)) is not None:
        return NothingFoundError(
            "has no class folder with pictures, but shards",
            path=root,
            remedy=f"name their folder, {root}/{folder}",
        )
    if class_depth == 0:
        return NothingFoundError(
            "has no pictures in it (make a sample tree with 'precache sample DST')", path=root
        )
    expected = f"expected {root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if not has_picture(top):
        sample = "make a sample tree with 'precache sample DST'"
        return NothingFoundError(f"has no class folder with pictures; {expected} ({sample})", path=root)
    depth = class_depth - 1
    while not has_picture(top, depth):
        depth -= 1
    contents = "pictures without labels" if depth == 0 else "class folders that lie less deep"
    return NothingFoundError(
        f"has no class folder with pictures, but pictures; {expected} (for {contents} pass "
        f"--class-depth {depth})",
        path=root,
        remedy=advice_on_tables(root, [entry.name for entry in top.entries()]),
    )


def _folder_of_shards(top: Entry) -> str | None:
    """Return the path to name as source if tars or Parquet files lie too deep to be seen; else None."""
    pending = [("", top)]
    while pending:
        path, folder = pending.pop()
        for entry in folder.entries():
            if not entry.is_dir():
                if path.count("/") > 1 and entry.name.lower().endswith(_SHARD_SUFFIXES):
                    return path.strip("/").rpartition("/")[0]
            elif entry.reason_to_ignore() is None:
                pending.append((f"{path}/{entry.name}", entry))
    return None


def advice_on_tables(root: Path, paths: list[str]) -> str:
    """Return what to run if tables beside the class folders have the labels of the pictures; else "".

    Args:
        paths: paths in the tree of files, some of which may be such tables.
    """
    tables = [path for path in paths if "/" not in path and is_table(Path(path))]
    tables = [path for path in tables if "submission" not in path.lower()]
    if not tables:
        return ""
    command = shell_command(
        "precache convert", root / tables[0], "DST --root FOLDER --image COLUMN --label COLUMN"
    )
    return f"if the labels of the pictures are in {abridge(tables)}, run: {command}"
