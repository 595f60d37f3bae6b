"""Messages, whole, in one place; other tests ask only for the path and the remedy."""

from tests.messages import COMMANDS, GOLDEN, answers


def test_typical_mistakes_are_answered_as_in_the_golden_file() -> None:
    """After a change that is meant: `python -m tests.messages`, and read its difference."""
    assert answers() == GOLDEN.read_text()


def test_every_mistake_is_told_in_a_line_each_and_none_passes_as_done() -> None:
    parts = GOLDEN.read_text().strip().split("\n\n$ ")
    assert len(parts) == len(COMMANDS)
    for part in parts:
        assert not part.endswith(("[exit code 0]", "[no error]")), part
        assert "Traceback" not in part
