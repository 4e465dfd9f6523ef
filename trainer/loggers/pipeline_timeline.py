"""Draw a training step of a pipeline as SVG: a row for each rank, its passes over time, and the bubble in per cent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args
from xml.sax.saxutils import escape

from ...models.parallel.schedule import PassKind, PipelineEvent
from ..utils.durable_files import atomic_write
from ..utils.text import pluralize

TIMELINE_NAME = "timeline.svg"
"""File of a measured step in the run directory."""
_KINDS: tuple[PassKind, ...] = get_args(PassKind)
_LEFT, _WIDTH, _RIGHT = 96, 900, 14
_TOP, _ROW, _BAR = 76, 24, 18
_MAX_PASSES = 1500
"""Passes that are drawn each; more are drawn as parts of columns of time."""
_MAX_SHAPES = 4500
_NUMBERED = 11
"""Least width of a pass that shows its micro batch."""
_TICKS = 8
_STYLE = """
text { fill: #222; font: 12px system-ui, sans-serif } .title { font-weight: 600; font-size: 14px }
.number { fill: #fff; font-size: 9px; text-anchor: middle }
.page { fill: #fff } .waiting { fill: #f0f0f0 } .tick { stroke: #ccc }
.forward { fill: #3b6fb6 } .recompute { fill: #b85c00 } .backward { fill: #2f7d4f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6e6 } .number { fill: #fff }
  .page { fill: #16181c } .waiting { fill: #2a2d34 } .tick { stroke: #4a4d55 }
  .forward { fill: #4f86d1 } .recompute { fill: #c46f14 } .backward { fill: #3a8f5b } }
"""


def draw_timeline(events: Sequence[PipelineEvent], ranks: int, title: str) -> str:
    """Return an SVG of a step.

    Args:
        events: passes of all ranks, or their parts, at least one; those of a rank do not overlap.
        ranks: ranks of the pipeline; stage s is on rank s % ranks.
        title: of the drawing, such as the name of the run.
    """
    start, end = min(each.start for each in events), max(each.end for each in events)
    seconds, stages = max(end - start, 1e-12), max(each.stage for each in events) + 1
    busy = sum(each.end - each.start for each in events)
    bubble = f"bubble {100 * (1 - busy / ranks / seconds):.1f} %"
    micro_batches = len({each.micro_batch for each in events})
    height = _TOP + ranks * _ROW + 34
    counts = [pluralize(ranks, "rank"), pluralize(stages, "stage")]
    counts.append(pluralize(micro_batches, "micro batch", "micro batches"))
    what = ", ".join([_duration(seconds), *counts, bubble])
    rows: dict[int, list[PipelineEvent]] = defaultdict(list)
    for each in sorted(events, key=lambda each: each.start):
        rows[each.stage % ranks].append(each)
    merged = len(events) > _MAX_PASSES
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height}" role="img" '
        'aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">Schedule of a training step: {what}. A row for each rank of the pipeline, time from left to '
        f"right{', as the part of each column of time' * merged}.</desc>",
        f'<style>{_STYLE}</style><rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="40">{what}</text>',
        *_legend({each.kind for each in events}, stages > ranks and not merged, merged),
        *_ticks(seconds, ranks),
    ]
    for rank in range(ranks):
        top, numbers = _TOP + rank * _ROW, ", ".join(map(str, range(rank, stages, ranks)))
        label = f"rank {rank}" if stages == ranks else f"rank {rank}: {numbers if len(numbers) < 12 else '...'}"
        lines.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{label}</text>')
        lines.append(f'<rect class="waiting" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_BAR}"/>')
        scale = _WIDTH / seconds
        if merged:
            lines += _columns(rows[rank], top, start, scale, max(24, _MAX_SHAPES // (len(_KINDS) * ranks)))
        else:
            for event in rows[rank]:
                lines += _pass(event, top, start, scale, 1 - 0.55 * (event.stage // ranks) * ranks / stages)
    return "\n".join([*lines, "</svg>\n"])


def write_timeline(path: Path, svg: str) -> None:
    """Write a drawing; a link at its place is refused.

    Raises:
        UserError: the file is a link.
        OSError: it cannot be written.
    """
    atomic_write(path, svg.encode())


def _pass(event: PipelineEvent, top: int, start: float, scale: float, opacity: float) -> Iterator[str]:
    """Yield the rectangle of a pass, with its description and, if there is room, the number of its micro batch."""
    x, width = _LEFT + (event.start - start) * scale, (event.end - event.start) * scale
    faint = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
    yield (
        f'<rect class="{event.kind}" x="{x:.2f}" y="{top}" width="{max(width - 0.3, 0.1):.2f}" height="{_BAR}"{faint}>'
        f"<title>{event.kind}, stage {event.stage}, micro batch {event.micro_batch}</title></rect>"
    )
    if width >= _NUMBERED and event.kind != "recompute":
        yield f'<text class="number" x="{x + width / 2:.1f}" y="{top + 12}">{event.micro_batch}</text>'


def _columns(events: Sequence[PipelineEvent], top: int, start: float, scale: float, number: int) -> Iterator[str]:
    """Yield a path for each kind: in each of `number` columns of time, as high as the part that the kind takes."""
    width = _WIDTH / number
    shares = {kind: [0.0] * number for kind in _KINDS}
    for each in events:
        left, right = (each.start - start) * scale / width, (each.end - start) * scale / width
        for column in range(int(left), min(number, int(right) + 1)):
            shares[each.kind][column] += max(0.0, min(right, column + 1) - max(left, column))
    base = [float(top + _BAR)] * number
    for kind, parts in shares.items():
        path: list[str] = []
        for column, part in enumerate(parts):
            if part > 0.005:
                base[column] -= part * _BAR
                x = _LEFT + column * width
                path.append(f"M{x:.1f} {base[column]:.1f}h{width:.2f}v{part * _BAR:.1f}h-{width:.2f}z")
        if path:
            yield f'<path class="{kind}" d="{"".join(path)}"/>'


def _legend(kinds: set[PassKind], chunks: bool, merged: bool) -> Iterator[str]:
    x = _LEFT
    names = [(kind, f"{kind} pass" if kind != "recompute" else "recompute") for kind in _KINDS if kind in kinds]
    for style, name in [*names, ("waiting", "waiting")]:
        yield f'<rect class="{style}" x="{x}" y="50" width="12" height="12"/><text x="{x + 17}" y="61">{name}</text>'
        x += 40 + 7 * len(name)
    notes = {"paler: later stages of a rank": chunks, "height: part of the time": merged}
    yield from (f'<text x="{x}" y="61">{note}</text>' for note, holds in notes.items() if holds)


def _ticks(seconds: float, ranks: int) -> Iterator[str]:
    """Yield the time axis, below the rows."""
    bottom = _TOP + ranks * _ROW
    for number in range(_TICKS + 1):
        x, anchor = _LEFT + _WIDTH * number / _TICKS, "end" if number == _TICKS else "middle"
        yield f'<path class="tick" d="M{x:.1f} {_TOP - 4}V{bottom + 4}"/>'
        at = _duration(seconds * number / _TICKS)
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="{anchor}">{at}</text>'


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
