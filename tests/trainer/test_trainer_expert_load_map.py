"""The file and the figure of the load of the experts: small, whole, and the same after a resume."""

from __future__ import annotations

import json

import pytest
from tiers import full_only

from stoker.trainer.callbacks import expert_load
from stoker.trainer.callbacks.expert_load import ExpertLoadMetrics
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.loggers.expert_load_map import MAX_ROWS, ExpertLoadHistory, coefficient_of_variation, has_matplotlib
from stoker.trainer.utils.errors import EXIT_IO, UserError

EXPERTS = {"decoder.layers.0.mlp": 4, "decoder.layers.2.mlp": 2}


def counts(step):
    return [[step, 2 * step, 0, 1], [step * step, 5]]


def filled(path, steps, *, first=1, resumed_at=0, irregular=()):
    found = ExpertLoadHistory(path, EXPERTS, resumed_at=resumed_at)
    for step in range(first, steps + 1):
        found.add(step, counts(step), regular=step not in irregular)
    return found


def read(path):
    return json.loads(path.read_text())


def test_every_report_is_a_row(tmp_path):
    path = tmp_path / "expert_load.json"
    filled(path, 3).write()
    assert read(path) == {
        "format": 1,
        "layers": list(EXPERTS),
        "experts": [4, 2],
        "stride": 1,
        "rows": [
            {"first_step": step, "step": step, "reports": 1, "tokens": [[step, 2 * step, 0, 1], [step * step, 5]]}
            for step in (1, 2, 3)
        ],
    }


@pytest.mark.parametrize("steps", [MAX_ROWS, MAX_ROWS + 1, 1000, 3001])
def test_rows_double_and_no_token_is_lost(tmp_path, steps):
    document = filled(tmp_path / "x.json", steps).document
    assert len(document.rows) <= MAX_ROWS
    assert document.stride == {MAX_ROWS: 1, MAX_ROWS + 1: 2, 1000: 4, 3001: 16}[steps]
    assert [row.first_step for row in document.rows] == [1, *(row.step + 1 for row in document.rows[:-1])]
    assert document.rows[-1].step == steps
    assert all(row.reports == document.stride for row in document.rows[:-1])
    for layer, expert in ((0, 0), (0, 3), (1, 0)):
        total = sum(row.tokens[layer][expert] for row in document.rows)
        assert total == sum(counts(step)[layer][expert] for step in range(1, steps + 1))


def test_many_experts_have_fewer_rows(tmp_path):
    wide = ExpertLoadHistory(tmp_path / "x.json", dict.fromkeys(map(str, range(48)), 128))
    for step in range(1, 101):
        wide.add(step, [[3] * 128] * 48, regular=True)
    wide.write()
    assert len(wide.document.rows) <= 42
    assert (tmp_path / "x.json").stat().st_size < 4 << 20


@pytest.mark.parametrize("killed", [10, 700])
def test_a_resumed_file_goes_on(tmp_path, killed):
    """Written at the checkpoint and later, by a process that was killed then."""
    path = tmp_path / "x.json"
    filled(path, killed + 3).write()
    resumed = filled(path, killed + 400, first=killed + 1, resumed_at=killed)
    unbroken = filled(tmp_path / "y.json", killed + 400)
    rows = {row.step: row for row in unbroken.document.rows}
    if killed == 10:
        assert resumed.document == unbroken.document
    else:  # of the rows that had been added up beyond the checkpoint, the last one is gone
        assert resumed.document.stride == unbroken.document.stride
        assert sum(row.step not in rows for row in resumed.document.rows) <= len(rows) // 2
        assert all(
            a.step < b.first_step for a, b in zip(resumed.document.rows, resumed.document.rows[1:], strict=False)
        )


def test_a_report_that_an_unbroken_run_does_not_make_ends_no_row(tmp_path):
    path = tmp_path / "x.json"
    stopped = filled(path, 5, irregular=(1, 3, 5))
    stopped.write()
    assert [row.step for row in stopped.document.rows] == [2, 4, 5]
    resumed = filled(path, 8, first=6, resumed_at=5, irregular=(7,))
    assert resumed.document == filled(tmp_path / "y.json", 8, irregular=(1, 3, 5, 7)).document
    assert [row.step for row in resumed.document.rows] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "layers": [], "experts": []}',
        '{"format":1,"layers":["decoder.layers.0.mlp","decoder.layers.2.mlp"],"experts":[4,2],"stride":1,'
        '"rows":[{"first_step":1,"step":2,"reports":1,"tokens":[[1,2],[3,4]]}]}',
        '{"format":1,"layers":["other"],"experts":[1],"stride":1,"rows":[]}',
    ],
)
def test_a_file_that_is_not_ours_is_begun_anew(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert (
        filled(path, 4, first=4, resumed_at=3).document.rows
        == filled(tmp_path / "y.json", 4, first=4, resumed_at=3).document.rows
    )


def test_variation_is_the_deviation_over_the_mean():
    import numpy as np

    assert coefficient_of_variation(np.array([2.0, 4.0])) == pytest.approx(1 / 3)
    assert coefficient_of_variation(np.zeros(4)) == 0.0


@full_only  # importing matplotlib and drawing take seconds
@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
def test_the_picture(tmp_path):
    found = ExpertLoadHistory(tmp_path / "x.json", EXPERTS)
    found.write_png()
    assert not list(tmp_path.iterdir()), "there is nothing to show yet"
    found.add(3, counts(3), regular=True)
    found.add(4, [[0] * 4, [0] * 2], regular=True)
    found.write_png()
    data = (tmp_path / "x.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    (tmp_path / "x.png").unlink()
    found.write_png()
    assert not (tmp_path / "x.png").exists(), "drawn again though nothing is new"
    found.add(5, counts(50), regular=True)
    found.write_png()
    assert (tmp_path / "x.png").read_bytes() != data


# ---------------------------------------------------------------- what goes wrong


def test_without_matplotlib_there_is_one_line_and_no_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: False)
    load = ExpertLoadMetrics({}, ranks=DistributedContext(), load_map=filled(tmp_path / "x.json", 3))
    load.save(plot=True, last=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_picture_that_fails_is_told_once_and_stops_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: True)
    load = ExpertLoadMetrics(
        {}, ranks=DistributedContext(), load_map=filled(tmp_path / "x.json", 3), report=said.append
    )
    monkeypatch.setattr(ExpertLoadHistory, "write_png", lambda self: 1 / 0)  # pyrefly: ignore[division-by-zero]
    load.save(plot=True, last=True)
    load.save(plot=True, last=True)
    assert said == ["warning: the expert load cannot be plotted: ZeroDivisionError: division by zero"]


def test_a_full_disk_ends_the_run_with_its_code(tmp_path, monkeypatch):
    load = ExpertLoadMetrics({}, ranks=DistributedContext(), load_map=filled(tmp_path / "gone" / "x.json", 3))
    with pytest.raises(UserError, match="cannot write the expert load") as error:
        load.save(plot=False)
    assert error.value.exit_code == EXIT_IO


def test_pictures_take_a_small_part_of_the_time(tmp_path, monkeypatch):
    now, drawn = [0.0], []
    monkeypatch.setattr(expert_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: True)

    def draw(self):
        drawn.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(ExpertLoadHistory, "write_png", draw)
    load = ExpertLoadMetrics({}, ranks=DistributedContext(), load_map=filled(tmp_path / "x.json", 3))
    while now[0] < 120:
        load.save(plot=True)
        now[0] += 7.0
    assert len(drawn) == 3
    load.save(plot=True, last=True)
    assert len(drawn) == 4
