"""Right and wrong calls as users write them, which `make lint` checks by mypy.

mypy reports an error in a line without `type: ignore`, and a `type: ignore` in a line without an error.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import loaders
from loaders import RandomAugmentation, Ranks, Reading, Sampling, Serving
from precache import Recipe


def darken(images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
    return images // 2


folder, folders = Path("data/shards"), list(Path("data").iterdir())
rest: dict[str, Any] = {"device": "cuda", "size": (224, 128)}

loaders.build("data/shards")
loaders.build(["data/shards", folder], **rest)
loaders.build(folders)
loaders.build(
    folder, batch_size=32, split="val", shuffle="window", seed=1, size=224, device=torch.device("cpu")
)
loaders.build(folder, augment="train", dtype="uint8", backend="dali")
loaders.build(folder, augment=RandomAugmentation(hue=0.1), dtype=torch.bfloat16, normalize="dataset")
loaders.build(folder, augment=darken, normalize=((0.5, 0.5, 0.5), [0.25] * 3))
loaders.build(folder, augment=lambda images, ids, epoch: images, normalize=(np.zeros(3), torch.ones(3)))
loaders.build(folder, augment=None, shuffle=False, normalize=None, serving=Serving(crop_ratio=1))
loaders.build(folder, sampling=Sampling(last="drop", weights="balanced"), ranks=Ranks(rank=0, world_size=1))
loaders.build(
    folder, reading=Reading(workers=2, cache="device", check="never", on_error="skip", engine="ray")
)
loaders.build(folder, precache="data/first-use", recipe=Recipe(format="shards"))
loaders.ImageDataset("photos", split="val", transform=lambda picture: picture, decode="tensor")
images: torch.Tensor = next(iter(loaders.build(folder))).images

loaders.build()  # type: ignore[call-arg]
loaders.build(None)  # type: ignore[arg-type]
loaders.build(folder, 32)  # type: ignore[call-arg]
loaders.build(folder, batchsize=3)  # type: ignore[call-arg]
loaders.build(folder, batch_size="3")  # type: ignore[arg-type]
loaders.build(folder, num_workers=4)  # type: ignore[call-arg]
loaders.build(folder, split=3)  # type: ignore[arg-type]
loaders.build(folder, split=None)  # type: ignore[arg-type]
loaders.build(folder, split=["train"])  # type: ignore[arg-type]
loaders.build(folder, augment="trian")  # type: ignore[arg-type]
loaders.build(folder, augment=True)  # type: ignore[arg-type]
loaders.build(folder, dtype="float64")  # type: ignore[arg-type]
loaders.build(folder, dtype=np.uint8)  # type: ignore[arg-type]
loaders.build(folder, normalize="imagnet")  # type: ignore[arg-type]
loaders.build(folder, normalize=(0.5, 0.5, 0.5))  # type: ignore[arg-type]
loaders.build(folder, normalize=("mean", "std"))  # type: ignore[arg-type]
loaders.build(folder, backend="dalli")  # type: ignore[arg-type]
loaders.build(folder, shuffle="a bit")  # type: ignore[arg-type]
loaders.build(folder, size="224")  # type: ignore[arg-type]
loaders.build(folder, workers=2)  # type: ignore[call-arg]
loaders.build(folder, serving={"crop_ratio": 1})  # type: ignore[arg-type]
loaders.build(folder, serving=Serving(dtype="float32"))  # type: ignore[call-arg]
loaders.build(folder, reading=Reading(cache="disk"))  # type: ignore[arg-type]
loaders.build(folder, reading=Reading(check="sometimes"))  # type: ignore[arg-type]
loaders.build(folder, reading=Reading(on_error="ignore"))  # type: ignore[arg-type]
loaders.build(folder, reading=Reading(engine="dask"))  # type: ignore[arg-type]
loaders.build(folder, reading=Reading(workers="many"))  # type: ignore[arg-type]
loaders.build(folder, sampling=Sampling(last="some"))  # type: ignore[arg-type]
loaders.ImageDataset(path="photos")  # type: ignore[call-arg]
loaders.ImageDataset("photos", decode="numpy")  # type: ignore[arg-type]
loaders.ImageDataset("photos", transforms=None)  # type: ignore[call-arg]
labels: list[int] = next(iter(loaders.build(folder))).labels  # type: ignore[assignment]
