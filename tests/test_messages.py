"""Messages, whole, in one place; other tests ask only for the path and the remedy."""

from tests.messages import GOLDEN, answers


def test_typical_mistakes_are_answered_as_in_the_golden_file_and_none_passes_as_done() -> None:
    """After a change that is meant: `python -m tests.messages`, and read its difference."""
    golden = GOLDEN.read_text()
    assert answers() == golden
    assert not any(bad in golden for bad in ("[exit code 0]", "[no error]", "Traceback"))
