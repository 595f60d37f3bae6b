"""Reading what 'bench loaders --json' wrote."""

import json
from pathlib import Path

from bench.report.result import Result
from precache.errors import SettingError


def read_result(path: Path) -> Result:
    """The result in the file at `path`.

    Raises:
        SettingError: it cannot be read, or is not such a result.
    """
    remedy = "give a file of 'bench loaders --json'"
    try:
        return Result.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingError(f"{path}: cannot be read ({error.strerror})") from error
    except SettingError as error:  # before ValueError, which it is as well
        raise SettingError(f"{path}: {error}; {remedy}") from error
    except ValueError as error:
        raise SettingError(f"{path}: not JSON ({error}); {remedy}") from error
