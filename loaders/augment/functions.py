"""Functions of the caller that augment: what they take and return, checked."""

import copy
import inspect
import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from loaders.augment.draws import uniforms
from loaders.augment.policies import AUGMENTATIONS, RandomAugmentation
from loaders.settings import AugmentName
from precache.errors import SettingError, check_choice
from precache.pictures.images import Size, as_size, sides
from precache.pictures.jpeg import Pixels

BatchFunction: TypeAlias = Callable[..., Any]
"""Function given as `augment`: (images, ids, epoch) -> images.

`images` are uint8 [n, height, width, channels] on the loader's device, see `augment` of `loaders.build`;
`ids` int64 [n] on the CPU. It works on pixels as they are stored, and returns as many images of the same
dtype and channels on the same device, of the `size` that `build` was given, or else all of one size. They are
normalised afterwards, unless `build` was asked for uint8.

If it has a parameter called `labels`, it gets those of `Batch`, on the device, and returns images and labels:
[n], or soft ones, float [n, classes], as CutMix and MixUp make them."""
_TRANSFORM_PACKAGES = ("albumentations", "kornia", "torchvision")


class CheckedFunction:
    """Augment function of the caller, whose return values are checked, without a wait for their pixels.

    Args:
        size: size that the function must return; None: the size of the first batch.

    Raises:
        SettingError: the function does not take a batch, as a transform of one picture.
    """

    def __init__(self, function: BatchFunction, size: Size | None) -> None:
        self._function, self._size = function, size
        self._name = _name(function)
        self._takes_labels = False
        try:
            signature = inspect.signature(getattr(function, "forward", function))
        except ValueError:  # a function written in C has no signature
            pass
        else:
            self._takes_labels = "labels" in signature.parameters
            self._check_signature(signature)

    def _check_signature(self, signature: inspect.Signature) -> None:
        """Raise SettingError if the function cannot take a batch, as a transform of one picture."""
        try:
            signature.bind("images", "ids", "epoch", **({"labels": None} if self._takes_labels else {}))
            # torchvision's v2 and others take whatever there is, and would take ids for a picture, too
            if _package(self._function) not in _TRANSFORM_PACKAGES:
                return
        except TypeError:
            pass
        if self._name in ("CutMix", "MixUp"):
            raise SettingError(
                f"augment takes no {self._name} that mixes images and labels alone",
                remedy="give augment=loaders.RandomAugmentation(mixup=0.2, cutmix=1.0), which crops and "
                "mirrors, too; or mix in the training loop",
            )
        raise SettingError(
            f"augment takes a function (images, ids, epoch) of a whole batch, uint8 [n, height, width, "
            f"channels], that returns as many; {self._name} takes {signature}",
            remedy="give a transform of one picture as augment=loaders.per_picture(transform), and one of a "
            "batch [n, channels, height, width] as augment=lambda images, ids, epoch: "
            "transform(images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)",
        )

    def apply(
        self, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the function, and return the images and labels that it made.

        Raises:
            SettingError: they are not as `BatchFunction` says.
        """
        if not self._takes_labels:
            return self._check_images(self._function(images, ids, epoch), images), labels
        returned = self._function(images, ids, epoch, labels=labels)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            raise SettingError(
                f"augment function {self._name} takes labels, so it must return images and labels, got "
                f"{type(returned).__name__}"
            )
        mixed = returned[1]
        if not isinstance(mixed, torch.Tensor) or mixed.shape[:1] != labels.shape[:1] or mixed.ndim > 2:
            got = [*mixed.shape] if isinstance(mixed, torch.Tensor) else type(mixed).__name__
            raise SettingError(
                f"augment function {self._name} must return labels [{len(labels)}] or "
                f"[{len(labels)}, classes], got {got}"
            )
        return self._check_images(returned[0], images), mixed

    def _check_images(self, returned: object, images: torch.Tensor) -> torch.Tensor:
        """Return `returned` if it is as `BatchFunction` says for `images`, else raise SettingError."""
        size = None if self._size is None else sides(self._size)
        remedy = _image_fault(returned, images, size)
        if isinstance(returned, torch.Tensor) and not remedy:
            self._size = as_size(returned.shape[1], returned.shape[2])
            return returned
        got = type(returned).__name__
        if isinstance(returned, torch.Tensor):
            name = str(returned.dtype).removeprefix("torch.")
            got = f"{name} {[*returned.shape]} on {returned.device}"
        height, width = size or ("height", "width")
        raise SettingError(
            f"augment function {self._name} must return uint8 "
            f"[{len(images)}, {height}, {width}, {images.shape[3]}] on {images.device}, got {got}",
            remedy=remedy,
        )


def _image_fault(returned: object, images: torch.Tensor, size: tuple[int, int] | None) -> str:
    """Return what an augment function should do instead of `returned` for `images`; empty if it is right.

    Args:
        size: height and width to return; None: any.
    """
    if not isinstance(returned, torch.Tensor):
        return "return a torch tensor"
    channels = images.shape[3]
    shape = [*returned.shape] if returned.ndim == 4 else [0] * 4
    fault = ""
    if shape[1] == channels and shape[3] != channels:
        fault = "this is NCHW: return images.permute(0, 2, 3, 1), NHWC"
    elif shape[3] != channels:
        fault = "return NHWC, with as many channels as it was given"
    elif shape[0] != len(images):
        fault = "return as many pictures as it was given, in their order"
    elif returned.dtype != images.dtype:
        fault = "return uint8, 0-255, as it was given"
    elif returned.device != images.device:
        fault = "leave them on the device that they came on"
    elif size is not None and size != (shape[1], shape[2]):
        fault = "return the size that the loader was built with, or that of the first batch"
    return fault


PictureFunction: TypeAlias = Callable[..., Any]
"""Transform of one picture, see `per_picture`."""


def per_picture(transform: PictureFunction) -> "PerPicture":
    """Return `transform` as a value of `augment`: it is applied to each stored picture, where it is read.

    The loader then neither crops nor mirrors: all pictures of a batch must come from the transform in one
    size, that of `loaders.build` if it is given one. Several threads may call the transform at once, so it
    must not write to attributes of its own.

    What it gets:

        Albumentations   `transform(image=array)["image"]`, uint8 [height, width, channels]
        all others       a PIL image, as with ImageFolder: torchvision's v1 and v2, functions of your own

    What it draws depends on the loader's seed, epoch and sample alone, in any thread or process, for

        torch, so torchvision   in worker processes, see `Reading.engine`, all that draws on the CPU; in
                                threads only functions that take a generator and are given none, but for
                                `torch.randint_like`, and not in scripted modules
        Albumentations          from 1.4.24 on; each thread has a copy of the transform
        random, numpy.random    functions of the modules, `random.random()`, in worker processes; not in
                                threads, for which alone nobody can set these generators. torchvision's v1
                                `RandomOrder` and `RandomChoice` draw with `random`

    Generators that a function of your own makes or keeps are its own, and so is Albumentations within it.

    Args:
        transform: returns a tensor [channels, height, width], a PIL image, or an array [height, width,
            channels]; uint8, 0-255, or float16, float32 or float64, which are not normalised again, and are
            served in the loader's `dtype`.

    Raises:
        SettingError: it is not a function of one picture, or of an older Albumentations.
    """
    return PerPicture(transform)


class PerPicture:
    """Transform of one picture, applied by the threads that read; made by `per_picture`, which see.

    Attributes:
        name: name of the transform, for messages.
    """

    def __init__(self, transform: PictureFunction) -> None:
        self._transform, self.name = transform, _name(transform)
        if not callable(transform):
            raise SettingError(f"per_picture takes a transform of one picture, got {transform!r}")
        if isinstance(transform, type):
            raise SettingError(
                f"per_picture takes a transform of one picture, got the class {self.name}",
                remedy=f"give an instance of it, as {self.name}(...)",
            )
        self._check_signature()
        self._is_albumentations = _package(transform) == "albumentations"
        if self._is_albumentations and not hasattr(transform, "set_random_state"):
            raise SettingError(
                "per_picture: this version of Albumentations cannot be given a random state for each picture",
                remedy="pip install 'albumentations>=1.4.24'",
            )
        self._local = threading.local()  # of each thread: its generator, and its copy of the transform
        self._owns_process = False

    def __reduce__(self) -> tuple[Any, ...]:
        return PerPicture, (self._transform,)

    def own_process(self) -> None:
        """Seed the generators of the whole process, too, for each picture: one thread alone reads in it."""
        self._owns_process = True

    def check_pickles(self, method: str) -> None:
        """Raise SettingError if the transform cannot be sent to a process that `method` starts.

        Args:
            method: start method of multiprocessing, other than fork.
        """
        reason, sent = "", b""
        try:
            sent = pickle.dumps(self._transform)
        except Exception as error:  # of any type: it comes from the transform's own code, too
            reason = f"{type(error).__name__}: {error}"
        script = getattr(sys.modules["__main__"], "__file__", None)
        if b"__main__" in sent and not (script and Path(script).is_file()):
            reason = "it is defined in no file"
        if reason:
            raise SettingError(
                f"per_picture: {self.name} cannot be sent to worker processes, which this program starts by "
                f"{method!r} ({' '.join(reason.split())})",
                remedy="define it in a file, with 'def' or 'class' at the top level",
            )

    def _check_signature(self) -> None:
        """Raise SettingError if the transform cannot be called with a picture alone."""
        try:
            signature = inspect.signature(getattr(self._transform, "forward", self._transform))
        except ValueError:  # a function written in C has no signature
            return
        try:
            signature.bind("picture")
        except TypeError as error:
            raise SettingError(
                f"per_picture takes a transform of one picture; {self.name} takes {signature}",
                remedy="give a function of a whole batch as augment= itself, and other arguments by "
                "functools.partial",
            ) from error

    def apply(self, picture: Pixels, seed: int, epoch: int, key: int) -> torch.Tensor:
        """Call the transform with a picture, and return the picture that it made.

        What the transform raises is raised as it is.

        Args:
            picture: uint8 [height, width, channels], 1 channel or 3; it is not written to.
            seed: seed of the loader.
            epoch: epoch that the picture is served in.
            key: id of the sample, or a key of `draw_keys`.

        Returns:
            uint8 or floats [channels, height, width], in memory of its own.

        Raises:
            SettingError: the transform returned something else.
        """
        draw = uniforms(seed, epoch, np.array([key]), 1)[0, 0]
        picture_seed = int(draw * 2**53)  # all the bits of the draw
        mode = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._local.mode = _SeededDraws()
        mode.generator.manual_seed(picture_seed)
        if self._owns_process:
            torch.default_generator.manual_seed(picture_seed)
            random.seed(picture_seed)
            np.random.seed(picture_seed % 2**32)
        with mode:
            if self._is_albumentations:
                transform = self._seeded_copy(picture_seed)
                return self._as_tensor(transform(image=picture.copy())["image"])
            image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
            return self._as_tensor(self._transform(image))

    def stack(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the pictures that the transform made of a batch, [n, height, width, channels].

        Raises:
            SettingError: their shapes or dtypes differ.
        """
        kinds = {(*picture.shape, picture.dtype) for picture in pictures}
        if len(kinds) > 1:
            shapes = " and ".join(f"{kind[-1]} {[*kind[:-1]]}" for kind in sorted(kinds, key=str)[:2])
            raise SettingError(
                f"per_picture: {self.name} must return pictures of one shape and dtype, got {shapes}",
                remedy="end it with a crop or a resize to one size",
            )
        if not pictures:
            return torch.empty(0, 0, 0, 3, dtype=torch.uint8)
        return torch.stack([picture.permute(1, 2, 0) for picture in pictures])

    def _seeded_copy(self, picture_seed: int) -> Any:
        """Return this thread's copy of the Albumentations transform, whose draws begin anew."""
        transform: Any = getattr(self._local, "transform", None)
        if transform is None:
            transform = self._local.transform = copy.deepcopy(self._transform)
        # one state for all transforms; `set_random_seed` gives each the same one, so that all draw alike
        transform.set_random_state(np.random.default_rng(picture_seed), random.Random(picture_seed))
        return transform

    def _as_tensor(self, returned: object) -> torch.Tensor:
        """Return what the transform returned as a tensor, or raise SettingError."""
        picture: Any = returned
        if isinstance(picture, Image.Image):
            if picture.mode == "P":  # numbers of colours in a palette
                picture = picture.convert("RGB")
            picture = np.array(picture)
        if isinstance(picture, np.ndarray) and picture.ndim == 2:
            picture = picture[..., None]
        if isinstance(picture, np.ndarray) and picture.ndim == 3 and picture.dtype.kind in "uf":
            picture = torch.from_numpy(np.require(picture, requirements=("C", "W"))).permute(2, 0, 1)
            if picture.shape[1] in (1, 3) and picture.shape[0] > 4:
                self._refuse(returned, "return torch.from_numpy of an array [channels, height, width]")
        is_tensor = isinstance(picture, torch.Tensor) and picture.device.type == "cpu"
        if not (is_tensor and picture.ndim == 3 and picture.dtype in _DTYPES and picture.numel()):
            self._refuse(returned)
        # no subclass, as torchvision's `tv_tensors.Image` is
        tensor: torch.Tensor = picture.detach().as_subclass(torch.Tensor)
        return tensor

    def _refuse(self, returned: object, remedy: str = "") -> NoReturn:
        """Raise SettingError for what the transform returned."""
        got = type(returned).__name__
        if isinstance(returned, (torch.Tensor, np.ndarray)):
            got = f"{str(returned.dtype).removeprefix('torch.')} {[*returned.shape]}"
        if isinstance(returned, torch.Tensor) and returned.device.type != "cpu":
            got = f"{got} on {returned.device}"
        if isinstance(returned, Image.Image):
            got = f"a PIL image of mode {returned.mode}"
        if isinstance(returned, (tuple, list, dict)):
            remedy = "return the picture alone, or several views as one tensor, by torch.cat"
        raise SettingError(
            f"per_picture: {self.name} must return a CPU tensor [channels, height, width], a PIL image, "
            f"or an array [height, width, channels], of uint8, float16, float32 or float64; got {got}",
            remedy=remedy,
        )


_DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)
"""What a transform may return: dtypes that NumPy has, too, which worker processes send."""
_RANDOM_FUNCTIONS = {
    torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson,
    torch.rand, torch.randint, torch.randn, torch.randperm,
    torch._sample_dirichlet, torch._standard_gamma,  # of `torch.distributions`
    torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.cauchy_, torch.Tensor.exponential_,
    torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.multinomial, torch.Tensor.normal_,
    torch.Tensor.random_, torch.Tensor.uniform_,
}  # fmt: skip
"""Functions of torch that draw, and take a generator."""
_RANDOM_LIKE = {torch.rand_like: torch.Tensor.uniform_, torch.randn_like: torch.Tensor.normal_}
"""Functions that take no generator before torch 2.10 -> what fills an empty tensor with the same values."""


class _SeededDraws(TorchFunctionMode):
    """Gives torch's random functions a generator, within the block and in its thread alone.

    Attributes:
        generator: the generator, on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator(device="cpu")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with the generator if it draws on the CPU and is given none."""
        keywords = kwargs or {}
        if func not in _RANDOM_FUNCTIONS and func not in _RANDOM_LIKE:
            return func(*args, **keywords)
        device = keywords.get("device")
        if device is None:
            device = args[0].device if args and isinstance(args[0], torch.Tensor) else "cpu"
        if keywords.get("generator") is not None or torch.device(device).type != "cpu":
            return func(*args, **keywords)
        if func in _RANDOM_LIKE:
            return _RANDOM_LIKE[func](torch.empty_like(*args, **keywords), generator=self.generator)
        return func(*args, **{**keywords, "generator": self.generator})


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _package(function: object) -> str:
    """Return the package that a function, or the class of an object, comes from."""
    return (getattr(function, "__module__", None) or "").partition(".")[0]


Augment: TypeAlias = AugmentName | RandomAugmentation | BatchFunction | PerPicture | None
"""Type of `augment` of `loaders.build`."""


def find_augmentation(augment: Augment) -> RandomAugmentation | BatchFunction | PerPicture | None:
    """Return the settings or the function that `augment` names or is; None: the middle of each picture.

    Raises:
        SettingError: it is an unknown name, or something else.
    """
    if augment is None or isinstance(augment, (RandomAugmentation, PerPicture)):
        return augment
    if augment is RandomAugmentation or augment is per_picture:
        raise SettingError(f"augment is {_name(augment)} itself", remedy="call it, with its arguments")
    if isinstance(augment, str):
        if augment in ("three", "trivial") or augment.startswith("rand-"):
            raise SettingError(
                f"augment {augment!r} is a policy",
                remedy=f"give augment=loaders.RandomAugmentation(policy={augment!r})",
            )
        check_choice("augment", augment, AUGMENTATIONS)
        return AUGMENTATIONS[augment]
    if callable(augment):
        return augment
    raise SettingError(
        f"augment must be a name, a RandomAugmentation, a function, per_picture(...) or None, got "
        f"{augment!r}; names: {', '.join(AUGMENTATIONS)}"
    )
