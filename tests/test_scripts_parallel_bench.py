"""`scripts/bench/parallel.py`: its cases train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full_only

from stoker.trainer.config.load import load_run_config

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


@pytest.fixture
def parallel(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import parallel

    return parallel


@full_only
def test_the_keys_of_all_cases_are_accepted(parallel):
    for name, case in parallel.CASES.items():
        for devices in (1, 2, 4, 8):
            for contender in set(parallel.contenders(name, devices)) & set(parallel.STOKER):
                keys = parallel.overrides(contender, case, devices, dry=False)
                if case.exchange == "a2a" and devices == 8:  # has 4 query groups
                    continue
                assert load_run_config(None, None, keys).root.model.global_batch_size == case.samples_per_step(devices)


@full_only
def test_a_dry_run_trains_the_cases_of_two_processes():
    command = [sys.executable, str(BENCH / "parallel.py"), "--dry-run", "--devices", "2", "--cases", "tp", "moe_ep"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for case in ("tp x2: stoker: losses ", "moe_ep x2: stoker: losses ", "moe_ep x2: stoker_alltoall: losses "):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(case)]
        assert len(line.removeprefix(case).split(", ")) == 2
