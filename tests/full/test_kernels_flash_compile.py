"""Flash attention compiles for sm_80, 90, 100 and 120 without a GPU, within shared memory and the recorded budgets."""

import pytest
from fork_server import ForkServer
from offline_compile import SHARED_MEMORY

from stoker.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")


# bytes of stack, which is where registers spill to: at most, over the architectures and families, with Triton 3.9.0
SPILLED = {
    "forward": {64: 0, 80: 0, 128: 32, 192: 0, 256: 72},
    "dq": {64: 0, 80: 0, 128: 48, 192: 0, 256: 32},
    "dkdv": {64: 32, 80: 32, 128: 192, 192: 256, 256: 704},
    "bias_gradient": {64: 0, 128: 544, 256: 352},
    "distance_gradient": {64: 0, 128: 48, 256: 40},
}
# variants that are worse: a dense bias is read through one address per score; wide heads in fp32, or with a looked-up
# bias on sm_80
SPILLED_MORE = {
    ("forward", "bias_padding", 64): 344,
    ("forward", "bias_padding", 128): 632,
    ("forward", "causal", 256): 224,
    ("forward", "causal_distance", 128): 136,
    ("forward", "distance", 256): 2080,
    ("dq", "bias_padding", 64): 144,
    ("dq", "bias_padding", 128): 480,
    ("dq", "causal_dropout", 128): 144,
    ("dq", "causal_distance", 128): 56,
    ("dq", "causal_slopes", 128): 56,
    ("dq", "distance", 64): 24,
    ("dkdv", "bias_padding", 64): 704,
    ("dkdv", "bias_padding", 128): 272,
    ("dkdv", "causal", 128): 584,
    ("dkdv", "chunks", 64): 216,
    ("dkdv", "distance", 64): 192,
    # with Triton 3.6.0 only
    ("bias_gradient", "bias_padding", 64): 48,
    ("dkdv", "causal", 64): 800,
    ("dkdv", "causal", 256): 800,
    ("dkdv", "causal_distance", 128): 280,
    ("dkdv", "packed", 128): 344,
}


def stack_budget(row: dict) -> int:
    more = SPILLED_MORE.get((row["kind"], row["family"], row["head_dim"]), 0)
    return max(SPILLED[row["kind"]][row["head_dim"]], more)


def check(rows: list[dict]) -> None:
    """All that is over a limit, at once."""
    for row in rows:
        row["over"] = {
            "shared memory": row["shared"] > SHARED_MEMORY[row["capability"]],
            "stack": row["stack"] + row["local"] > stack_budget(row),
            "no wgmma": row["capability"] == 90
            and row["dtype"] != "fp32"  # 256 wide, its tiles are too small for Hopper's instruction
            and row["kind"] in ("forward", "dq", "dkdv")
            and not row["wgmma"],
        }
    assert [row for row in rows if any(row["over"].values())] == []


def test_a_kernel_of_each_kind_compiles_and_spills_nothing(compilers: ForkServer) -> None:
    rows = compilers.call("flash_compile", "compiled", "few")
    assert {row["kind"] for row in rows} == {"forward", "dq", "distance_gradient"}
    check(rows)


def test_every_family_compiles_within_its_budget(compilers: ForkServer) -> None:
    rows = compilers.call("flash_compile", "compiled", "all")
    assert len(rows) > 80
    check(rows)
