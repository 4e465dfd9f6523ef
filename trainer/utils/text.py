"""Text of messages and keys: pluralized counts, texts on one line, truncated lists, durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def pluralize(count: float, singular: str, plural: str = "") -> str:
    """Return `1 step` or `2,000 steps`; `plural` is the plural if it is not `singular` + s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def format_gib(size: float) -> str:
    """Format a size in GiB, or in MiB if it is small."""
    gib = 2**30
    return f"{size / gib:,.1f} GiB" if size >= gib / 10 else f"{size / 2**20:,.0f} MiB"


def one_line(text: object, limit: int | None = None) -> str:
    """Return the text of an object, such as an error, on one line of at most `limit` characters."""
    return " ".join(str(text).split())[:limit]


def truncate_lines(lines: Iterable[str], limit: int, *, more: str = "and {:,} more", indent: str = "") -> list[str]:
    """Return the first `limit` lines, and a line with the number of further ones in the `{}` of `more`."""
    shown = list(lines)
    rest = [more.format(len(shown) - limit)] if len(shown) > limit else []
    return [f"{indent}{line}" for line in (*shown[:limit], *rest)]


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_duration(seconds: float) -> str:
    """Format seconds as short as possible: `45 s`, `3:07`, `2:03:00`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def parse_duration(text: str) -> int:
    """Convert `DD:HH:MM:SS` to seconds."""
    days, hours, minutes, seconds = (int(part) for part in text.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def format_days(seconds: int) -> str:
    """Format seconds as `DD:HH:MM:SS`."""
    return f"{seconds // 86400:02}:{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
