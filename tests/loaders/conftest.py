import pytest

_OTHERS = ("keep-", "rectangle-", "grey-")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `of_squares` is `slow` of pictures of another shape."""
    for item in items:
        if item.get_closest_marker("of_squares") and any(other in item.name for other in _OTHERS):
            item.add_marker(pytest.mark.slow)
