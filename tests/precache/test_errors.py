"""Errors are data: what is at fault, what is wrong, what to do."""

import pickle
from pathlib import Path

import pytest

from precache import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
ERRORS = [kind for kind in KINDS if issubclass(kind, errors.PrecacheError)]
PICTURES = [kind for kind in ERRORS if issubclass(kind, errors.ImageError)]


def make(kind: type[errors.PrecacheError], path: Path) -> errors.PrecacheError:
    if kind in PICTURES:
        return kind(str(path), "is damaged", remedy="convert again")
    return kind("is damaged", path=path, remedy="convert again")


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_survives_pickling_with_its_path_and_remedy(kind: type[errors.PrecacheError]) -> None:
    error = make(kind, Path("data/a\nb"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.path, again.remedy) == (error.path, "convert again")
    assert str(again) == str(error) == r"data/a\nb: is damaged; convert again"
    assert again.without_remedy == r"data/a\nb: is damaged"


@pytest.mark.parametrize("kind", ERRORS)
def test_a_data_loader_reraises_an_error_with_the_same_text(kind: type[errors.PrecacheError]) -> None:
    error = make(kind, Path("data/a"))
    text = f"Caught {kind.__name__} in DataLoader worker process 0.\nTraceback\n{kind.__name__}: {error}"
    assert str(kind(text)) == str(error)
