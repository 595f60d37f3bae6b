"""Attacks on conversions, data and loaders; each case is repeatable by its seed, see `__main__`."""
