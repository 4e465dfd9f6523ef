"""Text of messages and keys: pluralized counts, durations."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `many` is the plural if it is not `one` + s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def parse_duration(duration: str) -> int:
    """Convert `DD:HH:MM:SS` to seconds."""
    days, hours, minutes, seconds = (int(part) for part in duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
