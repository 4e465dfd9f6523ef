"""`scripts/bench/report.py`: docs/benchmarks.md and its plots are what the results render to; tables and ratios."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
GIB = 2**30
MACHINE = {"device": "GPU", "torch": "2", "cudnn": 9, "triton": "3", "date": "2026-11-24"}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import report

    return report


def test_the_page_and_the_plots_are_what_the_results_render_to(report: ModuleType) -> None:
    """After new results, run the script."""
    files = report.files()
    assert [str(path) for path, text in files.items() if not path.exists() or path.read_text() != text] == []
    assert set((report.DOCS / "plots").iterdir()) <= set(files)


def test_a_table_with_results_has_a_place(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "benchmarks.md").write_text("<!-- table: t5_long -->\n<!-- end -->\n")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SPEED", {})
    with pytest.raises(ValueError, match=r"tables with results \[\] must be those in benchmarks.md: \['t5_long'\]"):
        report.files()


def step(number: int, peer: str, speed: float, **more: Any) -> dict[str, Any]:
    found = {"round": number, "peer": peer, "tokens_per_second": speed, "seconds": [100 / speed]}
    return found | {"peak_gib": 8.0} | MACHINE | more


def test_ratios_are_medians_within_a_round(report: ModuleType, tmp_path: Path) -> None:
    """Round 2 is on a machine of half the speed, on which the peer did not run at all."""
    rows = [
        *(step(number, "stoker", speed) for number, speed in ((1, 380.0), (2, 190.0), (3, 316.0))),
        *(step(number, "hf", speed) for number, speed in ((1, 330.0), (3, 304.0))),
        {"round": 1, "peer": "plain", "refused": "out of memory"},
    ]
    other = step(1, "plain_flash", 1000.0, model="gpt2")
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*({**row, "model": "gpt"} for row in rows), other]))
    text = report.text_of("training_step_gpt", file)
    assert "Device: GPU; torch 2, cuDNN 9, triton 3; 2026-11-24; 3 rounds of 1 windows." in text
    assert "| HF Llama, each layer compiled, SDPA, bf16 autocast | 317 | 316.0 | 8.0 | 1.095 x |" in text
    assert "| 316 | 316.5 | 8.0 |  |" in text
    assert "| out of memory |  |  |  |" in text
    assert "1,000" not in text
    assert "flash SDPA, bf16 autocast | 1,000 | 100.0 | 8.0 |  |" in report.text_of("training_step_gpt2", file)
    assert report.text_of("training_step_gpt", tmp_path / "none.jsonl") == "training_step_gpt: nothing ran\n"


def test_an_empty_place_is_filled(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "parallel.jsonl").write_text(json.dumps(step(1, "stoker", 400.0, case="fsdp", devices=4)))
    (tmp_path / "benchmarks.md").write_text("<!-- table: parallel -->\n<!-- end -->\n")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SPEED", {})
    page = report.files()[tmp_path / "benchmarks.md"]
    assert "| stoker | 400 | 100 |" in page
    assert page.endswith("(plots/parallel.svg)\n<!-- end -->\n")


def test_layouts_on_several_gpus(report: ModuleType) -> None:
    def run(number: int, devices: int, peer: str, speed: float) -> dict[str, Any]:
        return step(number, peer, speed, case="fsdp", devices=devices)

    rows = [
        *(run(number, 1, "stoker", speed) for number, speed in ((1, 100.0), (2, 50.0), (3, 80.0))),
        *(run(number, 4, "stoker", speed) for number, speed in ((1, 380.0), (2, 190.0), (3, 316.0))),
        *(run(number, 4, "torchtitan", speed) for number, speed in ((1, 330.0), (3, 304.0))),
        {"round": 1, "case": "tp", "devices": 4, "peer": "megatron", "refused": "out of memory"},
    ]
    from report_tables import parallel

    found = report.TABLES["parallel"].render(rows)
    title, tensor = (parallel.CASES[name].title for name in ("fsdp", "tp"))
    assert ["4", title, "stoker", "316", "79", "8.0", "0.950", "", "GPU"] in found.lines
    assert ["4", title, "torchtitan", "317", "79", "8.0", "", "1.095 x", "GPU"] in found.lines
    assert ["4", tensor, "Megatron-core, distributed optimizer", "out of memory", *[""] * 5] in found.lines
    assert ["4", tensor, "torchtitan", "not run", *[""] * 5] in found.lines
    assert {line[1] for line in found.lines} == {title, tensor}
    assert found.values == {f"{title}, 4 GPUs": {"stoker": 79.0, "torchtitan": 79.25}}


def test_planned_layouts(report: ModuleType) -> None:
    def row(layout: str, planned_ms: float, planned: list[float], measured: list[float]) -> dict[str, Any]:
        sizes = [{"allocated": int(each * GIB), "used": int((each + 1) * GIB)} for each in planned]
        used = [{"allocated": int(each * GIB), "used": int((each + 2) * GIB)} for each in measured]
        found = {"layout": layout, "planned_seconds": planned_ms / 1e3, "seconds": 0.1, "recorded": layout == "dp2"}
        return found | {"planned": sizes, "measured": used} | MACHINE

    rows = [
        row("pp2 tp2", 110.0, [4.0, 6.0], [4.0, 4.0, 5.0, 5.9]),
        row("dp2", 95.0, [8.0], [8.0, 7.8]),
        {"layout": "tp4 sp", "refused": "ValueError: no"},
    ]
    found = report.TABLES["plan_layouts"].render(rows)
    # of ranks 2 and 3, on which the second stage is, rank 2 is furthest from the plan, and rank 3 the largest
    assert found.lines[0] == ["pp2 tp2", "GPU", "110.0", "100.0", "+10.0 %", "6.00", "5.90", "+20.0 %", "7.00", "7.90"]
    assert found.lines[1] == [
        "dp2, CUDA graphs",
        "GPU",
        "95.0",
        "100.0",
        "-5.0 %",
        "8.00",
        "8.00",
        "+2.6 %",
        "9.00",
        "10.00",
    ]
    assert found.notes == [
        "Mean error of time 7.5 %, worst 10.0 %.", "Mean error of memory 11.3 %, worst 20.0 %.",
        "tp4 sp: ValueError: no.",
    ]  # fmt: skip


def test_a_plot_has_bars_dots_and_the_limit(report: ModuleType) -> None:
    bars = report.draw({"a <b>": {"stoker": 50.0}, "c": {"peer": 25.0}}, "tokens/s", 100.0)
    assert bars.count("<rect") == 3
    assert 'width="230.0" height="12" fill="#1f5fa8"' in bars, "half of the limit, at the whole width"
    assert 'width="115.0" height="12" fill="#d0763a"' in bars
    assert "a &lt;b&gt;" in bars
    assert "stroke-dasharray" in bars
    dots = report.draw({"a": {"ours": 1.0, "other": 2.0}}, "TFLOP/s", None)
    assert dots.count("<circle") == 2
    assert "stroke-dasharray" not in dots
