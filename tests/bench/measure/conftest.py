import pytest

from tests.bench.measure.squares import Squares, make


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Squares:
    return make(tmp_path_factory.mktemp("squares"))
