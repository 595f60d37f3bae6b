"""Attacks: pictures, folders, journals, kills, errors of the system, races, loaders; by seed and count.

Each module here named in `tests.faults.__main__.ATTACKS` is one. Its `case(world, seed, folder)` does one
attack and says how it ended; `attack(seed, count, tmp_path)` does those of the seeds from `seed` on.
"""
