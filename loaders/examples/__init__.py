"""Whole trainings, a file each, to run or to copy: `python -m loaders.examples.train --help`.

A copied file runs as it is: what all of them share, `common`, is found where `loaders` is installed.
"""

from precache.packages import check_package

try:
    import torchvision  # noqa: F401
except ImportError as error:
    check_package(error, "loaders.examples", "loaders")
    raise
