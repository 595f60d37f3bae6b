"""Ends with whoever started it: `python -m bench.evidence.guard ARGUMENTS` runs `python ARGUMENTS`.

Started as the leader of a process group, with a pipe as its stdin that its parent holds open and never
writes to. When the parent is gone, however it went, the pipe ends, and the whole group is killed: a step
that nobody waits for would take the GPU from the next one.
"""

import os
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    os.read(0, 1)  # returns when the last writer is gone
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the program, and return its exit code as a shell does."""
    threading.Thread(target=_watch, daemon=True).start()
    code = subprocess.call([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
