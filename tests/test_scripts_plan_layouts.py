"""`scripts/bench/plan_check.py --layouts`: its layouts train, and a failing one ends no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full_only

from stoker.trainer.config.load import load_run_config

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import plan_layouts

    return plan_layouts


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
