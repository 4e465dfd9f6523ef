"""When the Triton kernels serve a tensor, and what happens where there is no Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from fork_server import ForkServer
from tiers import full_only
from torch._subclasses import FakeTensorMode

from stoker.kernels import launch

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tiny_run import tiny_config
from stoker.kernels.launch import HAS_TRITON
from stoker.trainer.train import run_training
assert not HAS_TRITON
model = {"model__activation": "swiglu", "model__normalization": "rmsnorm", "model__position_embedding_type": "rope"}
result = run_training(tiny_config(Path(sys.argv[2]), trainer__max_steps=2, **model))
sys.exit(0 if result.step == 2 else 3)
"""


@pytest.mark.parametrize(
    ("device", "dtype", "served"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float64, False),
        ("cpu", torch.float32, False),
    ],
)
def test_triton_serves_what_it_computes_well(monkeypatch, device, dtype, served):
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with FakeTensorMode():
        assert launch.triton_runs_on(torch.empty(2, device=device, dtype=dtype)) is served


@full_only
def test_a_kernel_compiles_without_a_gpu_and_spills_nothing(compilers: ForkServer) -> None:
    """All of them: tests/full/test_kernels_offline_compile.py."""
    (row,) = compilers.call("offline_compile", "compiled", [90], "scale")
    assert (row["local"], row["stack"]) == (0, 0)
    assert 0 < row["registers"] <= 64


@full_only
def test_training_needs_no_triton(tmp_path):
    """As on macOS: `import triton` fails."""
    command = [sys.executable, "-c", WITHOUT_TRITON, str(Path(tiny_run.__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
