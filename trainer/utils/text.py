"""Pluralized counts for messages."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `many` is the plural if it is not `one` + s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
