"""Main memory that is free for a process is what its container leaves it."""

from pathlib import Path
from typing import Any

import pytest

from loaders.read import main_memory


def test_free_memory_respects_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training in a container would be killed otherwise; versions 1 and 2 of control groups differ."""

    def write(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")

    write("job", memory_max=3 << 20, memory_current=2 << 20, memory_stat="anon 5\ninactive_file 4096")
    write("job/step", memory_max="max", memory_current=1 << 20)
    write("memory/api", memory_limit_in_bytes=500_000, memory_usage_in_bytes=400_000)
    read = main_memory._read
    monkeypatch.setattr(main_memory, "_CGROUPS", tmp_path)
    for own, free, limit in (
        ("0::/job/step\n", (1 << 20) + 4096, 3 << 20),
        ("9:cpu:/x\n4:memory:/api\n0::/\n", 100_000, 500_000),
    ):

        def read_simulated(path: Any, own: str = own) -> Any:
            return own if str(path) == "/proc/self/cgroup" else read(path)

        monkeypatch.setattr(main_memory, "_read", read_simulated)
        assert main_memory.free_memory() == (free, limit)
