"""CPUs that this process may use: by its affinity mask, its cgroups and what launched it.

The files of Linux that say so are read below a folder, which is `/` but in tests.

    own        CPUs of this process's affinity mask; without one, CPUs of the machine
    shared     CPUs that the ranks of this machine share: under Slurm SLURM_CPUS_ON_NODE, else the machine's;
               under torchrun those of its own mask, which is the one that ranks have if nothing divides it
    quota      CPUs of the smallest quota of a cgroup, from the process's own up to the root that is mounted
    per task   SLURM_CPUS_PER_TASK
    ranks      LOCAL_WORLD_SIZE of torchrun, or what srun has started on this node: SLURM_STEP_TASKS_PER_NODE,
               SLURM_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE; the larger, where both are set. A script that
               sbatch starts runs once, and may use the CPUs of all tasks

A rank has the smallest of `own`, `shared / ranks`, `quota / ranks` and its part of `per task`. So a mask that
is divided already, as by `torchrun --numa-binding` or by an srun that binds its tasks, is not divided again.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from precache.errors import SettingError

_ROOT = Path("/")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_STEP = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID")


def available_cpus(ranks: int | None = None) -> int:
    """Return the number of CPUs that this process may use, at least 1.

    Args:
        ranks: number of processes that share the CPUs of this machine; None: as many as were launched.

    Raises:
        SettingError: a variable of the launcher is no integer.
    """
    return count_cpus(_ROOT, os.environ, ranks)


def count_cpus(root: Path, environment: Mapping[str, str], ranks: int | None = None) -> int:
    """Return the CPUs of a process, as `available_cpus` does, by the files below `root`.

    ==========================================  ===  ======  =====  ========  =====  ====
    case                                        own  shared  quota  per task  ranks  CPUs
    ==========================================  ===  ======  =====  ========  =====  ====
    nothing limits it                            64      64      -         -      1    64
    taskset, or a container's cpuset              4       4      -         -      1     4
    container with a quota                       64      64      4         -      1     4
    container with less than a CPU               64      64    0.5         -      1     1
    torchrun                                     64      64      -         -      8     8
    torchrun in a container with a quota         64      64     20         -      8     2
    torchrun below taskset                        8       8      -         -      8     1
    torchrun --numa-binding node, two nodes      32      64      -         -      8     8
    torchrun --numa-binding exclusive             8      64      -         -      8     8
    srun that binds its tasks                     8      64      -         8      8     8
    srun that binds none                         64      64      -         8      8     8
    srun that binds none, without -c             16      16      -         -      4     4
    srun with more tasks than CPUs                2       2      -         1      8     1
    srun on a machine that confines nobody      128      64      -        16      4    16
    torchrun, once on each node by srun          64      64      -        32      8     4
    one task with --cpus-per-task                64      64      -        16      1    16
    a batch script for 8 tasks, without srun     64      64      -         8      1    64
    a batch script for 16 tasks, without srun    16      16      -         -      1    16
    ==========================================  ===  ======  =====  ========  =====  ====
    """
    own = _mask_size(root, "thread-self") or _affinity()
    tasks = _started_tasks(environment)
    launched = read_launcher("LOCAL_WORLD_SIZE", 1, environment=environment)
    sharing = max(tasks, launched) if ranks is None else ranks
    if tasks > 1:
        shared = read_launcher("SLURM_CPUS_ON_NODE", _machine_cpus(root), environment=environment)
    elif launched > 1:
        shared = _launcher_mask_size(root) or own
    else:
        shared = own
    limits = [own, shared / sharing]
    if (quota := cpu_quota(root)) is not None:
        limits.append(quota / sharing)
    if per_task := read_launcher("SLURM_CPUS_PER_TASK", 0, environment=environment):
        limits.append(per_task * _slurm_tasks(environment) / sharing)
    return max(1, int(min(limits)))


def count_local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks were launched on this machine, this one included; 1 if nothing was launched."""
    launched = read_launcher("LOCAL_WORLD_SIZE", 1, environment=environment)
    return max(_started_tasks(environment), launched)


def read_launcher(
    name: str, default: int, minimum: int = 1, environment: Mapping[str, str] = os.environ
) -> int:
    """Return the integer that torchrun, or another launcher, has put into the environment as `name`.

    Returns:
        `default` if the variable is missing, empty or below `minimum`: scripts set 0 processes, or rank -1,
        if nothing was launched.

    Raises:
        SettingError: it is no integer.
    """
    text = environment.get(name, "").strip()
    try:
        number = int(text) if text else default
    except ValueError:
        raise _launcher_error(name, text, "an integer") from None
    return number if number >= minimum else default


def _launcher_error(name: str, text: str, expected: str) -> SettingError:
    return SettingError(
        f"{name} in the environment must be {expected}, got {text!r}",
        remedy="unset it, or start with torchrun",
    )


def _started_tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks srun has started on this node; 1 where it has started none."""
    return _slurm_tasks(environment) if any(environment.get(name) for name in _STEP) else 1


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return how many tasks Slurm has room for on this node; 1 where the job is none of Slurm's."""
    name = next((name for name in _TASKS if environment.get(name)), "")
    counts: list[int] = []
    for word in environment[name].split(",") if name else ():
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", word)  # 8(x2),4: the third node has 4
        if match is None:
            raise _launcher_error(name, environment[name], "counts such as 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    node = read_launcher("SLURM_NODEID", 0, 0, environment)
    return max(1, counts[min(node, len(counts) - 1)]) if counts else 1


def _affinity() -> int:
    """Return the CPUs in this process's mask by the system's call; without masks, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine_cpus(root: Path) -> int:
    """Return the number of CPUs of the machine."""
    return len(_online(root)) or os.cpu_count() or 1


def _online(root: Path) -> set[int]:
    return _listed(_read(root / "sys/devices/system/cpu/online"))


def _mask_size(root: Path, process: str) -> int | None:
    """Return the number of CPUs in the affinity mask of a process, without those that are offline."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(root / "proc" / process / "status"), re.MULTILINE)
    if match is None:
        return None
    allowed = _listed(match[1])
    return len(allowed & (_online(root) or allowed))


def _listed(cpus: str) -> set[int]:
    """Return CPUs listed as the kernel does: '0-3,8' are five."""
    ends = [part.split("-") for part in cpus.split(",") if part.strip()]
    return {cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)}


def _launcher_mask_size(root: Path) -> int | None:
    """Return the number of CPUs in the mask of the nearest ancestor that was not started as a rank."""
    process = "self"
    while "\0LOCAL_RANK=" in "\0" + _read(root / "proc" / process / "environ"):
        match = re.search(r"^PPid:\s*(\d+)", _read(root / "proc" / process / "status"), re.MULTILINE)
        if match is None:
            return None
        process = match[1]
    return _mask_size(root, process)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPUs that the processes of this one's cgroups may use together; None without a quota."""
    return min((quota for quota in map(_quota, _cgroup_folders(root)) if quota is not None), default=None)


def throttled_periods(root: Path = _ROOT) -> dict[Path, tuple[int, int]]:
    """Return how many periods of its quota each cgroup had so far, and in how many of them it was used up."""
    periods = {}
    for folder in _cgroup_folders(root):
        counts = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "cpu.stat"), re.MULTILINE))
        periods[folder] = int(counts.get("nr_periods", 0)), int(counts.get("nr_throttled", 0))
    return periods


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, in hierarchies that limit CPUs.

    A container sees its own cgroup, or one above it, as the root of the mounted hierarchy.
    """
    cgroups: dict[str, str] = {}  # path in the hierarchy by controller; '' is that of version 2
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, cgroup = line.split(":", 2)
        cgroups.update(dict.fromkeys(controllers.split(","), cgroup))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, folder = before.split()[3:5]
        kind, *_, options = after.split()
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        cgroup = cgroups.get("cpu" if kind == "cgroup" else "", "")
        inside = os.path.relpath(cgroup or mounted, mounted)
        top = root / folder.lstrip("/")
        below = top if inside.startswith("..") or ".." in cgroup else top / inside
        yield from (level for level in (below, *below.parents) if level.is_relative_to(top))


def _quota(cgroup: Path) -> float | None:
    """Return the CPUs that a cgroup's processes may use together; None without a quota."""
    words = _read(cgroup / "cpu.max").split()  # version 2: 'max 100000' or '200000 100000'
    if not words:
        words = [*_read(cgroup / "cpu.cfs_quota_us").split(), *_read(cgroup / "cpu.cfs_period_us").split()]
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    """Return the text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
