from pathlib import Path

import pytest


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Files that a scan takes for pictures, and nobody decodes."""
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(b"\xff\xd8\xff" + b"x" * number)
    return tmp_path
