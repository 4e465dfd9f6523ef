"""Drawings of the steps of pipelines: what is drawn is the schedule, and nothing is written through a link."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stoker.models.parallel.schedule import PipelineEvent, SimulatedStep, StageTimes, simulate_step
from stoker.trainer.loggers.pipeline_timeline import draw_timeline, write_timeline
from stoker.trainer.utils.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("forward", "recompute", "backward")


def step(ranks: int, chunks: int, micro_batches: int) -> SimulatedStep:
    times = StageTimes(forward=1.0, backward=2.0, recompute=(0.5,) + (0.0,) * (micro_batches - 1))
    return simulate_step([times] * (ranks * chunks), ranks, micro_batches)


def drawn(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    names = (root.get("aria-labelledby") or "").split()
    assert [each.get("id") for each in root.iter() if each.tag in (f"{SVG}title", f"{SVG}desc")][:2] == names
    return root


def test_every_pass_is_drawn_where_and_as_long_as_it_runs() -> None:
    planned = step(2, 2, 4)
    root = drawn(draw_timeline(planned.events(), 2, "a <run> & its step"))
    assert root.findtext(f"{SVG}title") == "a <run> & its step"
    assert f"bubble {100 * planned.bubble:.1f} %" in (root.findtext(f"{SVG}desc") or "")
    # the legend's have no description
    passes = [each for each in root.iter(f"{SVG}rect") if each.get("class") in KINDS and len(each)]
    rows = sorted({float(each.get("y", "")) for each in passes})
    starts = sorted(
        (rows.index(float(each.get("y", ""))), each.get("class"), float(each.get("x", ""))) for each in passes
    )
    scale = 900 / planned.seconds
    expected = sorted((each.stage % 2, each.kind, 96 + each.start * scale) for each in planned.events())
    assert [each[:2] for each in starts] == [each[:2] for each in expected]
    assert [each[2] for each in starts] == pytest.approx([each[2] for each in expected], abs=0.01)
    assert Counter(each.get("class") for each in passes) == {"forward": 16, "backward": 16, "recompute": 4}
    widths = sum(float(each.get("width", "")) + 0.3 for each in passes)
    assert widths == pytest.approx(2 * 900 * (1 - planned.bubble), rel=1e-3)


def test_thousands_of_passes_are_drawn_as_parts_of_columns() -> None:
    planned = step(16, 3, 64)
    svg = draw_timeline(planned.events(), 16, "large")
    assert len(svg) < 200_000
    area = 0.0
    for path in drawn(svg).iter(f"{SVG}path"):
        if path.get("class") in KINDS:
            for column in (path.get("d") or "").split("M")[1:]:
                width, height = column.partition("h")[2].split("h-")[0].split("v")
                area += float(width) * float(height)
    assert area == pytest.approx(16 * 900 * 18 * (1 - planned.bubble), rel=0.02)


def test_a_measured_step_may_begin_at_any_time() -> None:
    events = [PipelineEvent(0, 0, "forward", 7.0, 8.0), PipelineEvent(0, 0, "backward", 8.0, 9.0)]
    assert "2.00 s, 1 rank, 1 stage, 1 micro batch, bubble 0.0 %" in draw_timeline(events, 1, "measured")


def test_a_drawing_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "timeline.svg").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="is a link"):
        write_timeline(tmp_path / "timeline.svg", "<svg/>")
    assert not (tmp_path / "other").exists()
    write_timeline(tmp_path / "mine.svg", "<svg/>")
    assert (tmp_path / "mine.svg").read_text() == "<svg/>"
