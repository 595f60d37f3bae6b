"""`python -m precache` is the command `precache`."""

from precache.cli import entry_point

if __name__ == "__main__":
    entry_point()
