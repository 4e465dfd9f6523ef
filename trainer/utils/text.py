"""Text of messages and keys: pluralized counts, durations."""

from __future__ import annotations


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `plural` is the plural if it is not `singular` + s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def parse_duration(format_duration: str) -> int:
    """Convert `DD:HH:MM:SS` to seconds."""
    days, hours, minutes, seconds = (int(part) for part in format_duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
