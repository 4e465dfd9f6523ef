"""Text of messages and keys: pluralized counts, truncated lists, durations."""

from __future__ import annotations

from collections.abc import Iterable


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `plural` is the plural if it is not `singular` + s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def truncate_lines(lines: Iterable[str], limit: int, *, more: str = "and {:,} more", indent: str = "") -> list[str]:
    """Return the first `limit` lines, and a line with the number of further ones in the `{}` of `more`."""
    shown = list(lines)
    rest = [more.format(len(shown) - limit)] if len(shown) > limit else []
    return [f"{indent}{line}" for line in (*shown[:limit], *rest)]


def parse_duration(format_duration: str) -> int:
    """Convert `DD:HH:MM:SS` to seconds."""
    days, hours, minutes, seconds = (int(part) for part in format_duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
