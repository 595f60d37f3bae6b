"""The C part, `shim.c`: compiled where there is a compiler, loaded by the processes that are attacked."""

import ctypes
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COUNT, KILL_GROUP, KILL_SELF, FAIL, SHORT, TORN = range(6)
DST, SRC = 1, 2


def missing() -> str:
    """Why there can be no shim here; empty if there can."""
    if sys.platform != "linux":
        return "system calls are intercepted on Linux alone"
    return "" if shutil.which("cc") else "no C compiler (cc) to build the shim with"


def build(folder: Path) -> Path:
    """Compile it into `folder`, unless it is there."""
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    if not library.exists():
        command = ["cc", "-O1", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
    return library


@dataclass(frozen=True, slots=True)
class Strike:
    """What to do at which call.

    Attributes:
        nth: from 1 on.
        changes: count calls that change something, no others; killing at those is enough.
        for_good: fail from then on, not once.
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
    """The shim as it was loaded into this process with LD_PRELOAD.

    Args:
        destination, source: what is done below the one counts as DST, below the other as SRC.
    """

    def __init__(self, destination: Path, source: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_share.restype = ctypes.POINTER(_Shared)
        self._shared = self._library.faults_share().contents
        self._folders = (str(destination).encode(), str(source).encode())

    def arm(self, strike: Strike) -> None:
        """Attack this process, and what it forks, from now on."""
        changes = strike.changes or strike.action in (KILL_GROUP, KILL_SELF, TORN, SHORT)
        nth, for_good = ctypes.c_long(strike.nth), int(strike.for_good)
        how = (strike.scope, int(changes), nth, strike.action, strike.error, for_good)
        self._library.faults_arm(*self._folders, *how)

    def reset(self) -> None:
        """Count from zero; for this process, before it forks the one that is armed."""
        self._shared.count = self._shared.struck = 0
        self._shared.call = self._shared.path = b""

    @property
    def count(self) -> int:
        """Calls since `reset`."""
        return int(self._shared.count)

    @property
    def struck(self) -> str:
        """The call that was spoilt; empty if none was."""
        return f"{self._shared.call.decode()} {Path(self._shared.path.decode()).name}".strip()
