"""Every Triton kernel compiles for sm_80, 90, 100 and 120 on a machine without a GPU, within its budget."""

import pytest
from fork_server import ForkServer

from stoker.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")

# registers at most; nothing may spill. Recorded with Triton 3.9.0 and 3.6.0. Programs of 1,024 threads, as those of the
# loss, have 64 at most.
REGISTERS = {
    "adamw": 128,
    "adamw_aligned": 64,
    "biases_activation": 72,
    "biases_join": 64,
    "count_assignments": 32,
    "cross_entropy": 64,
    "cross_entropy_smoothed": 64,
    "cross_entropy_capped": 64,
    "cross_entropy_per_token_with_z_loss": 64,
    "document_bounds": 64,
    "document_tiles": 96,
    "dropout": 64,
    "embedding_add": 64,
    "embedding_sum": 64,
    "gated_forward": 64,
    "gated_backward": 96,
    "gated_projection": 96,
    "lora_mlp_forward_16": 184,
    "lora_mlp_forward_32": 192,
    "lora_mlp_backward_16": 255,
    "lora_mlp_backward_32": 255,
    "narrow_products_16": 168,
    "narrow_products_16_wide": 255,
    "narrow_products_64": 255,
    "narrow_update_16": 128,
    "narrow_update_64": 128,
    "place_assignments": 64,
    "rotary_split": 96,
    "rotary_split_backward": 96,
    "scale": 64,
    "scaled_sum": 64,
    "send_rows": 40,
    "sum": 200,
    "sum_of_squares": 80,
    "sum_of_squares_aligned": 32,
    "unaligned_cross_entropy": 64,
    "unaligned_cross_entropy_smoothed": 64,
    "vocabulary_part_gradient": 64,
    "vocabulary_part_statistics": 64,
    **{
        f"{norm}_norm_{width}{again}": 128 if width == 4096 else 96
        for norm in ("layer", "rms")
        for width in (256, 1024, 4096)
        for again in ("", "_again")
    },
}


@pytest.mark.parametrize("capabilities", [[90], [80, 90, 100, 120]], ids=str)
def test_kernels_compile_without_a_gpu_and_spill_nothing(compilers: ForkServer, capabilities: list[int]) -> None:
    rows = compilers.call("offline_compile", "compiled", capabilities)
    assert {(r["kernel"], r["capability"]) for r in rows} == {(k, c) for k in REGISTERS for c in capabilities}
    for row in rows:
        assert row["local"] == 0, row
        assert row["stack"] == 0, row
        # where addresses are loaded, Triton does not know their alignment by itself
        assert row["kernel"] != "send_rows" or not row["narrow_stores"], row
        assert row["registers"] <= REGISTERS[row["kernel"]], row
