"""What to do about a tree of pictures, in words, from the predictions of `bench recommend`. Pure."""

from collections.abc import Sequence

from bench.findings import forecast as model
from bench.findings.forecast import JPEG_NAMES, RAW_NAME, WORTH_IT, Inputs, Prediction
from bench.findings.words import duration, epochs
from precache.console.commandline import human_bytes

PLAIN_RULE = (
    "Rule: plenty of disk: shards; slow or small disk: webdataset; "
    "the tree keeps up already: convert nothing."
)


def busy_share(found: Prediction, inputs: Inputs) -> float:
    """Share of its time, 0 to 1, that the trainer works when `found` feeds it."""
    return min(1.0, found.trained_images_per_s / (inputs.trainer_images_per_s * inputs.gpus))


def keeps_up(found: Prediction, inputs: Inputs) -> bool:
    """Whether the trainer hardly ever waits for it."""
    return busy_share(found, inputs) >= 1 - WORTH_IT


def answer(predictions: list[Prediction], inputs: Inputs, turns: Sequence[list[Prediction]] = ()) -> str:
    """What to do, first of all that is printed.

    Args:
        turns: the predictions from each repeat alone; where they disagree, that is said.
    """
    advised = model.best(predictions)
    raw = _named(predictions, RAW_NAME)
    if advised is raw or raw is None:
        return _leave(raw or advised, inputs)
    if is_unclear(advised, turns):
        return (
            f"Unclear, within noise: {advised.name} gives the trainer "
            f"{advised.trained_images_per_s:,.0f} images/s, the tree as it is "
            f"{raw.trained_images_per_s:,.0f}, and the {len(turns)} repeats disagree on which is faster."
        )
    limit = inputs.trainer_images_per_s * inputs.gpus
    return (
        f"Convert to {advised.name}: the trainer then gets {advised.trained_images_per_s:,.0f} images/s "
        f"instead of {raw.trained_images_per_s:,.0f}; it takes {limit:,.0f}. Converting once takes "
        f"{duration(advised.conversion_s)} and {human_bytes(advised.bytes)}, and pays after "
        f"{epochs(advised.epochs_to_pay)}."
    )


def is_unclear(advised: Prediction, turns: Sequence[list[Prediction]]) -> bool:
    """Whether the predictions from each repeat alone disagree on it being faster than the tree."""
    gains = [_rate(turn, advised.name) / _rate(turn, RAW_NAME) for turn in turns]
    return len(gains) > 1 and min(gains) <= 1


def as_it_is(predictions: list[Prediction], inputs: Inputs) -> str:
    """What the tree does, and a space, before a sentence on why no format is named; empty if not measured."""
    raw = _named(predictions, RAW_NAME)
    if raw is None:
        return ""
    return f"The tree as it is keeps the trainer busy {busy_share(raw, inputs):.0%} of the time. "


def _leave(raw: Prediction, inputs: Inputs) -> str:
    busy = f"{busy_share(raw, inputs):.0%}"
    if keeps_up(raw, inputs):
        return f"Convert nothing: the tree as it is keeps the trainer busy {busy} of the time."
    return (
        f"Convert nothing: the tree as it is keeps the trainer busy {busy} of the time, and no format "
        f"would train more than {WORTH_IT:.0%} faster."
    )


def rule(predictions: list[Prediction], inputs: Inputs, crossover: float | None) -> str:
    """Which format is for whom, with this tree's figures; none where only the tree was measured.

    Args:
        crossover: disk rate in bytes/s below which the JPEG format loads faster than shards, cold; None if
            it always does.
    """
    parts = []
    shards, raw = _named(predictions, "shards"), _named(predictions, RAW_NAME)
    encoded = jpeg_format(predictions)
    if shards is not None:
        parts.append(f"plenty of disk: shards ({_costs(shards, inputs)})")
    if encoded is not None:
        text = f"slow or small disk: {encoded.name} ({_costs(encoded, inputs)})"
        if shards is not None and crossover is not None:
            text += (
                f", faster than shards from a cold disk below {crossover / 1e6:,.0f} MB/s, and this one "
                f"gives {inputs.disk_bytes_per_s / 1e6:,.0f}"
            )
        parts.append(text)
    if raw is not None:
        does = "this tree does" if keeps_up(raw, inputs) else "this tree does not"
        busy = f"trainer busy {busy_share(raw, inputs):.0%}"
        parts.append(f"the tree keeps up already: convert nothing ({does}: {busy})")
    return f"Rule: {'; '.join(parts)}."


def jpeg_format(predictions: list[Prediction]) -> Prediction | None:
    """Of the formats that hold JPEGs the one that trains fastest; None if none was measured."""
    found = [prediction for prediction in predictions if prediction.name in JPEG_NAMES]
    return max(found, key=lambda one: one.trained_images_per_s, default=None)


def _costs(found: Prediction, inputs: Inputs) -> str:
    return f"{human_bytes(found.bytes)}, trainer busy {busy_share(found, inputs):.0%}"


def _named(predictions: list[Prediction], name: str) -> Prediction | None:
    return next((found for found in predictions if found.name == name), None)


def _rate(predictions: list[Prediction], name: str) -> float:
    return next(found.trained_images_per_s for found in predictions if found.name == name)
