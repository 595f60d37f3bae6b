"""Programs that print the figures of README and of bench/results that no command of `bench` gives.

They run in a checkout, and are not installed.
"""
