"""What `precache auto` says: which settings fit a disk, why these, and what came of the prediction. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.findings.forecast import JPEG_NAMES, RAW_NAME, Inputs, Prediction
from bench.findings.stats import Estimate
from bench.findings.words import counted, duration, epochs, number
from precache.console.commandline import human_bytes

_SLACK = 1.1  # a hundred JPEGs tell the size of all of them to within a tenth
_CROP_ROOM = 8 / 7  # torchvision's recipe stores 256 for crops of 224


@dataclass(frozen=True, slots=True)
class Setting:
    """How pictures are stored: side of the square in pixels, JPEG quality."""

    stored_size: int
    quality: int

    def words(self, name: str) -> str:
        """Of the format `name`: '256 px, JPEG quality 90'."""
        return f"{self.stored_size} px" + (f", JPEG quality {self.quality}" if name in JPEG_NAMES else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, and which formats fit.

    Attributes:
        sizes: format -> bytes that it will take.
        formats: those that fit.
        first: whether no better setting was tried.
        limit: what they fit into, in words.
    """

    setting: Setting
    sizes: Mapping[str, float]
    formats: tuple[str, ...]
    first: bool
    limit: str


def settings(size: int) -> tuple[Setting, ...]:
    """For training at `size` pixels: from the one that keeps most of the pictures to the smallest."""
    room = round(size * _CROP_ROOM)
    return (Setting(room, 95), Setting(room, 90), Setting(room, 75), Setting(size, 75))


def needed_bytes(name: str, predicted: float) -> float:
    """Room for a format that is predicted to take `predicted` bytes: JPEGs may take a little more."""
    return predicted * _SLACK if name in JPEG_NAMES else predicted


def why(chosen: Prediction, predictions: Sequence[Prediction], inputs: Inputs, choice: Choice) -> list[str]:
    """Three lines: what it brings, what it costs, why it and not the others."""
    raw = next(found for found in predictions if found.name == RAW_NAME)
    limit = inputs.trainer_images_per_s * inputs.gpus
    others = [_instead(found) for found in predictions if found not in (raw, chosen)]
    others += [
        f"{name} would take {human_bytes(size)}, more than {choice.limit}"
        for name, size in choice.sizes.items()
        if name not in choice.formats
    ]
    return [
        f"Convert to {chosen.name}, {choice.setting.words(chosen.name)}: the trainer then gets "
        f"{chosen.trained_images_per_s:,.0f} images/s instead of {raw.trained_images_per_s:,.0f}; it takes "
        f"{limit:,.0f}.",
        f"Converting takes about {duration(chosen.conversion_s)} and {human_bytes(chosen.bytes)} of "
        f"{choice.limit}, and pays after {epochs(chosen.epochs_to_pay)}.",
        f"{_setting_reason(chosen.name, choice)}; {'; '.join(others) or 'no other format was asked for'}.",
    ]


def _setting_reason(name: str, choice: Choice) -> str:
    words = choice.setting.words(name)
    if choice.first:
        return f"{words}: room for random crops"
    return f"{words}: the most that fits"


def _instead(found: Prediction) -> str:
    return (
        f"{found.name} would take {human_bytes(found.bytes)} and {duration(found.conversion_s)}, and give "
        f"the trainer {found.trained_images_per_s:,.0f} images/s"
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """The tree and what was made of it, measured by turns.

    Attributes:
        before, after: images/s of the trainer, fed from the tree and from the dataset.
        times: after over before, turn by turn.
        busy_before, busy_after: share of the time, 0 to 1, that the trainer works.
        images: of an epoch.
        conversion_s: None where it was not all done by this run.
    """

    before: Estimate
    after: Estimate
    times: Estimate
    busy_before: float
    busy_after: float
    images: int
    conversion_s: float | None

    @property
    def is_loss(self) -> bool:
        """Whether the trainer gets less than before in every turn."""
        return self.times.high < 1

    def words(self) -> list[str]:
        """What was gained, a line each."""
        rates = f"the trainer gets {self.after.median:,.0f} images/s instead of {self.before.median:,.0f}"
        times, low, high = map(number, (self.times.median, self.times.low, self.times.high))
        if self.is_loss:
            return [f"Lost: {rates}, {times} times as many ({low} to {high})."]
        if self.times.low <= 1:
            return [f"Gained nothing that can be told from noise: {rates} ({low} to {high} times)."]
        saved_s = self.images * (1 / self.before.median - 1 / self.after.median)
        pays = ""
        if self.conversion_s is not None and saved_s > 0:
            after = counted(max(1, -int(-self.conversion_s // saved_s)), "epoch")
            pays = f"; converting took {duration(self.conversion_s)}, which pays after {after}"
        epoch = [duration(self.images / rate.median) for rate in (self.after, self.before)]
        return [
            f"Gained: {rates}, {times} times as many ({low} to {high}).",
            f"It works {self.busy_after:.0%} of the time instead of {self.busy_before:.0%}.",
            f"An epoch of {counted(self.images, 'picture')} takes {epoch[0]} instead of {epoch[1]}{pays}.",
        ]


def median_error(errors: Sequence[float]) -> float:
    """Of predictions: the median of how far each is off, as a share of what was measured."""
    return median(abs(error) for error in errors)
