"""What `precache auto` says: which settings fit a disk, why these, and what came of the prediction. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.report.advice import answer
from bench.report.forecast import AS_IT_IS, JPEG_NAMES, Inputs, Prediction
from bench.report.payback import LINE, Way, advice, does
from bench.report.stats import Estimate
from bench.report.words import duration, number
from precache.console.commandline import human_bytes
from precache.images import MAX_SIZE

RISK = (
    "Storing less than twice the side that is trained can cost accuracy: with random crops from 8/7 of it, "
    "models were 1.5 to 2.1 points of top-1 worse than from ImageFolder (Caltech-101, 64 px); from twice the "
    "side no difference could be told."
)
_SHOWN = 0.875  # of the shorter side, in validation: the least that shows it without enlarging
_SLACK = 1.1  # a hundred pictures tell the size of all of them to within a tenth


def stored_size(size: int) -> int:
    """Of pictures for training at `size` pixels: the most that the shorter side keeps, see RISK."""
    return min(2 * size, MAX_SIZE)


@dataclass(frozen=True, slots=True)
class Setting:
    """How pictures are stored: the most that the shorter side keeps, in pixels, and JPEG quality."""

    stored_size: int
    quality: int

    def words(self, name: str) -> str:
        """Of the format `name`: 'at most 448 px, JPEG quality 90'."""
        quality = f", JPEG quality {self.quality}" if name in JPEG_NAMES else ""
        return f"at most {self.stored_size} px{quality}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, and which formats fit.

    Attributes:
        sizes: format -> bytes that it will take.
        formats: those that fit.
        first: whether it is the best setting.
        limit: what they fit into, in words.
    """

    setting: Setting
    sizes: Mapping[str, float]
    formats: tuple[str, ...]
    first: bool
    limit: str


def settings(size: int) -> tuple[Setting, ...]:
    """For training at `size` pixels: from the one that keeps most of the pictures to the smallest."""
    whole = stored_size(size)
    return (Setting(whole, 95), Setting(whole, 90), Setting(whole, 75), Setting(round(size / _SHOWN), 75))


def needed_bytes(predicted: float) -> float:
    """Room for what is predicted to take `predicted` bytes: it may be a little more."""
    return predicted * _SLACK


def why(
    chosen: Prediction, predictions: Sequence[Prediction], inputs: Inputs, choice: Choice, size: int
) -> list[str]:
    """Three lines: what it brings and costs, how pictures are stored, why it and not the others.

    Args:
        size: of training, in pixels.
    """
    others = [_instead(found) for found in predictions if found is not chosen and found.name not in AS_IT_IS]
    others += [
        f"{name} would take {human_bytes(size)}, more than {choice.limit}"
        for name, size in choice.sizes.items()
        if name not in choice.formats
    ]
    room = "twice the side that is trained, within" if choice.first else "the most that fits into"
    risk = f" {RISK}" if choice.setting.stored_size < stored_size(size) else ""
    return [
        answer(list(predictions), inputs),
        f"Pictures are stored whole, their shorter side {choice.setting.words(chosen.name)}: {room} "
        f"{choice.limit}.{risk}",
        f"Instead, {'; '.join(others)}." if others else "No other format was asked for.",
    ]


def _instead(found: Prediction) -> str:
    return (
        f"{found.name} would take {human_bytes(found.bytes)} and {duration(found.conversion_s)}, and give "
        f"the trainer {found.trained_images_per_s:,.0f} images/s"
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """The trainer fed from the tree as people do today, by `loaders.build`, and from the dataset, by turns.

    Attributes:
        today, line, converted: what each gave, in medians; `line` None where today's could not be measured,
            and `loaders.build` stands for it.
        line_gains: whether `line` gave more than today's in every turn.
        over_today, over_line: images/s from the dataset over those from the tree, turn by turn.
        images: of an epoch.
    """

    today: Way
    line: Way | None
    converted: Way
    line_gains: bool
    over_today: Estimate
    over_line: Estimate
    images: int

    @property
    def is_loss(self) -> bool:
        """Whether the trainer gets less from the dataset than from its tree in every turn."""
        return self.over_line.high < 1

    def words(self, accelerator: str) -> list[str]:
        """What was gained, a line each."""
        rates = (
            f"from {self.converted.name} the trainer gets {self.converted.images_per_s:,.0f} images/s, by "
            f"{LINE} from the tree {(self.line or self.today).images_per_s:,.0f} "
            f"({number(self.over_line.low)} to {number(self.over_line.high)} times)"
        )
        gains = self.over_line.low > 1 and self.over_today.low > 1
        line = self.line if self.line_gains else None
        said = [
            f"Measured: {does(self.today, accelerator)}.",
            *advice(self.today, line, [self.converted] if gains else [], self.images),
        ]
        if gains:
            low, high = map(number, (self.over_today.low, self.over_today.high))
            said.append(f"Turn by turn the trainer got {low} to {high} times as many images/s as today.")
        if self.is_loss:
            said.append(f"Converting lost: {rates}.")
        elif not gains:
            said.append(f"Converting gained nothing that can be told from noise: {rates}.")
        return said


def median_error(errors: Sequence[float]) -> float:
    """Of predictions: the median of how far each is off, as a share of what was measured."""
    return median(abs(error) for error in errors)
