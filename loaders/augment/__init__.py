"""What is done to pictures on their way: `draw` says what (pure), `cpu` and `device` do it."""

from loaders.augment.device import NAMES, BatchFunction
from loaders.augment.draw import RandomAugmentation

__all__ = ["NAMES", "BatchFunction", "RandomAugmentation"]
