"""`python -m bench` is the command `bench`."""

from bench.cli import entry_point

if __name__ == "__main__":
    entry_point()
