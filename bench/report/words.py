"""Figures as people read them. Pure."""

_PERIODS = (
    ("years", 31_557_600.0),
    ("days", 86_400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
)


def number(value: float) -> str:
    """Three digits, or all before the point: 0.154, 11.6, 1,867."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Whole per cent; below 1% one digit more, and 100% only of what is."""
    if 0 < share < 0.01:
        return f"{share:.1%}"
    return f"{share:.0%}" if share >= 0.9995 else f"{min(share, 0.994):.0%}"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: 5.20 ms, 12.3 s, 4.1 h, 3.2 years; '-' for None."""
    if seconds is None:
        return "-"
    unit, length = next(((u, n) for u, n in _PERIODS if seconds >= 2 * n), _PERIODS[-1])
    return f"{number(seconds / length)} {unit}"


def epochs(count: int | None) -> str:
    """`3 epochs`, or `never`."""
    return "never" if count is None else counted(count, "epoch")


def counted(count: int, one: str, several: str = "") -> str:
    """`1 run`, `2 runs`; `several` where its plural has more than an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
