"""Plots of `report.py`, as SVG."""

from __future__ import annotations

from html import escape

COLORS = ("#1f5fa8", "#d0763a", "#5a9e5a", "#a35fa8", "#8a7a3a", "#777777")
LEFT, WIDTH, ROW, TOP = 400, 460, 18, 40


def draw(values: dict[str, dict[str, float]], unit: str, limit: float | None, limit_name: str = "limit") -> str:
    """Return an SVG: a line for each label, with a bar for one value or a dot for each of several; the limit dashed."""
    series = list(dict.fromkeys(name for row in values.values() for name in row))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(series)}
    scale = WIDTH / max([value for row in values.values() for value in row.values()] + ([limit] if limit else []))
    bottom = TOP + ROW * len(values)

    def text(x: float, y: float, label: str, anchor: str = "start", color: str = "black") -> str:
        return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(label)}</text>'

    parts = [text(LEFT, bottom + 32, unit)]
    for number, name in enumerate(series if len(series) > 1 else ()):
        parts.append(text(10 + (LEFT + WIDTH) * number // len(series), 14, f"\u25cf {name}", color=colors[name]))
    for tick in (0, 0.25, 0.5, 0.75, 1):
        value = WIDTH / scale * tick
        parts.append(
            text(LEFT + WIDTH * tick, bottom + 16, f"{value:,.{0 if value >= 10 or not tick else 2}f}", "middle")
        )
        parts.append(f'<path d="M{LEFT + WIDTH * tick} {TOP}V{bottom}" stroke="#dddddd"/>')
    if limit:
        x = LEFT + scale * limit
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="#b02020" stroke-dasharray="4 3"/>')
        parts.append(text(x, TOP - 10, limit_name, "middle", "#b02020"))
    for number, (label, row) in enumerate(values.items()):
        y = TOP + ROW * number + ROW // 2
        parts.append(text(LEFT - 8, y + 4, label[:70], "end"))
        for name, value in reversed(row.items()):  # the first one on top
            x = scale * value
            if len(row) > 1:
                parts.append(f'<circle cx="{LEFT + x:.1f}" cy="{y}" r="4" fill="{colors[name]}" fill-opacity="0.8"/>')
                continue
            parts.append(f'<rect x="{LEFT}" y="{y - 6}" width="{x:.1f}" height="12" fill="{colors[name]}"/>')
            parts.append(text(LEFT + x + 4, y + 4, f"{value:,.{0 if value >= 100 else 2}f}"))
    size = f'width="{LEFT + WIDTH + 70}" height="{bottom + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
