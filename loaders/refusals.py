"""What `loaders.build` and `loaders.ImageDataset` say to settings that other loaders have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from loaders.settings import READING_SETTINGS
from precache.errors import SettingError

# A setting of torch's DataLoader, its samplers or torchvision's datasets -> what to write instead.
_OURS = {
    "batch_sampler": "give batch_size, shuffle, seed and last",
    "collate_fn": "leave it out, batches come whole; augment= takes a function over a batch",
    "download": "run 'precache fetch' before",
    "drop_last": "give last='drop' for True, leave it out for False",
    "generator": "give seed",
    "in_order": "leave it out, batches always come in order",
    "multiprocessing_context": "leave it out; Reading(workers=0) decodes in threads",
    "num_replicas": "give world_size, with rank",
    "num_workers": "give reading=loaders.Reading(workers=...)",
    "persistent_workers": "leave it out, workers stay until the loader is closed",
    "pin_memory": "leave it out, batches for a GPU are copied from pinned memory; give device='cuda'",
    "pin_memory_device": "give device",
    "prefetch_factor": "leave it out, batches are always read ahead",
    "root": "give path",
    "sampler": "give shuffle and seed, weights or subset, and rank and world_size for several processes",
    "target_transform": "leave it out, and map the labels of a batch in the training loop",
    "timeout": "leave it out, a worker that dies raises at once",
    "train": "give split='train' or the name of another split",
    "transform": "give augment: 'train', 'eval' or a function over a batch",
    "transforms": "give augment: 'train', 'eval' or a function over a batch",
    "worker_init_fn": "leave it out; what is random depends on seed, epoch and sample alone",
}


# As above, for `ImageDataset`.
OF_IMAGES = {
    "download": _OURS["download"],
    "loader": "give decode: 'pil' or 'tensor'",
    "root": _OURS["root"],
    "train": _OURS["train"],
    "transforms": "give transform and target_transform",
}


def refuse(
    theirs: Mapping[str, Any],
    function: Callable[..., Any],
    ours: Mapping[str, str] = _OURS,
    reading: Sequence[str] = READING_SETTINGS,
) -> None:
    """Say of the first of `theirs`, settings that `function` does not have, what to give instead.

    Args:
        ours: what to say of those of others.
        reading: names of settings of `Reading`, where `function` takes one.

    Raises:
        SettingError: another loader has it.
        TypeError: none has.
    """
    for name in theirs:
        if name in ours:
            raise SettingError(f"{name} is not a setting of {function.__name__}; {ours[name]}")
        similar = get_close_matches(name, [*inspect.signature(function).parameters, *reading], 1)
        hint = f"; did you mean {_place(similar[0])}?" if similar else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def check_given(path: object) -> None:
    """SettingError for a `path` of None, which is a default only so that `refuse` speaks first of `root`."""
    if path is None:
        raise SettingError("path is missing; give a tree of pictures or what precache convert made of one")


def _place(name: str) -> str:
    return f"reading=loaders.Reading({name}=...)" if name in READING_SETTINGS else name
