"""What to do about a tree of pictures, in words, from the predictions of `bench recommend`. Pure."""

from collections.abc import Sequence

from bench.report import forecast as model
from bench.report.forecast import AS_IT_IS, JPEG_NAMES, RAW_NAME, TODAY_NAME, WORTH_IT, Inputs, Prediction
from bench.report.payback import LINE, TODAY, Cost, Way, advice, does
from bench.report.words import percent
from precache.console.commandline import human_bytes

PLAIN_RULE = (
    "Rule: plenty of disk: shards; slow or small disk: webdataset; "
    "loaders.build keeps up on the tree: convert nothing."
)
AS_WORDS = {TODAY_NAME: TODAY, RAW_NAME: LINE}
"""Of predictions, where a format is called by its name."""


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
    free = [found for found in predictions if found.name in AS_IT_IS]
    today, now = way(free[0], inputs), as_it_is(predictions, inputs)
    if advised is free[0]:
        if keeps_up(advised, inputs):
            already = does(today, accelerator(inputs), already=True)
            return f"{already}: neither another loader nor converting gains anything."
        return f"{now} Neither another loader nor converting would train more than {WORTH_IT:.0%} faster."
    if is_unclear(advised, turns):
        name = way(advised, inputs).name
        return (
            f"{now} Unclear, within noise: whether {name} is faster, for the {len(turns)} repeats disagree."
        )
    lines = [way(found, inputs) for found in free[1:] if _is_faster(found, free[0])]
    converted = [] if advised in free else [way(advised, inputs)]
    said = [now, *advice(today, lines[0] if lines else None, converted, inputs.train_images)]
    if not converted and len(predictions) > len(free):
        said.append("Converting gains no more.")
    return " ".join(said)


def way(found: Prediction, inputs: Inputs) -> Way:
    """A prediction as one way to feed the trainer."""
    cost = None if found.name in AS_IT_IS else Cost(found.conversion_s, found.bytes)
    name = AS_WORDS.get(found.name, found.name)
    return Way(name, found.trained_images_per_s, busy_share(found, inputs), cost)


def accelerator(inputs: Inputs) -> str:
    """What is fed, in words."""
    one = f"{inputs.trainer_images_per_s:,.0f} images/s"
    return f"an accelerator of {one}" if inputs.gpus == 1 else f"{inputs.gpus} accelerators of {one}"


def is_unclear(advised: Prediction, turns: Sequence[list[Prediction]]) -> bool:
    """Whether the predictions from each repeat alone disagree on it being faster than what costs less."""
    names = AS_IT_IS[:1] if advised.name in AS_IT_IS else AS_IT_IS
    gains = [
        _rate(turn, advised.name) / max(found.trained_images_per_s for found in turn if found.name in names)
        for turn in turns
    ]
    return len(gains) > 1 and min(gains) <= 1


def as_it_is(predictions: list[Prediction], inputs: Inputs) -> str:
    """What people have today does."""
    return f"{does(way(predictions[0], inputs), accelerator(inputs))}."


def _is_faster(found: Prediction, than: Prediction) -> bool:
    return found.trained_images_per_s > than.trained_images_per_s * (1 + WORTH_IT)


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
        here = "here it does" if keeps_up(raw, inputs) else "here it does not"
        busy = f"trainer busy {percent(busy_share(raw, inputs))}"
        parts.append(f"loaders.build keeps up on the tree: convert nothing ({here}: {busy})")
    return f"Rule: {'; '.join(parts)}."


def jpeg_format(predictions: list[Prediction]) -> Prediction | None:
    """Of the formats that hold JPEGs the one that trains fastest; None if none was measured."""
    found = [prediction for prediction in predictions if prediction.name in JPEG_NAMES]
    return max(found, key=lambda one: one.trained_images_per_s, default=None)


def _costs(found: Prediction, inputs: Inputs) -> str:
    return f"{human_bytes(found.bytes)}, trainer busy {percent(busy_share(found, inputs))}"


def _named(predictions: list[Prediction], name: str) -> Prediction | None:
    return next((found for found in predictions if found.name == name), None)


def _rate(predictions: list[Prediction], name: str) -> float:
    return next(found.trained_images_per_s for found in predictions if found.name == name)
