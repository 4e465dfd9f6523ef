"""The fp8 kernels compile for sm_89, 90, 100 and 120 without a GPU, within their budgets."""

import pytest
from fork_server import ForkServer

from stoker.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")


def assert_within_budget(rows: list[dict]) -> None:
    from fp8_compile import SHARED_MEMORY

    for row in rows:
        if row["kind"] in ("rows", "outer"):
            assert row["shared"] <= SHARED_MEMORY[row["capability"]], row
            assert row["local"] == row["stack"] == row["narrow_copies"] == 0, row
            assert row["copies"] > 0, row
            assert row["capability"] != 90 or row["wgmma"] > 0, row
            continue
        if row["kind"].startswith("hopper"):
            assert row["shared"] <= SHARED_MEMORY[90], row
            assert row["local"] == row["stack"] == 0, row
            assert row["wgmma"] > 0, row
            continue
        assert row["shared"] <= SHARED_MEMORY[row["capability"]], row
        assert row["local"] == 0, row
        # of three results of 128 x 128 one at a time is kept, which takes up to a few bytes more than the registers
        # (of experts, with sums over the rows, in Triton 3.9)
        spilled = {"gated_backward": 32, "experts' gated_backward": 64}.get(row["producer"], 0)
        assert row["stack"] <= (spilled if row["granularity"] == "tile" else 0), row
        assert row["registers"] <= 208, row
        assert row["narrow_stores"] == 0, row
        if row["kind"] in ("backward_amax", "align_rows"):  # of few numbers for each row
            continue
        assert row["kind"] == "amax" or row["wide_stores"] > 0, row
        assert row["wide_loads"] > 0, row


def test_a_few_kernels_compile_without_a_gpu(compilers: ForkServer) -> None:
    rows = compilers.call("fp8_compile", "compiled", "few")
    assert {row["kind"] for row in rows} == {"amax", "cast", "transpose", "rows", "row_cast", "hopper_rows"}
    assert_within_budget(rows)


def test_every_kernel_compiles_within_its_budget(compilers: ForkServer) -> None:
    rows = compilers.call("fp8_compile", "compiled", "all")
    assert {row["capability"] for row in rows} == {89, 90, 100, 120}
    assert_within_budget(rows)
