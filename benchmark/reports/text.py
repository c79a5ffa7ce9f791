"""Numbers as readers like them."""

from __future__ import annotations

ABSENT = "-"


def number(value: float | None, digits: int = 1) -> str:
    """`12.3`, or `-` for None."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """`1.23x`, or `-` for None."""
    return ABSENT if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """`97.5 %`; never rounded up to 100 %; `-` for None."""
    if value is None:
        return ABSENT
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.1f} %"


def size(num_bytes: float | None) -> str:
    """`98.4 MB` or `1.25 GB` (powers of ten); `-` for None."""
    if num_bytes is None:
        return ABSENT
    if num_bytes == 0:
        return "0"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
