"""Pluralized counts for messages."""

from __future__ import annotations


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `many` is the plural if it is not `one` + s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
