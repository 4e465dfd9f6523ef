"""Every Triton kernel compiles for sm_80, 90, 100 and 120 on a machine without a GPU, within its budget."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)

# registers at most; nothing may spill. Recorded with Triton 3.9.0 and 3.6.0.
REGISTERS = {
    "adamw": 128,
    "cross_entropy": 128,
    "cross_entropy_smoothed": 128,
    "cross_entropy_capped": 128,
    "gated_forward": 64,
    "gated_backward": 96,
    "gated_projection": 96,
    "rotary_split": 96,
    "rotary_split_backward": 96,
}


def test_kernels_compile_without_a_gpu_and_spill_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offline_compile.py"))],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(r["kernel"], r["capability"]) for r in rows} == {(k, c) for k in REGISTERS for c in (80, 90, 100, 120)}
    for row in rows:
        assert row["local"] == 0, row
        assert row["stack"] == 0, row
        assert row["registers"] <= REGISTERS[row["kernel"]], row
