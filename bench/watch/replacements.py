"""Advice on replacements for the dataset or the loader of a watched script: lines with `loaders` to paste.

`find_replacements` takes the record of a loader (`bench.watch.describe`), lists the tree of pictures that its
ImageFolder reads, and reads the script. It advises up to four replacements: `loaders.ImageDataset` for the
ImageFolder and `loaders.build` for the DataLoader, each on the tree and on shards that it is converted to. A
replacement that would not serve the same pictures, shown in the same way in batches of the same form, is left
out with a reason.
"""

import ast
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import ExifTags, Image

import loaders
from bench.report.forecast import stored_size
from bench.watch import pictures
from bench.watch.advice import FRAMEWORKS, Advice, Record, read_script
from bench.watch.describe import digest
from bench.watch.pictures import UnservableError
from bench.watch.script import (
    DATALOADER,
    IMAGE_FOLDER,
    Changes,
    Edit,
    Script,
    argument,
    function_name,
    has_plain_positions,
)
from precache.errors import PrecacheError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree, split_of

_DATALOADER = "torch.utils.data.dataloader.DataLoader"
_REMAKERS = ("accelerate.", "lightning", "pytorch_lightning", "torchdata.")
"""Libraries that wrap the script's DataLoader, or a loader of `loaders.build`, in a loader of their own."""
_IMAGE_FOLDER = "torchvision.datasets.folder.ImageFolder"
_SUBSET = "torch.utils.data.dataset.Subset"
_READERS = ("torchvision.datasets.folder:default_loader", "torchvision.datasets.folder:pil_loader")
_DEFAULT_SIDE = 224  # pixels, where batches do not show the size of pictures
_INSTALLED = ("site-packages", "dist-packages")
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Extensions of files that torchvision's ImageFolder takes."""
_THREADS = (
    "It decodes in threads, because worker processes would require an `if __name__ == '__main__'` guard."
)
_EXIF_SAMPLES = 200  # pictures of a tree whose EXIF is read


@dataclass(frozen=True, slots=True)
class Replacements:
    """Replacements for the script's dataset or loader.

    Attributes:
        advices: advices named ImageDataset, ImageDataset on shards, build, build on shards; each serves the
            same pictures in the same form as the script's own loader.
        left_out: sentences on replacements that are left out, and why.
    """

    advices: list[Advice] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    """Tree of pictures that the script's ImageFolder reads, as precache lists it.

    Attributes:
        root: root folder of the ImageFolder.
        is_same: whether precache lists the same samples in the same order as ImageFolder.
        is_same_with_extension: whether those of its samples whose files have an extension of pictures are the
            samples of ImageFolder, in the same order.
        has_classes: whether it finds the same classes.
        samples: number of pictures that precache lists.
        looked_at: number of pictures whose EXIF was read.
        turned: number of those that EXIF turns.
        source: folder to convert: the root, or the folder above where that holds the splits.
        split: split that the root is in `source`; "" where it is all of it.
        pictures: number of pictures to convert.
    """

    root: str
    is_same: bool
    is_same_with_extension: bool
    has_classes: bool
    samples: int
    looked_at: int
    turned: int
    source: str
    split: str
    pictures: int


@dataclass(kw_only=True, slots=True)
class _DatasetChain:
    """Datasets of the script that wrap each other, down to an ImageFolder.

    Attributes:
        folder: record of the ImageFolder.
        subsets: number of Subsets around it.
        wrapper: name of the script's own class around it; "" where there is none.
        repeats: whether a Subset holds a sample twice.
    """

    folder: Record
    subsets: int = 0
    wrapper: str = ""
    repeats: bool = False


class _Destinations:
    """Folders to convert to, one for each recipe; none of them exists yet.

    Args:
        record: record of the loader.
        first: name of the first folder, to which a number is added where it exists.
    """

    def __init__(self, record: Record, first: str) -> None:
        self._above, self._first = record["folder"], first
        self._is_moved = record["moved"]
        self._known: dict[Recipe, str] = {}

    def path_for(self, recipe: Recipe) -> str:
        """Path of the folder for a recipe, as the script has to write it."""
        if recipe not in self._known:
            number, name = 1, self._first
            while name in self._known.values() or os.path.exists(os.path.join(self._above, name)):
                number += 1
                name = f"{self._first}-{number}"
            self._known[recipe] = name
        name = self._known[recipe]
        return os.path.join(self._above, name) if self._is_moved else name


def find_replacements(record: Record, dst: str, *, remade: bool = False) -> Replacements:
    """Find replacements that serve the same pictures as the script's loader.

    Args:
        record: record of the loader, by `bench.watch.describe`.
        dst: folder to convert to; where it exists, a number is added.
        remade: whether the script makes a new loader in each epoch.
    """
    destinations = _Destinations(record, dst)
    try:
        chain = _find_folder(record["dataset"])
        tree = _list_tree(chain.folder)
    except (UnservableError, PrecacheError) as error:  # or the tree cannot be listed
        return Replacements([], [f"loaders.build and loaders.ImageDataset are left out: {error}."])
    reason = _reason_against_both(record, chain, tree)
    if reason:
        return Replacements([], [f"loaders.build and loaders.ImageDataset are left out: {reason}."])
    replacements = Replacements()
    try:
        _add_replacements(replacements, record, chain, tree, destinations, remade)
    except SyntaxError:  # the changed script could not be parsed
        replacements.left_out.append(
            f"loaders.build is left out: its line could not be written ({_line_of(record['made'])})."
        )
    return replacements


def _add_replacements(
    replacements: Replacements,
    record: Record,
    chain: _DatasetChain,
    tree: _Tree,
    destinations: _Destinations,
    remade: bool,
) -> None:
    """Add advices on ImageDataset and on build to replacements, or the reasons why they are left out."""
    reason = _reason_against_dataset(record, chain)
    if reason:
        replacements.left_out.append(f"loaders.ImageDataset is left out: {reason}.")
    else:
        replacements.advices.extend(_advise_dataset(record, chain, tree, destinations))
    reasons = list(_reasons_against_build(record, chain))
    if not record["libraries"]:
        reasons += _reasons_against_line(record, chain, remade)
    if not reasons:
        try:
            replacements.advices.extend(_advise_build(record, chain, tree, destinations))
        except UnservableError as error:
            reasons.append(str(error))
    if reasons:
        replacements.left_out.append(f"loaders.build is left out: {'; '.join(reasons)}.")


def _find_folder(dataset: Record) -> _DatasetChain:
    """Find the ImageFolder in a dataset.

    Raises:
        UnservableError: there is none that can be replaced.
    """
    chain = _DatasetChain(folder=dataset)
    while True:
        inner = chain.folder["inner"]
        if not inner:
            break
        if chain.folder["class"] == _SUBSET:
            chain.subsets += 1
            chain.repeats = chain.repeats or chain.folder["indices"]["repeated"]
        elif len(inner) == 1:
            chain.wrapper = _last_name(chain.folder["class"])
        else:
            raise UnservableError(f"the samples are of {len(inner)} datasets")
        chain.folder = inner[0]
    is_folder = chain.folder["class"] == _IMAGE_FOLDER or chain.folder["is_image_folder"]
    if not is_folder or not chain.folder["root"]:
        raise UnservableError(
            f"they stand in for torchvision's ImageFolder, and this dataset is {_name_dataset(chain.folder)}"
        )
    if chain.folder["reader"] not in _READERS:
        reader = chain.folder["reader"].rpartition(":")[2]
        raise UnservableError(f"its ImageFolder has a reader of its own, {reader}")
    return chain


def _list_tree(folder: Record) -> _Tree:
    """List the tree of an ImageFolder, and the folder above it where that holds its splits."""
    root = folder["root"]
    scan = scan_tree(root)
    own = [(sample.path, sample.label) for sample in scan.samples]
    classes = folder["classes"] or {}
    with_extension = (sample for sample in own if sample[0].lower().endswith(_EXTENSIONS))
    examples = [os.path.join(root, path) for path, _ in own[:: max(1, len(own) // _EXIF_SAMPLES)]]
    source, split, pictures_to_convert = root, "", len(own)
    parent = os.path.dirname(root)
    split_name = split_of(os.path.basename(root))
    if split_name is not None:
        whole = scan_tree(parent)
        start = f"{os.path.basename(root)}/"
        inside = [
            (sample.path.removeprefix(start), sample.label)
            for sample in whole.samples
            if sample.path.startswith(start)
        ]
        if whole.classes == scan.classes and inside == own:
            source, split, pictures_to_convert = parent, split_name, len(whole.samples)
    return _Tree(
        root=root,
        is_same=folder["digest"] == digest(iter(own)),
        is_same_with_extension=folder["digest"] == digest(with_extension),
        has_classes=classes.get("digest") == digest((name, 0) for name in scan.classes),
        samples=len(own),
        looked_at=len(examples),
        turned=sum(map(_is_turned, examples)),
        source=source,
        split=split,
        pictures=pictures_to_convert,
    )


def _is_turned(path: str) -> bool:
    """Whether EXIF says that a picture is to be turned or mirrored."""
    try:
        with Image.open(path) as picture:
            return bool(picture.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # Pillow may raise anything for a damaged file
        return False


def _reason_against_both(record: Record, chain: _DatasetChain, tree: _Tree) -> str:
    """Reason why neither the dataset nor the loader can be replaced; "" where there is none."""
    first = (chain.folder["classes"] or {"first": []})["first"]
    if first and all(split_of(name) for name in first):
        return f"the classes of ImageFolder are {', '.join(first)}, which loaders takes for splits"
    if not tree.has_classes:
        return f"precache finds other classes in {tree.root}"
    counts = (
        f"precache finds {tree.samples:,} pictures in {tree.root} and ImageFolder {chain.folder['samples']:,}"
    )
    if not tree.is_same and not tree.is_same_with_extension:
        return f"{counts}: the script has changed its samples, or chooses files by a rule of its own"
    if not tree.is_same and (chain.subsets or chain.wrapper):
        return f"{counts}, so that a subset would be other pictures"
    for name in ("loaders.py", os.path.join("loaders", "__init__.py")):
        file = os.path.join(os.path.dirname(record["main"]), name)
        if record["main"] and os.path.exists(file) and not os.path.samefile(file, loaders.__file__):
            return f"{file} shadows the package `loaders`; rename it"
    return ""


def _reason_against_dataset(record: Record, chain: _DatasetChain) -> str:
    """Reason why `loaders.ImageDataset` cannot replace the script's ImageFolder; "" where there is none."""
    made = chain.folder["made"]
    script = read_script(made)
    if script is None or made is None:
        return "it is not known where the script makes its ImageFolder"
    if chain.folder["class"] == _IMAGE_FOLDER:
        call = script.find_call(made)
        if call is None or function_name(call) != "ImageFolder":
            if record["libraries"]:
                return f"{_library_title(record)} makes the dataset"
            return f"the ImageFolder is not made by the script itself ({_line_of(made)})"
    elif _find_base(chain) is None:
        return f"{_last_name(chain.folder['class'])} is not derived from ImageFolder in a script"
    return ""


def _find_base(chain: _DatasetChain) -> tuple[Script, Any] | None:
    """Find the expression ImageFolder from which a class of the script is derived, and its script."""
    for position in ({"path": chain.folder["file"]}, chain.folder["made"]):
        script = read_script(position)
        if script is None:
            continue
        definition = script.find_class(_last_name(chain.folder["class"]))
        for base in definition.bases if definition else ():
            if script.text_of(base).endswith("ImageFolder"):
                return script, base
    return None


def _advise_dataset(
    record: Record, chain: _DatasetChain, tree: _Tree, destinations: _Destinations
) -> list[Advice]:
    """Advise `loaders.ImageDataset` in the place of ImageFolder, on the tree, and on shards of it."""
    folder, own = chain.folder, None
    script = Script(folder["made"]["path"])
    call = script.find_call(folder["made"])
    if folder["class"] != _IMAGE_FOLDER:
        own = _find_base(chain)
    notes = ("It keeps all transforms.", *_describe_differences(chain, tree))
    shape = (record["batch"].get("images") or {}).get("shape", [])
    side = max(shape[2:]) if len(shape) == 4 else _DEFAULT_SIDE
    if own is not None:
        changes = Changes(own[0])
        changes.replace(own[1], f"{changes.import_loaders()}.ImageDataset")
        edits = changes.edits()
        return [Advice(name="ImageDataset", edits=edits, notes=notes, root=tree.root, size=side)]
    if call is None:
        return []
    changes = Changes(script)
    changes.replace(call.func, f"{changes.import_loaders()}.ImageDataset")
    advices = [Advice(name="ImageDataset", edits=changes.edits(), notes=notes, root=tree.root, size=side)]
    steps, _ = _steps(chain)
    is_shared = folder["made_of"] > 1 or script.is_shared(call, None)
    if chain.wrapper or is_shared or not pictures.allow_smaller_pictures(steps):
        return advices
    recipe = Recipe(format="shards", size=max(stored_size(side), pictures.largest_resize(steps)))
    dst = destinations.path_for(recipe)
    arguments = {"root": repr(dst)}
    if tree.split:
        arguments["split"] = repr(tree.split)
    changes.set_arguments(call, arguments, IMAGE_FOLDER)
    advices.append(
        Advice(
            name="ImageDataset on shards",
            commands=(_convert_command(record, tree, dst, recipe),),
            edits=changes.edits(),
            notes=notes,
            root=tree.root,
            size=side,
            recipe=recipe,
            pictures=tree.pictures,
        )
    )
    return advices


def _steps(chain: _DatasetChain) -> tuple[Sequence[Record], int]:
    """Records of the transforms of each view of a picture, and the number of views."""
    steps = chain.folder["transforms"] or []
    if len(steps) == 1 and "views" in steps[0]:
        return steps[0]["inner"], steps[0]["views"]
    return steps, 1


def _reasons_against_build(record: Record, chain: _DatasetChain) -> Iterator[str]:
    """Yield reasons, apart from transforms, why `loaders.build` cannot serve the same batches."""
    batch, sampler = record["batch"], record["sampler"]
    if record["libraries"]:
        yield f"{_library_title(record)} makes the DataLoader"
        return
    if record["loader"] != _DATALOADER and not record["loader"].startswith(_REMAKERS):
        yield f"the loader is a {_last_name(record['loader'])}"
    if chain.wrapper or chain.folder["class"] != _IMAGE_FOLDER:
        yield f"the dataset is a {chain.wrapper or _last_name(chain.folder['class'])}"
    if chain.folder["target_transform"]:
        yield "the dataset has a target_transform"
    if chain.repeats:
        yield "a Subset of the script names samples several times"
    if record["collate"] != "default":
        yield f"the batches are made by {record['collate'].rpartition(':')[2]}"
    elif not _is_images_and_labels(batch):
        yield "the batches are not images and labels"
    if record["arguments"]["batch_size"] is None:
        yield "the script makes its batches itself"
    elif "batches" in sampler:
        yield f"the batches are chosen by {_last_name(sampler['batches'])}"
    elif not _has_sampler(record, chain):
        yield f"the samples are chosen by {_last_name(sampler['name'])}"


def _is_images_and_labels(batch: Record) -> bool:
    """Whether a batch is images [n, channels, height, width], or several such tensors, and int64 labels."""
    if batch["form"] != "pair" or batch["labels"] is None:
        return False
    return len(batch["images"]["shape"]) == 4 and batch["labels"]["dtype"] == "int64"


def _has_sampler(record: Record, chain: _DatasetChain) -> bool:
    """Whether `loaders.build` can choose samples as the script's sampler does."""
    sampler, count = record["sampler"], record["dataset"]["samples"]
    name = sampler["name"]
    if name == "RandomSampler":
        return not sampler["replacement"] and sampler["num_samples"] == count
    if name == "WeightedRandomSampler":
        return sampler["replacement"] and sampler["num_samples"] == count and not chain.subsets
    return name in ("SequentialSampler", "SubsetRandomSampler", "DistributedSampler")


def _reasons_against_line(record: Record, chain: _DatasetChain, remade: bool) -> Iterator[str]:
    """Yield reasons why the call of the DataLoader cannot be replaced by `loaders.build` in the script."""
    made = record["made"]
    script = read_script(made)
    call = script.find_call(made) if script else None
    dataset = None
    if call is not None and has_plain_positions(call):
        dataset = argument(call, "dataset", DATALOADER)
    if script is None or call is None or dataset is None:
        yield "it is not known how the script makes its DataLoader"
        return
    has_sampler = record["sampler"]["name"] in ("SubsetRandomSampler", "WeightedRandomSampler")
    if has_sampler and argument(call, "sampler", DATALOADER) is None:
        yield f"the call of the DataLoader does not say its sampler ({_line_of(made)})"
    functions = {function_name(node) for node in ast.walk(dataset) if isinstance(node, ast.Call)}
    # the new line would call such a function twice, which may draw other samples then
    if chain.subsets > 1 and functions - {"Subset"}:
        yield f"the Subset is made in the call of the DataLoader ({_line_of(made)})"
    if record["made_of"] > 1 or script.is_shared(call, dataset):
        yield f"one line makes the loaders of several datasets ({_line_of(made)})"
    elif script.is_repeated(call):
        if script.loop_to_leave(call) is None:
            line = _line_of(made)
            yield f"the DataLoader is made anew in a loop ({line}), and a new one begins with epoch 0"
    elif remade:
        line = _line_of(made)
        yield f"the DataLoader is made anew in each epoch ({line}), and a new one begins with epoch 0"


def _name_steps(steps: Sequence[Record]) -> str:
    return ", ".join(step["text"] for step in steps) or "the dataset"


def _advise_build(
    record: Record, chain: _DatasetChain, tree: _Tree, destinations: _Destinations
) -> list[Advice]:
    """Advise `loaders.build` in the place of the DataLoader, on the tree, and on shards of it.

    Raises:
        UnservableError: `loaders.build` cannot serve the same pictures.
    """
    steps, views = _steps(chain)
    if record["batch"]["views"] != views:
        raise UnservableError(
            f"a sample is {record['batch']['views']} pictures, which {_name_steps(steps)} makes"
        )
    shape = record["batch"]["images"]["shape"]
    effect = pictures.read_steps(steps)
    settings = pictures.settings_for(effect, shape, stored_size(max(shape[2:])))
    if record["batch"]["images"]["dtype"] != ("uint8" if effect.values == "uint8" else "float32"):
        raise UnservableError(f"the pictures of the script are {record['batch']['images']['dtype']}")
    if views > 1 and not effect.is_random:
        raise UnservableError("the views of a picture are alike")
    names = ", ".join(step["name"] for step in steps)
    notes = [
        f"It keeps {names or 'pictures as they are'}.",
        "Its batches are in channels-last memory, in which a step may take less time, or more.",
        *_describe_differences(chain, tree),
    ]
    if effect.jitter:
        notes.append(
            "It changes brightness, contrast, saturation and hue always in this order; torchvision picks a "
            "random order."
        )
    advices = []
    if settings.raw:
        edits = _build_edits(record, chain, tree, settings, views, None)
        threads = [] if record["guarded"] else [_THREADS]
        advices.append(
            Advice(name="build", edits=edits, notes=(*notes, *threads), root=tree.root, size=settings.size)
        )
    if settings.recipe is not None and record["sampler"]["name"] != "WeightedRandomSampler":
        recipe = Recipe(format="shards", **settings.recipe)
        dst = destinations.path_for(recipe)
        edits = _build_edits(record, chain, tree, settings, views, dst)
        advices.append(
            Advice(
                name="build on shards",
                commands=(_convert_command(record, tree, dst, recipe),),
                edits=edits,
                notes=tuple(notes),
                root=tree.root,
                size=settings.size,
                recipe=recipe,
                pictures=tree.pictures,
            )
        )
    return advices


def _build_edits(
    record: Record,
    chain: _DatasetChain,
    tree: _Tree,
    settings: pictures.BuildSettings,
    views: int,
    dst: str | None,
) -> tuple[Edit, ...]:
    """Make the edits that replace the DataLoader by `loaders.build` of the tree, or of the shards `dst`."""
    script, arguments = Script(record["made"]["path"]), record["arguments"]
    call = script.find_call(record["made"])
    assert call is not None
    changes = Changes(script)
    name = changes.import_loaders()
    batch_size = argument(call, "batch_size", DATALOADER)
    build_arguments = {
        "batch_size": script.text_of(batch_size) if batch_size else str(arguments["batch_size"])
    }
    if dst is not None and tree.split:
        build_arguments["split"] = f'"{tree.split}"'
    build_arguments |= {key: text.format(loaders=name) for key, text in settings.arguments.items()}
    if record["sampler"]["name"] == "SequentialSampler" or record["sampler"].get("shuffle") is False:
        build_arguments["shuffle"] = "False"
    if record["cuda"]:
        build_arguments["device"] = '"cuda"'
    serving = {}
    if settings.crop_ratio:
        serving["crop_ratio"] = settings.crop_ratio
    if views > 1:
        serving["views"] = str(views)
    shards = None
    if dst is not None and tree.split:  # ids in shards count the samples of all splits
        shards = f'{name}.ImageDataset({dst!r}, split="{tree.split}")'
    sampling = _sampling_arguments(record, chain, script, call, shards)
    if arguments["drop_last"]:
        sampling["last"] = '"drop"'
    reading = {} if dst is not None or record["guarded"] else {"workers": "0"}
    for group, values in (("serving", serving), ("sampling", sampling), ("reading", reading)):
        if values:
            inner = ", ".join(f"{key}={text}" for key, text in values.items())
            build_arguments[group] = f"{name}.{group.capitalize()}({inner})"
    given = ", ".join(f"{key}={text}" for key, text in build_arguments.items())
    path = _typed_path(record, tree.root) if dst is None else dst
    text = f"{name}.build({path!r}, {given})"
    if views > 1:
        unpack = "lambda batch: [list(batch.views), batch.labels]"
        text = f"{script.text_of(call.func)}({text}, batch_size=None, collate_fn={unpack})"
    loop = script.loop_to_leave(call)
    if loop is None:
        changes.replace(call, text)
    else:
        variable = script.free_name()
        changes.insert_before(loop, f"{variable} = {text}")
        changes.replace(call, variable)
    return changes.edits()


def _sampling_arguments(
    record: Record, chain: _DatasetChain, script: Script, call: Any, shards: str | None
) -> dict[str, str]:
    """Arguments of `loaders.Sampling` that choose the same samples as the script, as text by name.

    Args:
        shards: expression for a dataset whose `ids` translate indices of the script's dataset; None: they are
            the same.
    """
    dataset = script.text_of(argument(call, "dataset", DATALOADER))  # type: ignore[arg-type]
    sampler = argument(call, "sampler", DATALOADER)
    name = record["sampler"]["name"]
    if name == "WeightedRandomSampler" and sampler is not None:
        return {"weights": f"{script.text_of(sampler)}.weights"}
    indices = ""
    if name == "SubsetRandomSampler" and sampler is not None:
        indices = f"{script.text_of(sampler)}.indices"
    for _ in range(chain.subsets):
        indices = f"[{dataset}.indices[i] for i in {indices}]" if indices else f"{dataset}.indices"
        dataset = f"{dataset}.dataset"
    if not indices:
        return {}
    return {"subset": indices if shards is None else f"{shards}.ids[{indices}]"}


def _describe_differences(chain: _DatasetChain, tree: _Tree) -> Iterator[str]:
    """Write how the pictures differ from those that ImageFolder serves."""
    if tree.turned:
        yield (
            f"EXIF turns {tree.turned} of {tree.looked_at} pictures that were looked at: they are served "
            f"upright, which ImageFolder does not do."
        )
    if not tree.is_same:
        yield (
            f"It finds {tree.samples:,} pictures where ImageFolder finds {chain.folder['samples']:,}: also "
            f"those without an extension."
        )


def _convert_command(record: Record, tree: _Tree, dst: str, recipe: Recipe) -> str:
    paths = shlex.join([_typed_path(record, tree.source), dst])
    return f"precache convert {paths} {recipe.to_flags()}"


def _typed_path(record: Record, path: str) -> str:
    """Path relative to the folder where the script was started, if it is below and the script is there."""
    relative = os.path.relpath(path, record["folder"])
    return path if record["moved"] or relative.startswith(os.pardir) else relative


def _library_title(record: Record) -> str:
    library = record["libraries"][0]
    return FRAMEWORKS[library].title if library in FRAMEWORKS else str(library)


def _name_dataset(dataset: Record) -> str:
    """Name of a dataset, like 'Caltech101 of torchvision'; of a class of the script the name alone."""
    name, library = _last_name(dataset["class"]), dataset["class"].partition(".")[0]
    return f"{name} of {library}" if any(word in dataset["file"] for word in _INSTALLED) else name


def _line_of(made: Record) -> str:
    """'file:line' of a call, without the folder."""
    return f"{os.path.basename(made['path'])}:{made['line']}"


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]
