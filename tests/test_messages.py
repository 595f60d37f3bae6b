"""Help and messages of all commands stand whole in one file; other tests ask for attributes of errors."""

import pytest

from tests.messages import GOLDEN, answers, help_commands


@pytest.fixture(scope="module")
def printed() -> str:
    return answers()


def test_commands_print_what_the_golden_file_says(printed: str) -> None:
    """Run `python -m tests.messages` after a change that is meant, and read the difference."""
    assert printed == GOLDEN.read_text()


def test_no_mistake_ends_as_if_the_job_were_done(printed: str) -> None:
    assert printed.count("[exit code 0]") == len(list(help_commands()))
    assert "[no error]" not in printed
    assert "Traceback" not in printed
