"""Numbers of things, in words."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 step`, `2,000 steps`; `many` where the plural is more than an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
