"""What of `loaders` serves what a watched script's own loader does, to be pasted in its place.

It lists the tree of pictures, and reads the script. What would not serve the same pictures, shown in the same
way in batches of the same form, is left out, and why is said.
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
from bench.watch.script import (
    DATALOADER,
    IMAGE_FOLDER,
    Changes,
    Edit,
    Script,
    argument,
    function_name,
    is_open,
)
from precache.errors import PrecacheError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree, split_of

_DATALOADER = "torch.utils.data.dataloader.DataLoader"
_REMAKERS = ("accelerate.", "lightning", "pytorch_lightning", "torchdata.")
"""Libraries that make a loader of their own of the script's DataLoader, and of ours."""
_IMAGE_FOLDER = "torchvision.datasets.folder.ImageFolder"
_SUBSET = "torch.utils.data.dataset.Subset"
_READERS = ("torchvision.datasets.folder:default_loader", "torchvision.datasets.folder:pil_loader")
_USUAL_SIDE = 224  # pixels, of pictures whose batches do not say it
_INSTALLED = ("site-packages", "dist-packages")
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of files that torchvision's ImageFolder takes."""
_THREADS = "Threads decode, and no processes, which need what runs below `if __name__ == '__main__':`."
_LOOKED_AT = 200  # pictures of a tree, for EXIF


@dataclass(frozen=True, slots=True)
class Replacements:
    """What can stand in for the script's dataset or its loader.

    Attributes:
        advices: called ImageDataset, ImageDataset on shards, build, build on shards; each serves the same
            pictures in the same form.
        left_out: sentences: what cannot, and why.
    """

    advices: list[Advice] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    """The tree of pictures that the script's ImageFolder reads, as precache lists it.

    Attributes:
        root: that ImageFolder has.
        is_same: whether its samples are those of the script, in the same order.
        has_more: whether they are once those without an extension are left out, as ImageFolder does.
        has_classes: whether classes are the same.
        samples: how many there are.
        looked_at, turned: pictures that were looked at, and those of them that EXIF turns.
        source, split: what to convert, and which split of that the root is; "" where it is all.
        pictures: to convert.
    """

    root: str
    is_same: bool
    has_more: bool
    has_classes: bool
    samples: int
    looked_at: int
    turned: int
    source: str
    split: str
    pictures: int


@dataclass(kw_only=True, slots=True)
class _Chain:
    """The script's dataset, down to an ImageFolder.

    Attributes:
        folder: the record of the ImageFolder.
        subsets: how many Subsets are around it.
        wrapper: the name of a class of the script around it; "" where there is none.
        repeats: whether a Subset holds a sample twice.
    """

    folder: Record
    subsets: int = 0
    wrapper: str = ""
    repeats: bool = False


class _Folders:
    """Folders to convert to: one for each recipe, and none that is there.

    Args:
        first: the name of the first, if there is nothing.
    """

    def __init__(self, source: Record, first: str) -> None:
        self._above, self._first = source["folder"], first
        self._is_moved = source["moved"]
        self._known: dict[Recipe, str] = {}

    def of(self, recipe: Recipe) -> str:
        """The folder as the script has to name it."""
        if recipe not in self._known:
            number, name = 1, self._first
            while name in self._known.values() or os.path.exists(os.path.join(self._above, name)):
                number += 1
                name = f"{self._first}-{number}"
            self._known[recipe] = name
        name = self._known[recipe]
        return os.path.join(self._above, name) if self._is_moved else name


def find_replacements(source: Record, dst: str, *, remade: bool = False) -> Replacements:
    """What serves what the script's loader serves, of `loaders`.

    Args:
        source: the record of `bench.watch.describe`.
        dst: where the pictures would be converted to; where there is something, beside it.
        remade: whether the script makes the loader anew in each epoch.
    """
    folders = _Folders(source, dst)
    chain = _find_folder(source["dataset"])
    if isinstance(chain, str):
        return Replacements([], [f"loaders.build and loaders.ImageDataset are left out: {chain}."])
    try:
        tree = _list_tree(chain.folder)
    except PrecacheError as error:  # it cannot be listed
        return Replacements([], [f"loaders.build and loaders.ImageDataset are left out: {error}."])
    either = _against_both(source, chain, tree)
    if either:
        return Replacements([], [f"loaders.build and loaders.ImageDataset are left out: {either}."])
    found = Replacements()
    try:
        _find_both(found, source, chain, tree, folders, remade)
    except SyntaxError:  # of what a change would make of the script
        found.left_out.append(
            f"loaders.build is left out: its line could not be written ({_at(source['made'])})."
        )
    return found


def _find_both(
    found: Replacements, source: Record, chain: _Chain, tree: _Tree, folders: _Folders, remade: bool
) -> None:
    reason = _against_dataset(source, chain)
    if reason:
        found.left_out.append(f"loaders.ImageDataset is left out: {reason}.")
    else:
        found.advices.extend(_as_dataset(source, chain, tree, folders))
    reasons = list(_against_build(source, chain))
    if not source["libraries"]:
        reasons += _against_line(source, chain, remade)
    built = "; ".join(reasons) or _as_build(source, chain, tree, folders)
    if isinstance(built, str):
        found.left_out.append(f"loaders.build is left out: {built}.")
    else:
        found.advices.extend(built)


def _find_folder(dataset: Record) -> _Chain | str:
    """The ImageFolder in a dataset; or why there is none."""
    chain = _Chain(folder=dataset)
    while True:
        inner = chain.folder["inner"]
        if not inner:
            break
        if chain.folder["class"] == _SUBSET:
            chain.subsets += 1
            chain.repeats = chain.repeats or chain.folder["indices"]["repeated"]
        elif len(inner) == 1:
            chain.wrapper = _last(chain.folder["class"])
        else:
            return f"the samples are of {len(inner)} datasets"
        chain.folder = inner[0]
    is_folder = chain.folder["class"] == _IMAGE_FOLDER or chain.folder["is_image_folder"]
    if not is_folder or not chain.folder["root"]:
        return f"they stand in for torchvision's ImageFolder, and this dataset is {_of_library(chain.folder)}"
    if chain.folder["reader"] not in _READERS:
        return f"its ImageFolder has a reader of its own, {chain.folder['reader'].rpartition(':')[2]}"
    return chain


def _list_tree(folder: Record) -> _Tree:
    """List the tree of an ImageFolder, and the folder around it where that holds its splits."""
    root = folder["root"]
    scan = scan_tree(root)
    own = [(sample.path, sample.label) for sample in scan.samples]
    classes = folder["classes"] or {}
    usual = (sample for sample in own if sample[0].lower().endswith(_EXTENSIONS))
    few = [os.path.join(root, path) for path, _ in own[:: max(1, len(own) // _LOOKED_AT)]]
    tree = {
        "root": root,
        "is_same": folder["digest"] == digest(iter(own)),
        "has_more": folder["digest"] == digest(usual),
        "looked_at": len(few),
        "turned": sum(map(_is_turned, few)),
        "has_classes": classes.get("digest") == digest((name, 0) for name in scan.classes),
        "samples": len(own),
    }
    around = os.path.dirname(root)
    split = split_of(os.path.basename(root))
    if split is not None:
        whole = scan_tree(around)
        start = f"{os.path.basename(root)}/"
        inside = [
            (sample.path.removeprefix(start), sample.label)
            for sample in whole.samples
            if sample.path.startswith(start)
        ]
        if whole.classes == scan.classes and inside == own:
            return _Tree(**tree, source=around, split=split, pictures=len(whole.samples))
    return _Tree(**tree, source=root, split="", pictures=len(own))


def _is_turned(path: str) -> bool:
    """Whether EXIF says that the picture is to be turned or mirrored."""
    try:
        with Image.open(path) as picture:
            return bool(picture.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # whatever Pillow makes of a damaged file
        return False


def _against_both(source: Record, chain: _Chain, tree: _Tree) -> str:
    """What stands against both; "" where nothing does."""
    first = (chain.folder["classes"] or {"first": []})["first"]
    if first and all(split_of(name) for name in first):
        return f"the classes of ImageFolder are {', '.join(first)}, which loaders takes for splits"
    if not tree.has_classes:
        return f"precache finds other classes in {tree.root}"
    counts = (
        f"precache finds {tree.samples:,} pictures in {tree.root} and ImageFolder {chain.folder['samples']:,}"
    )
    if not tree.is_same and not tree.has_more:
        return f"{counts}: the script has changed its samples, or chooses files by a rule of its own"
    if not tree.is_same and (chain.subsets or chain.wrapper):
        return f"{counts}, so that a subset would be other pictures"
    for name in ("loaders.py", os.path.join("loaders", "__init__.py")):
        file = os.path.join(os.path.dirname(source["main"]), name)
        if source["main"] and os.path.exists(file) and not os.path.samefile(file, loaders.__file__):
            return f"{file} is imported in its place; call that something else"
    return ""


def _against_dataset(source: Record, chain: _Chain) -> str:
    """What stands against `loaders.ImageDataset` in the place of the script's ImageFolder."""
    made = chain.folder["made"]
    script = read_script(made)
    if script is None or made is None:
        return "it is not known where the script makes its ImageFolder"
    if chain.folder["class"] == _IMAGE_FOLDER:
        call = script.find_call(made)
        if call is None or function_name(call) != "ImageFolder":
            if source["libraries"]:
                return f"{_title(source)} makes the dataset"
            return f"the ImageFolder is not made by the script itself ({_at(made)})"
    elif _base(chain) is None:
        return f"{_last(chain.folder['class'])} is not derived from ImageFolder in a script"
    return ""


def _base(chain: _Chain) -> tuple[Script, Any] | None:
    """The ImageFolder from which a class of the script is derived."""
    for made in ({"path": chain.folder["file"]}, chain.folder["made"]):
        script = read_script(made)
        found = script.find_class(_last(chain.folder["class"])) if script else None
        for base in found.bases if found else ():
            if script is not None and script.text_of(base).endswith("ImageFolder"):
                return script, base
    return None


def _as_dataset(source: Record, chain: _Chain, tree: _Tree, folders: _Folders) -> list[Advice]:
    """`loaders.ImageDataset` in the place of ImageFolder, over the tree, and over shards of it."""
    folder, own = chain.folder, None
    script = Script(folder["made"]["path"])
    call = script.find_call(folder["made"])
    if folder["class"] != _IMAGE_FOLDER:
        own = _base(chain)
    says = ("It keeps all transforms.", *_other_pictures(chain, tree))
    shape = (source["batch"].get("images") or {}).get("shape", [])
    side = max(shape[2:]) if len(shape) == 4 else _USUAL_SIDE
    if own is not None:
        changes = Changes(own[0])
        changes.replace(own[1], f"{changes.import_loaders()}.ImageDataset")
        edits = changes.edits()
        return [Advice(name="ImageDataset", edits=edits, says=says, root=tree.root, size=side)]
    if call is None:
        return []
    changes = Changes(script)
    changes.replace(call.func, f"{changes.import_loaders()}.ImageDataset")
    found = [Advice(name="ImageDataset", edits=changes.edits(), says=says, root=tree.root, size=side)]
    steps, _ = _steps(chain)
    is_shared = folder["made_of"] > 1 or script.is_shared(call, None)
    if chain.wrapper or is_shared or not pictures.keeps_what_is_shown(steps):
        return found
    recipe = Recipe(format="shards", size=max(stored_size(side), pictures.resized_to(steps)))
    dst = folders.of(recipe)
    given = {"root": repr(dst)}
    if tree.split:
        given["split"] = repr(tree.split)
    changes.set_arguments(call, given, IMAGE_FOLDER)
    found.append(
        Advice(
            name="ImageDataset on shards",
            commands=(_convert(source, tree, dst, recipe),),
            edits=changes.edits(),
            says=says,
            root=tree.root,
            size=side,
            recipe=recipe,
            pictures=tree.pictures,
        )
    )
    return found


def _steps(chain: _Chain) -> tuple[Sequence[Record], int]:
    """The transforms of each view of a picture, and how many views there are."""
    steps = chain.folder["transforms"] or []
    if len(steps) == 1 and "views" in steps[0]:
        return steps[0]["inner"], steps[0]["views"]
    return steps, 1


def _against_build(source: Record, chain: _Chain) -> Iterator[str]:
    """What stands against `loaders.build`, beside the transforms: the dataset, the batches, the samples."""
    batch, sampler = source["batch"], source["sampler"]
    if source["libraries"]:
        yield f"{_title(source)} makes the DataLoader"
        return
    if source["loader"] != _DATALOADER and not source["loader"].startswith(_REMAKERS):
        yield f"the loader is a {_last(source['loader'])}"
    if chain.wrapper or chain.folder["class"] != _IMAGE_FOLDER:
        yield f"the dataset is a {chain.wrapper or _last(chain.folder['class'])}"
    if chain.folder["target_transform"]:
        yield "the dataset has a target_transform"
    if chain.repeats:
        yield "a Subset of the script names samples several times"
    if source["collate"] != "default":
        yield f"the batches are made by {source['collate'].rpartition(':')[2]}"
    elif not _is_usual(batch):
        yield "the batches are not images and labels"
    if source["arguments"]["batch_size"] is None:
        yield "the script makes its batches itself"
    elif "batches" in sampler:
        yield f"the batches are chosen by {_last(sampler['batches'])}"
    elif not _has_sampler(source, chain):
        yield f"the samples are chosen by {_last(sampler['name'])}"


def _is_usual(batch: Record) -> bool:
    """Whether it is images [n, channels, height, width], or several such, and labels."""
    if batch["form"] != "pair" or batch["labels"] is None:
        return False
    return len(batch["images"]["shape"]) == 4 and batch["labels"]["dtype"] == "int64"


def _has_sampler(source: Record, chain: _Chain) -> bool:
    """Whether `loaders.build` can choose samples as the sampler does."""
    sampler, count = source["sampler"], source["dataset"]["samples"]
    name = sampler["name"]
    if name == "RandomSampler":
        return not sampler["replacement"] and sampler["num_samples"] == count
    if name == "WeightedRandomSampler":
        return sampler["replacement"] and sampler["num_samples"] == count and not chain.subsets
    return name in ("SequentialSampler", "SubsetRandomSampler", "DistributedSampler")


def _against_line(source: Record, chain: _Chain, remade: bool) -> Iterator[str]:
    """What stands against `loaders.build` in the place of the script's DataLoader(...)."""
    made = source["made"]
    script = read_script(made)
    call = script.find_call(made) if script else None
    dataset = argument(call, "dataset", DATALOADER) if call is not None and is_open(call) else None
    if script is None or call is None or dataset is None:
        yield "it is not known how the script makes its DataLoader"
        return
    has_sampler = source["sampler"]["name"] in ("SubsetRandomSampler", "WeightedRandomSampler")
    if has_sampler and argument(call, "sampler", DATALOADER) is None:
        yield f"the call of the DataLoader does not say its sampler ({_at(made)})"
    called = {function_name(node) for node in ast.walk(dataset) if isinstance(node, ast.Call)}
    if chain.subsets > 1 and called - {"Subset"}:  # it would be called twice, and may draw other samples then
        yield f"the Subset is made in the call of the DataLoader ({_at(made)})"
    if source["made_of"] > 1 or script.is_shared(call, dataset):
        yield f"one line makes the loaders of several datasets ({_at(made)})"
    elif script.is_repeated(call):
        if script.loop_to_leave(call) is None:
            yield f"the DataLoader is made anew in a loop ({_at(made)}), and a new one begins with epoch 0"
    elif remade:
        yield f"the DataLoader is made anew in each epoch ({_at(made)}), and a new one begins with epoch 0"


def _named(steps: Sequence[Record]) -> str:
    return ", ".join(step["text"] for step in steps) or "the dataset"


def _as_build(source: Record, chain: _Chain, tree: _Tree, folders: _Folders) -> list[Advice] | str:
    """`loaders.build` in the place of the DataLoader, over the tree, and over shards of it; or why not."""
    steps, views = _steps(chain)
    if source["batch"]["views"] != views:
        return f"a sample is {source['batch']['views']} pictures, which {_named(steps)} makes"
    shape = source["batch"]["images"]["shape"]
    shown = pictures.read_steps(steps)
    settings = pictures.settings_for(shown, shape, stored_size(max(shape[2:])))
    if isinstance(settings, str):
        return settings
    if source["batch"]["images"]["dtype"] != ("uint8" if shown.values == "uint8" else "float32"):
        return f"the pictures of the script are {source['batch']['images']['dtype']}"
    if views > 1 and not shown.is_random:
        return "the views of a picture are alike"
    kept = ", ".join(step["name"] for step in steps)
    says = [
        f"It keeps {kept or 'pictures as they are'}.",
        "Its batches are in channels-last memory, in which a step may take less time, or more.",
        *_other_pictures(chain, tree),
    ]
    if shown.jitter:
        says.append(
            "It changes brightness, contrast, saturation and hue in this order; torchvision draws one."
        )
    found = []
    if settings.raw:
        edits = _build_edits(source, chain, tree, settings, views, None)
        threads = [] if source["guarded"] else [_THREADS]
        found.append(
            Advice(name="build", edits=edits, says=(*says, *threads), root=tree.root, size=settings.size)
        )
    if settings.recipe is not None and source["sampler"]["name"] != "WeightedRandomSampler":
        recipe = Recipe(format="shards", **settings.recipe)
        dst = folders.of(recipe)
        edits = _build_edits(source, chain, tree, settings, views, dst)
        found.append(
            Advice(
                name="build on shards",
                commands=(_convert(source, tree, dst, recipe),),
                edits=edits,
                says=tuple(says),
                root=tree.root,
                size=settings.size,
                recipe=recipe,
                pictures=tree.pictures,
            )
        )
    return found


def _build_edits(
    source: Record, chain: _Chain, tree: _Tree, settings: pictures.Settings, views: int, dst: str | None
) -> tuple[Edit, ...]:
    """The line with the DataLoader, with `loaders.build` of the tree, or of what it was converted to."""
    script, arguments = Script(source["made"]["path"]), source["arguments"]
    call = script.find_call(source["made"])
    assert call is not None
    changes = Changes(script)
    name = changes.import_loaders()
    batch_size = argument(call, "batch_size", DATALOADER)
    given = {"batch_size": script.text_of(batch_size) if batch_size else str(arguments["batch_size"])}
    if dst is not None and tree.split:
        given["split"] = f'"{tree.split}"'
    given |= {key: text.format(loaders=name) for key, text in settings.arguments.items()}
    if source["sampler"]["name"] == "SequentialSampler" or source["sampler"].get("shuffle") is False:
        given["shuffle"] = "False"
    if source["cuda"]:
        given["device"] = '"cuda"'
    serving = {}
    if settings.crop_ratio:
        serving["crop_ratio"] = settings.crop_ratio
    if views > 1:
        serving["views"] = str(views)
    sampling = _sampling(
        source, chain, tree, script, call, None if dst is None else f"{name}.ImageDataset({dst!r}"
    )
    if arguments["drop_last"]:
        sampling["last"] = '"drop"'
    reading = {} if dst is not None or source["guarded"] else {"workers": "0"}
    for group, values in (("serving", serving), ("sampling", sampling), ("reading", reading)):
        if values:
            inner = ", ".join(f"{key}={text}" for key, text in values.items())
            given[group] = f"{name}.{group.capitalize()}({inner})"
    told = ", ".join(f"{key}={text}" for key, text in given.items())
    path = _typed(source, tree.root) if dst is None else dst
    text = f"{name}.build({path!r}, {told})"
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


def _sampling(
    source: Record, chain: _Chain, tree: _Tree, script: Script, call: Any, shards: str | None
) -> dict[str, str]:
    """Which samples the loader serves: what `loaders.Sampling` is to be told."""
    dataset = script.text_of(argument(call, "dataset", DATALOADER))  # type: ignore[arg-type]
    sampler = argument(call, "sampler", DATALOADER)
    name = source["sampler"]["name"]
    if name == "WeightedRandomSampler" and sampler is not None:
        return {"weights": f"{script.text_of(sampler)}.weights"}
    numbers = ""
    if name == "SubsetRandomSampler" and sampler is not None:
        numbers = f"{script.text_of(sampler)}.indices"
    for _ in range(chain.subsets):
        numbers = f"[{dataset}.indices[i] for i in {numbers}]" if numbers else f"{dataset}.indices"
        dataset = f"{dataset}.dataset"
    if not numbers:
        return {}
    if shards is not None and tree.split:  # its samples are numbered with those of the other splits
        return {"subset": f'{shards}, split="{tree.split}").ids[{numbers}]'}
    return {"subset": numbers}


def _other_pictures(chain: _Chain, tree: _Tree) -> Iterator[str]:
    """What pictures are others than those of ImageFolder."""
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


def _convert(source: Record, tree: _Tree, dst: str, recipe: Recipe) -> str:
    paths = shlex.join([_typed(source, tree.source), dst])
    return f"precache convert {paths} {recipe.to_flags()}"


def _typed(source: Record, path: str) -> str:
    """A path as one types it where the script was started."""
    below = os.path.relpath(path, source["folder"])
    return path if source["moved"] or below.startswith(os.pardir) else below


def _title(source: Record) -> str:
    library = source["libraries"][0]
    return FRAMEWORKS[library].title if library in FRAMEWORKS else str(library)


def _of_library(dataset: Record) -> str:
    """'Caltech101 of torchvision', or the name alone of a class of the script."""
    name, library = _last(dataset["class"]), dataset["class"].partition(".")[0]
    return f"{name} of {library}" if any(word in dataset["file"] for word in _INSTALLED) else name


def _at(made: Record) -> str:
    return f"{os.path.basename(made['path'])}:{made['line']}"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
