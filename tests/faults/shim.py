"""Compile `shim.c`, which intercepts system calls, and control it in the processes that are attacked."""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COUNT, KILL_GROUP, KILL_SELF, FAIL, SHORT, TORN = range(6)
DST, SRC = 1, 2


def why_unavailable() -> str:
    """Reason why the shim cannot be used here; empty if it can."""
    if sys.platform != "linux":
        return "system calls are intercepted on Linux alone"
    if shutil.which("cc") is None:
        return "no C compiler (cc) to build the shim with"
    return ""


def build(folder: Path) -> Path:
    """Compile the shim into `folder`, unless it is there; return the library's path."""
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    if not library.exists():
        command = ["cc", "-O1", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
    return library


@dataclass(frozen=True, slots=True)
class Strike:
    """An action of the shim at one of the system calls on DST or SRC.

    Attributes:
        action: COUNT the calls only, or what to do at the call: KILL_GROUP, KILL_SELF, FAIL, SHORT or TORN.
        nth: number of the call, from 1.
        scope: whether calls on DST or on SRC count.
        error: errno of a call that fails.
        for_good: fail this call and all later ones, and not this one alone.
        changes: count only calls that change something; it is enough to kill at those.
    """

    action: int
    nth: int = 0
    scope: int = DST
    error: int = 0
    for_good: bool = False
    changes: bool = False


class _Shared(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_long),
        ("struck", ctypes.c_long),
        ("call", ctypes.c_char * 32),
        ("path", ctypes.c_char * 512),
    )


class Shim:
    """The shim in this process, which has loaded it with LD_PRELOAD.

    Args:
        destination: folder of the calls that count as DST.
        source: folder of the calls that count as SRC.
    """

    def __init__(self, destination: Path, source: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_share.restype = ctypes.POINTER(_Shared)
        # memory that processes find by this path as long as this one lives
        self._file = f"/proc/{os.getpid()}/fd/{os.memfd_create('faults')}"
        self._shared = self._library.faults_share(self._file.encode()).contents
        self._folders = (str(destination).encode(), str(source).encode())

    def activate(self, strike: Strike) -> None:
        """Attack this process, and processes that it starts, from now on."""
        os.environ["FAULTS_SHARED"] = self._file
        changes = strike.changes or strike.action in (KILL_GROUP, KILL_SELF, TORN, SHORT)
        self._library.faults_arm(
            *self._folders,
            strike.scope,
            int(changes),
            ctypes.c_long(strike.nth),
            strike.action,
            strike.error,
            int(strike.for_good),
        )

    def reset(self) -> None:
        """Count from zero; call it before the fork of the process that is attacked."""
        self._shared.count = self._shared.struck = 0
        self._shared.call = self._shared.path = b""

    @property
    def count(self) -> int:
        """Number of calls since `reset`."""
        return int(self._shared.count)

    @property
    def struck_call(self) -> str:
        """Name and file of the call at which the shim acted; empty if it did not."""
        return f"{self._shared.call.decode()} {Path(self._shared.path.decode()).name}".strip()
