"""Numbers, of bytes too, and durations in messages."""

from __future__ import annotations


def amount(size: float) -> str:
    """`0 B`, `1.7 MiB`, `2.50 TiB`: powers of 1024, like the option `mirror.gib`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def figure(value: float) -> str:
    """Three digits, and all that stand before the point: `0.0312`, `5.99`, `1,310`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration for people: `2h05m`, `3m07s` or `9s`."""
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
