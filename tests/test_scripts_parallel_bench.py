"""`scripts/bench/parallel.py`: its cases train, and its tables say what the rows do."""

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


def row(number, case, devices, peer, speed):
    found = {"round": number, "case": case, "devices": devices, "peer": peer, "tokens_per_second": speed}
    versions = {"device": "GPU", "torch": "2", "cudnn": 9, "triton": "3", "date": "2026-11-24"}
    return found | {"peak_gib": 8.0, "seconds": [1.0]} | versions


def test_ratios_are_medians_of_ratios_within_a_round(parallel, tmp_path, monkeypatch):
    """Round 2 is on a machine of half the speed, on which torchtitan did not run at all."""
    rows = [
        *(row(number, "fsdp", 1, "stoker", speed) for number, speed in ((1, 100.0), (2, 50.0), (3, 80.0))),
        *(row(number, "fsdp", 4, "stoker", speed) for number, speed in ((1, 380.0), (2, 190.0), (3, 316.0))),
        *(row(number, "fsdp", 4, "torchtitan", speed) for number, speed in ((1, 330.0), (3, 304.0))),
        {"round": 1, "case": "tp", "devices": 4, "peer": "megatron", "refused": "out of memory"},
    ]
    drawn = []
    monkeypatch.setattr(parallel, "draw", lambda rows, picture: drawn.append(picture))
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\n## Preprocessing\n\nlast\n")
    for _ in range(2):  # the second time it replaces the section
        parallel.write(rows, page, tmp_path / "parallel.svg")
    text = page.read_text()
    title, tensor = parallel.CASES["fsdp"].title, parallel.CASES["tp"].title
    assert f"| {title} | stoker | 316 | 79 | 8.0 | 0.950 |  |\n" in text
    assert f"| {title} | torchtitan | 317 | 79 | 8.0 |  | 1.095 x |\n" in text
    assert f"| {tensor} | Megatron-core, distributed optimizer | out of memory | | | | |\n" in text
    assert f"| {tensor} | torchtitan | not run | | | | |\n" in text
    assert text.count(parallel.HEADING) == 1
    assert text.endswith("## Preprocessing\n\nlast\n")
    assert drawn == [tmp_path / "parallel.svg"] * 2


@full_only
def test_the_picture_has_the_runs(parallel, tmp_path):
    rows = [row(1, "fsdp", devices, "stoker", 90.0 * devices) for devices in (1, 2, 4)]
    parallel.draw(rows, tmp_path / "parallel.svg")
    assert "FSDP, weak scaling" in (tmp_path / "parallel.svg").read_text()


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
    command = [sys.executable, str(BENCH / "parallel.py"), "--dry-run", "--devices", "2", "--cases", "tp", "moe"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for case in ("tp x2: stoker: losses ", "moe x2: stoker: losses "):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(case)]
        assert len(line.removeprefix(case).split(", ")) == 2
