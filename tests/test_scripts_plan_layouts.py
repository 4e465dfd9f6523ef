"""`scripts/bench/plan_check.py --layouts`: its layouts train, a failing one ends no other, and its table is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full_only

from stoker.trainer.config.load import load_run_config

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
GIB = 2**30


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import plan_layouts

    return plan_layouts


def row(layout, planned_ms, ms, planned_gib, gib):
    sizes = [{"allocated": int(each * GIB), "used": int((each + 1) * GIB)} for each in planned_gib]
    measured = [{"allocated": int(each * GIB), "used": int((each + 2) * GIB)} for each in gib]
    found = {"layout": layout, "planned_seconds": planned_ms / 1e3, "seconds": ms / 1e3}
    versions = {"device": "GPU", "torch": "2", "cudnn": 9, "triton": "3", "date": "2026-11-24"}
    return found | {"planned": sizes, "measured": measured} | versions


def test_the_table_compares_each_rank_with_its_pipeline_rank(layouts):
    rows = [
        row("pp2 tp2", 110.0, 100.0, [4.0, 6.0], [4.0, 4.0, 5.0, 5.9]),
        row("dp2", 95.0, 100.0, [8.0], [8.0, 7.8]),
        {"layout": "tp4 sp", "refused": "ValueError: no"},
    ]
    text = layouts.layouts_table(rows)
    # of ranks 2 and 3, on which the second stage is, rank 2 is furthest from the plan, and rank 3 the largest
    assert "| pp2 tp2 | 110.0 | 100.0 | +10.0 % | 6.00 | 5.90 | +20.0 % | 7.00 | 7.90 |" in text
    assert "| dp2 | 95.0 | 100.0 | -5.0 % | 8.00 | 8.00 | +2.6 % | 9.00 | 10.00 |" in text
    assert "Mean error of time 7.5 %, worst 10.0 %, of 2 layouts." in text
    assert "Mean error of memory 11.3 %, worst 20.0 %, of 2 layouts." in text
    assert text.endswith("tp4 sp: ValueError: no.\n")
    assert layouts.layouts_table(rows[2:]) == "nothing ran\n"


def test_a_failure_is_one_line(layouts):
    error = 'rank 1: Traceback\n  File "x.py"\nstoker.Error: two\n  lines\nrank 0 did not end\nlog of rank 0'
    assert layouts._failed(error) == {"refused": "stoker.Error: two lines"}
    assert layouts._failed("rank 0: it died\nSegmentation fault") == {"refused": "it died Segmentation fault"}


def test_a_layout_has_the_keys_of_its_run(layouts):
    for dry in (False, True):
        run = load_run_config(None, None, layouts.LAYOUTS["pp2 tp2"].overrides(dry=dry)).root
        assert run.trainer.devices == 4
        assert (run.model.pipeline_model_parallel_size, run.model.tensor_model_parallel_size) == (2, 2)
        assert run.model.override_vocab_size == (320 if dry else 32000)


@full_only
def test_all_layouts_are_planned_on_their_gpus(layouts):
    from plan_check import planned

    for name, layout in layouts.LAYOUTS.items():
        plan = planned(layout.overrides(dry=False), "h100", world_size=layout.ranks)
        assert plan.inputs.ranks == layout.ranks, name
        assert plan.fits, name
        assert plan.time is not None, name


@full_only
def test_others_are_trained_after_a_layout_that_fails(layouts):
    code = (
        "from pathlib import Path; import plan_layouts as p; p.LAYOUTS['bad'] = p.Layout(2, 4, 8, ['num_layerz=3'])\n"
    )
    code += "failed = p.measure_layouts(['bad', 'tp2', 'fsdp full x2'], Path('none'), None, dry=True); print(failed)"
    environment = os.environ | {"PYTHONPATH": f"{BENCH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    bad, *lines, failed = done.stdout.splitlines()
    assert "there is no such key" in bad, done.stderr
    assert [line.partition(":")[0] for line in lines] == ["tp2", "fsdp full x2"]
    assert all("ms planned" in line for line in lines)
    assert failed == "['bad']"
