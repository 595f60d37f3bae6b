"""Kill a conversion into a URL at its N-th request to the storage, for every N. Run as a script: it forks.

    python -m tests.killing_uploads TREE FOLDER s3://BUCKET [FIRST STEP]

Odd moments are before the request is sent, even ones when it was answered. Prints how many there were; an
AssertionError says at which one something was lost, or left.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import boto3

from precache import convert
from precache.conversion.lock import lock_path
from precache.conversion.url import working_folder
from precache.storage.urls import Url
from tests.killing import contents, in_a_fork, recipe


def _arm(kill_at: int) -> None:
    from precache.storage import objects

    left, inner = kill_at, objects.asked

    def counted(where: Any, patience: Any, once: Any, *check: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and kill_at % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return inner(where, patience, once, *check)
        finally:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    objects.asked = counted


def _convert(tree: Path, url: Url, kill_at: int = 0) -> None:
    if kill_at:
        _arm(kill_at)
    convert(tree, url, recipe(24), workers=0)


def attack(tree: Path, folder: Path, url: Url, first: int = 1, step: int = 1) -> int:
    """Kill at each request, or each `step`th from `first` on, then run the same command; the last request."""
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])  # no threads: it forks

    def objects(prefix: str) -> dict[str, bytes]:
        listed = client.list_objects_v2(Bucket=url.name, Prefix=f"{prefix}/").get("Contents", [])
        bodies = {
            one["Key"]: client.get_object(Bucket=url.name, Key=one["Key"])["Body"].read() for one in listed
        }
        return {key.removeprefix(f"{prefix}/"): body for key, body in bodies.items()}

    convert(tree, folder / "expected", recipe(24), workers=0)
    expected = contents(folder / "expected")
    for moment in range(first, 10_000, step):
        place = url / f"moment-{moment}"
        whole = in_a_fork(lambda moment=moment, place=place: _convert(tree, place, moment))  # type: ignore[misc]
        left = objects(place.key)
        if "dataset.json" in left:
            assert left == expected, f"request {moment}: {sorted(left)}"
        assert whole or in_a_fork(lambda place=place: _convert(tree, place))  # type: ignore[misc]
        assert objects(place.key) == expected, f"request {moment}: {sorted(objects(place.key))}"
        here = working_folder(place)
        assert not here.exists(), f"request {moment}: {sorted(here.iterdir())}"
        assert not lock_path(here).exists(), f"request {moment}"
        if whole:
            return moment
    raise AssertionError("it does not end")


if __name__ == "__main__":
    bucket = Url("s3://" + sys.argv[3].removeprefix("s3://"))
    print(attack(Path(sys.argv[1]), Path(sys.argv[2]), bucket, *map(int, sys.argv[4:])))
