"""scripts/unattended.py and killed_ranks.py in short: runs that fail, or lose and gain nodes, end as one that does not.

By hand and for longer: `python scripts/unattended.py --minutes 30`, which also says how many steps were run twice.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unattended(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("unattended")


def test_runs_that_fail_end_with_the_bits_of_one_that_does_not(unattended, tmp_path):
    report = unattended.measure(tmp_path, minutes=0.8, seconds=3, step_seconds=0.05, elastic=False)
    print(report)
    assert report["failures"] >= 1
    assert report["difference_of_final_weights"] == 0


def test_a_run_whose_nodes_come_and_go_ends_as_one_whose_stay(unattended, tmp_path):
    report = unattended.measure(tmp_path, minutes=0.8, seconds=3, step_seconds=0.05, elastic=True)
    print(report)
    assert report["failures"] >= 1
    assert report["difference_of_final_weights"] < 1e-12
    kinds = [event["event"] for event in unattended.read_events(tmp_path)]
    assert kinds.count("shrink") == kinds.count("grow") == report["failures"]


def test_ranks_that_are_killed_while_they_communicate_are_named_and_lose_nothing(unattended, tmp_path):
    killed_ranks = importlib.import_module("killed_ranks")
    keys = killed_ranks.KEYS | killed_ranks.LAYOUTS["pipeline"]
    report = killed_ranks.broken_run(tmp_path, "pipeline", keys, 1, float("inf"))
    assert not report["problems"], report
