"""CPUs of a process: masks, quotas at each level, launchers; in made trees, and in cages of this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from precache.engines import available_cpus
from precache.engines.cpus import count_cpus, count_local_ranks
from precache.errors import SettingError
from tests.command import ROOT

TABLE = [
    tuple(re.split(" {2,}", line.strip()))
    for line in str(count_cpus.__doc__).split("====\n")[2].splitlines()[:-1]
]
SLURM_NAMES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
PRINT = "from precache.engines import available_cpus; print(available_cpus())"


def write(root: Path, **files: str) -> None:
    """Write files below `root`; `__` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_process(root: Path, name: str, cpus: int, environment: str = "") -> None:
    status = f"Name:\tpython\nPPid:\t7\nCpus_allowed_list:\t0-{cpus - 1}\n"
    write(root / "proc" / name, status=status, environ=environment)


def make_cgroups(root: Path, version: int, path: str, mounted: str = "/") -> Path:
    """Describe the cgroup `path` of a process, and return the folder at which `mounted` is mounted."""
    where = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/cpu,cpuacct"
    kind, options = ("cgroup2", "rw,nsdelegate") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
    line = f"30 24 0:27 {mounted} {where} rw,relatime shared:9 - {kind} {kind} {options}\n"
    other = (
        "31 24 0:28 / / rw - ext4 /dev/vda rw\n32 24 0:29 / /sys/fs/cgroup/pids rw - cgroup pids rw,pids\n"
    )
    own = f"0::{path}\n" if version == 2 else f"4:cpu,cpuacct:{path}\n1:name=systemd:/else\n"
    write(root / "proc/self", cgroup=f"9:pids:/other\n{own}", mountinfo=other + line)
    return root / where.lstrip("/")


def set_quota(folder: Path, version: int, cpus: float | None) -> None:
    if version == 2:
        write(folder, **{"cpu.max": "max 100000\n" if cpus is None else f"{cpus * 1e5:.0f} 100000\n"})
    else:
        quota = "-1" if cpus is None else f"{cpus * 5e4:.0f}"
        write(folder, **{"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "50000\n"})


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_each_row_of_the_table_holds(row: tuple[str, ...], tmp_path: Path) -> None:
    case, *_ = row
    own, shared = int(row[1]), int(row[2])
    environment = {"SLURM_CPUS_PER_TASK": row[4].strip("-")}
    if case.startswith("torchrun"):
        environment |= {
            "LOCAL_WORLD_SIZE": row[5],
            "SLURM_STEP_TASKS_PER_NODE": "1" if "srun" in case else "",
        }
    elif case.startswith("srun"):
        environment |= {"SLURM_TASKS_PER_NODE": f"9,{row[5]}(x2)", "SLURM_NODEID": "2", "SLURM_STEP_ID": "0"}
        environment |= {"SLURM_CPUS_ON_NODE": str(shared)}
    elif tasks := re.search(r"for (\d+) tasks", case):
        environment |= {"SLURM_TASKS_PER_NODE": tasks[1], "SLURM_CPUS_ON_NODE": str(shared)}
    make_process(tmp_path, "thread-self", own)
    make_process(tmp_path, "self", own, "A=1\0LOCAL_RANK=0\0" if case.startswith("torchrun") else "")
    make_process(tmp_path, "7", shared, "MY_LOCAL_RANK=0\0")
    folder = make_cgroups(tmp_path, 2, "/")
    set_quota(folder, 2, None if row[3] == "-" else float(row[3]))
    assert count_cpus(tmp_path, environment) == int(row[6])
    assert count_local_ranks(environment) == int(row[5])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("level", ["", "job", "job/step", "job/step/task"])
def test_a_quota_counts_at_every_level_up_to_the_root(version: int, level: str, tmp_path: Path) -> None:
    make_process(tmp_path, "thread-self", 64)
    folder = make_cgroups(tmp_path, version, "/job/step/task")
    for name in ("", "job", "job/step", "job/step/task", "job/beside"):
        set_quota(folder / name, version, 5 if name == level else None)
    set_quota(folder / "job/beside", version, 1)
    assert count_cpus(tmp_path, {}) == 5


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/", "/"),  # a cgroup namespace
        ("/docker/a", "/docker/a"),  # Docker without one
        ("/docker/a/b", "/docker/a"),
        ("/docker/a", "/"),  # the container sees a path that is not mounted in it
        ("/../beside", "/"),
        ("/pod/b", "/pod/a"),
    ],
)
def test_a_quota_counts_where_a_container_mounts_it(
    version: int, path: str, mounted: str, tmp_path: Path
) -> None:
    make_process(tmp_path, "thread-self", 64)
    set_quota(make_cgroups(tmp_path, version, path, mounted), version, 3.9)
    assert count_cpus(tmp_path, {}) == 3


@pytest.mark.parametrize("name", SLURM_NAMES)
def test_each_variable_of_slurm_counts_tasks(name: str, tmp_path: Path) -> None:
    make_process(tmp_path, "thread-self", 64)
    write(tmp_path, sys__devices__system__cpu__online="0-31,64-95\n")  # half of the mask is offline
    step = {"SLURM_STEP_ID": "0"}
    assert count_cpus(tmp_path, {}) == 32
    assert count_cpus(tmp_path, {**step, name: "8"}) == 8
    assert count_cpus(tmp_path, {**step, name: "8", "LOCAL_WORLD_SIZE": "8"}) == 8  # a script sets it itself
    with pytest.raises(SettingError, match=f"{name} .*eight"):
        count_cpus(tmp_path, {**step, name: "eight"})


def test_nothing_of_linux_is_needed(tmp_path: Path) -> None:
    assert count_cpus(tmp_path, {}) >= 1
    assert available_cpus(ranks=10**6) == 1


def run_caged(*prefix: str, **environment: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCAL_"))}
    command = [*prefix, sys.executable, "-c", PRINT]
    return int(subprocess.check_output(command, env={**clean, **environment}, cwd=ROOT))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
def test_a_real_mask_counts() -> None:
    assert run_caged("taskset", "-c", str(min(os.sched_getaffinity(0)))) == 1


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """Make a cgroup below this process's own, where the system lets us."""
    parent = Path("/sys/fs/cgroup/cpu")
    folder = parent / f"precache-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup of version 1 can be made here")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("inner", [".", "inner"])
def test_a_real_quota_counts_in_its_cgroup_and_below(real_cgroup: Path, inner: str) -> None:
    (real_cgroup / "cpu.cfs_quota_us").write_text("100000")  # in 100,000 us: a CPU
    procs = real_cgroup / inner / "cgroup.procs"
    procs.parent.mkdir(exist_ok=True)
    try:
        assert run_caged("sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh") == 1
    finally:
        if inner != ".":
            procs.parent.rmdir()
