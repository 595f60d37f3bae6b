import pytest

from bench.measure.training import MODELS
from tests.bench.measure.squares import Squares, make, tiny


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Squares:
    return make(tmp_path_factory.mktemp("squares"))


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", tiny)
