"""Whole trainings, a file each, to run or to copy: `python -m loaders.examples.train --help`.

A copied file runs as it is: what they share, `common` and `models`, is found where `loaders` is installed.
"""
