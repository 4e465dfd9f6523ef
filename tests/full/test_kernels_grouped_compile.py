"""The kernels of the experts compile for sm_80, 90, 100 and 120 without a GPU, within their budgets."""

import pytest
from fork_server import ForkServer
from offline_compile import SHARED_MEMORY

from stoker.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")

# registers at most; nothing may spill. Recorded with Triton 3.9.0 and 3.6.0.
REGISTERS = dict.fromkeys(("gated", "activated", "rows", "rows_backward", "outer"), 255) | dict.fromkeys(
    ("activation_backward", "gather", "combine", "gate_gradient", "tiles"), 96
)


def assert_within_budget(rows: list[dict]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["capability"]], row
        assert row["local"] == 0, row
        assert row["stack"] == 0, row
        assert row["registers"] <= REGISTERS[row["kind"]], row
        if REGISTERS[row["kind"]] == 255 and row["dtype"] == "bf16":
            assert row["capability"] != 90 or row["wgmma"] > 0, row
            if row["family"] != "unaligned":  # loads run ahead of the products, 16 bytes at a time
                assert row["copies"] > 0, row
                assert row["narrow_copies"] == 0, row


def test_a_few_kernels_compile_without_a_gpu(compilers: ForkServer) -> None:
    rows = compilers.call("grouped_compile", "compiled", "few")
    assert {row["kind"] for row in rows} == {"gated", "rows_backward", "outer"}
    assert_within_budget(rows)


def test_every_kernel_compiles_within_its_budget(compilers: ForkServer) -> None:
    rows = compilers.call("grouped_compile", "compiled", "all")
    assert {row["capability"] for row in rows} == set(SHARED_MEMORY)
    assert {row["kind"] for row in rows} == set(REGISTERS)
    assert_within_budget(rows)
