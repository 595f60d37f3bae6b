"""The files that SageMaker writes for every image."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_job(
    ml: Path, channels: Iterable[str] = (), hyperparameters: Mapping[str, str] | None = None, **resources: Any
) -> Path:
    """Write those of one host, or what `resources` says, into the folder `ml`, which is returned."""
    config = ml / "input/config"
    config.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "resourceconfig": {"hosts": ["algo-1"], "current_host": "algo-1", **resources},
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
        "hyperparameters": dict(hyperparameters or {}),
    }.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    return ml
