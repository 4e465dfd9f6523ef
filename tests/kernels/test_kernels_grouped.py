"""Sorted assignments, their tiles, and the grouped matmuls: every backend against fp64, with empty experts and rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import cases, examples, looped

from stoker.kernels.moe.assignments import padded_assignments, sorted_assignments
from stoker.kernels.moe.grouped_matmul import (
    _grouped_matmul,
    grouped_matmul,
    row_tiles,
    triton_grouped_matmul,
    triton_grouped_outer,
)
from stoker.kernels.moe.permute import _combine, _gather, combine_rows, gather_rows
from stoker.kernels.moe.tile_configs import FEW_ROWS_BLOCK_M, Kind, has_few_rows, is_aligned, tile_config
from stoker.kernels.moe.tile_map import find_tiles, max_tiles

BACKENDS = ("triton", "torch", "loop")


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


# ---------------------------------------------------------------- assignments


@examples(60)
@given(st.integers(1, 20), st.integers(1, 9), st.data())
def test_assignments_are_a_stable_sort(tokens, experts, data):
    topk = data.draw(st.integers(1, experts))
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    kept = torch.rand(tokens, topk, generator=generator) > 0.3 if data.draw(st.booleans()) else None
    order, ends, places = sorted_assignments(chosen, experts, kept)
    keys = chosen.numpy().copy()
    if kept is not None:
        keys[~kept.numpy()] = experts
    expected = np.argsort(keys.ravel(), kind="stable")
    used = int((keys < experts).sum())
    assert order[:used].tolist() == expected[:used].tolist()
    assert (order[used:] == -1).all()
    assert ends.tolist() == [int((keys <= e).sum()) for e in range(experts)]
    assert order.dtype == ends.dtype == places.dtype == torch.int32
    for assignment, place in enumerate(places.flatten().tolist()):
        assert place == -1 if keys.ravel()[assignment] == experts else order[place] == assignment


def test_more_experts_than_16_bits_hold():
    chosen = torch.tensor([[40000, 3], [3, 39999]])
    order, ends, _ = sorted_assignments(chosen, 40001)
    assert order.tolist() == [1, 2, 3, 0]
    assert ends[-3:].tolist() == [2, 3, 4]


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_padded_assignments_fill_every_expert_from_its_first_row(capacity):
    chosen = torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0], [1, 2]])
    kept = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
    order, places = padded_assignments(chosen, 4, capacity, kept)
    per_expert: list[list[int]] = [[] for _ in range(4)]
    for assignment, (expert, keep) in enumerate(zip(chosen.flatten().tolist(), kept.flatten().tolist(), strict=True)):
        if keep:
            per_expert[expert].append(assignment)
    expected = [(rows + [-1] * capacity)[:capacity] for rows in per_expert]
    assert order.view(4, capacity).tolist() == expected
    for assignment, place in enumerate(places.flatten().tolist()):
        assert place == (order.tolist().index(assignment) if assignment in order else -1)


# ---------------------------------------------------------------- tiles


@examples(12)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 20), st.sampled_from([4, 16]))
def test_tiles_cover_every_row_once(counts, after, block):
    ends = ends_of(counts)
    rows = int(ends[-1]) + after
    tiles = find_tiles(ends, rows, block)
    count = int(tiles.num_tiles)
    assert count <= max_tiles(rows, len(counts), block) == len(tiles.rows)
    covered = np.zeros(rows, dtype=int)
    bounds = [0, *ends.tolist(), rows]
    for expert, first in zip(tiles.experts[:count].tolist(), tiles.rows[:count].tolist(), strict=True):
        assert bounds[expert] <= first < bounds[expert + 1]
        covered[first : min(first + block, bounds[expert + 1])] += 1
    assert (covered == 1).all()
    assert tiles.experts_by_load.tolist() == sorted(range(len(counts)), key=lambda e: (-counts[e], e))


# ---------------------------------------------------------------- matmuls

COUNTS = {
    "uneven": ([5, 0, 33, 1], 0),
    "rows_after": ([3, 17, 0], 6),
    "one_expert": ([21], 0),
    "all_on_one": ([0, 0, 40, 0], 0),
    "nothing": ([0, 0], 5),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_is_added_before_rounding(backend):
    """Products cancel with the bias, so that rounding them first would leave few correct bits."""
    dtype = torch.float16 if backend == "triton" else torch.bfloat16  # the interpreter multiplies no bf16
    generator = torch.Generator().manual_seed(0)
    ends, experts = ends_of([5, 0, 12]), torch.tensor([0] * 5 + [2] * 12)
    left = (torch.randn(19, 16, generator=generator) + 16).to(dtype)  # two rows after the last expert's
    matrices = torch.randn(3, 16, 24, generator=generator).to(dtype)
    bias = (-16 * matrices.sum(1)).to(dtype).requires_grad_()
    outer = torch.randn(19, 24, generator=generator).to(dtype)
    outer[17:] = math.nan
    out = grouped_matmul(left, matrices, ends, backend=backend, bias=bias)
    (gradient,) = torch.autograd.grad(out, bias, outer)
    product = torch.einsum("rk,rkn->rn", left[:17].double(), matrices[experts].double())
    torch.testing.assert_close(out[:17], (product + bias[experts].double()).to(dtype), rtol=1e-2, atol=1e-4)
    assert not out[17:].any()
    sums = torch.zeros(3, 24, dtype=torch.float64).index_add(0, experts, outer[:17].double())
    torch.testing.assert_close(gradient, sums.to(dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", cases(COUNTS, fast=3))
def test_grouped_matmul_and_its_gradients(backend, name):
    counts, after = COUNTS[name]
    generator = torch.Generator().manual_seed(0)
    ends = ends_of(counts)
    rows = sum(counts) + after
    left = torch.randn(rows, 20, generator=generator)
    left[rows - after :] = math.nan  # not read into any result
    weight = torch.randn(len(counts), 36, 20, generator=generator).requires_grad_()
    outer = torch.randn(rows, 36, generator=generator)
    outer[rows - after :] = math.nan
    left.requires_grad_()
    out = grouped_matmul(left, weight.transpose(1, 2), ends, backend=backend)
    left_gradient, weight_gradient = torch.autograd.grad(out, (left, weight), outer)
    assert weight_gradient.is_contiguous()
    first = 0
    for expert, end in enumerate(ends.tolist()):
        x, y, w = left[first:end].double(), outer[first:end].double(), weight[expert].double()
        torch.testing.assert_close(out[first:end].double(), x @ w.t(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left_gradient[first:end].double(), y @ w, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight_gradient[expert].double(), y.t() @ x, rtol=1e-5, atol=1e-5)
        first = end
    assert not out[first:].any()
    assert not left_gradient[first:].any()


def test_loop_in_fp64_passes_gradcheck():
    ends = ends_of([2, 0, 3])
    left = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b, ends, backend="loop"), (left, matrices))


@pytest.mark.parametrize("widths", [(17, 19), (1, 50)])
def test_triton_takes_odd_widths(widths):
    depth, width = widths
    ends = ends_of([4, 7])
    left, matrices = torch.randn(11, depth), torch.randn(2, depth, width)
    expected = grouped_matmul(left.double(), matrices.double(), ends, backend="loop")
    got = grouped_matmul(left, matrices, ends, backend="triton")
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_read_through_the_order():
    experts = torch.tensor([[1, 0], [2, 1], [1, 2]])
    kept = torch.tensor([[True, True], [False, True], [True, True]])
    order, ends, _ = sorted_assignments(experts, 3, kept)
    hidden, matrices, bias = torch.randn(3, 18), torch.randn(3, 18, 22), torch.randn(3, 22)
    tiles = row_tiles(ends, 6, torch.float32)
    more = {"order": order, "topk": 2}
    out, active = triton_grouped_matmul(hidden, matrices, ends, tiles, **more, bias=bias, activation="silu", gated=True)
    assert active is not None
    gradient = triton_grouped_outer(hidden, out, ends, tiles, **more, gather="left")
    transposed = triton_grouped_outer(out, hidden, ends, tiles, **more, gather="right")
    expected = torch.zeros(3, 18, 22)
    for row, assignment in enumerate(order[:5].tolist()):
        expert = experts.flatten()[assignment]
        product = hidden[assignment // 2] @ matrices[expert] + bias[expert]
        torch.testing.assert_close(out[row], product)
        torch.testing.assert_close(active[row], torch.nn.functional.silu(product[:11]) * product[11:])
        expected[expert] += torch.outer(hidden[assignment // 2], product)
    assert not out[5].any()
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(transposed, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_refusals_name_argument_and_reason():
    left, matrices, ends = torch.zeros(4, 8), torch.zeros(2, 8, 8), ends_of([2, 2])
    with pytest.raises(ValueError, match="`left` and `matrices`"):
        grouped_matmul(torch.zeros(4, 9), matrices, ends, backend="loop")
    with pytest.raises(ValueError, match=r"`matrices`.*dtype"):
        grouped_matmul(left, matrices.double(), ends, backend="loop")
    with pytest.raises(ValueError, match=r"`ends`.*int32"):
        grouped_matmul(left, matrices, ends.long(), backend="loop")
    with pytest.raises(ValueError, match=r"`bias` \(9,\) of torch.float32 must be \(2, 8\) of torch.float32"):
        grouped_matmul(left, matrices, ends, backend="loop", bias=torch.zeros(9))
    with pytest.raises(ValueError, match=r"`backend` \(torch\).*16 bytes, not 9"):
        grouped_matmul(left, torch.zeros(2, 8, 9), ends, backend="torch")
    with pytest.raises(ValueError, match="needs Triton"):
        grouped_matmul(left.double(), matrices.double(), ends, backend="triton")
    with pytest.raises(ValueError, match="one of auto, triton, torch, loop"):
        grouped_matmul(left, matrices, ends, backend="fast")  # pyrefly: ignore[bad-argument-type]


# ---------------------------------------------------------------- gather and combine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_and_combine_undo_each_other(dtype):
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(6, 4, generator=generator).argsort(1)[:, :3]
    kept = torch.rand(6, 3, generator=generator) > 0.25
    order, _, places = sorted_assignments(experts, 4, kept)
    hidden = torch.randn(6, 10, dtype=dtype, generator=generator).requires_grad_()
    gates = torch.rand(6, 3, dtype=dtype, generator=generator).requires_grad_()
    out = combine_rows(gather_rows(hidden, order, places), gates, places, order)
    share = (gates * kept).sum(1, keepdim=True)
    torch.testing.assert_close(out, hidden * share)
    outer = torch.randn(6, 10, dtype=dtype, generator=generator)
    got = torch.autograd.grad(out, (hidden, gates), outer)
    torch.testing.assert_close(got[0], outer * share)
    torch.testing.assert_close(got[1], (outer * hidden).sum(1, keepdim=True) * kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # Triton, and plain PyTorch
def test_the_gate_of_a_dropped_assignment_reaches_nothing(dtype):
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(6, 4, generator=generator).argsort(1)[:, :3]
    kept = torch.rand(6, 3, generator=generator) > 0.25
    kept[0, 0] = False  # empty rows, which have no assignment, must not read the first one's gate
    order, _, places = sorted_assignments(experts, 4, kept)
    rows = torch.randn(len(order), 10, dtype=dtype, generator=generator)
    gates = torch.rand(6, 3, dtype=dtype, generator=generator)
    outer = torch.randn(6, 10, dtype=dtype, generator=generator)

    def results(dropped: float) -> tuple[torch.Tensor, ...]:
        leaves = rows.clone().requires_grad_(), gates.masked_fill(~kept, dropped).requires_grad_()
        out = combine_rows(*leaves, places, order)
        return out, *torch.autograd.grad(out, leaves, outer)

    for got, expected in zip(results(math.nan), results(0.0), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_custom_operations_are_well_formed():
    order, ends, places = sorted_assignments(torch.tensor([[1, 0], [0, 2]]), 3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    left = torch.randn(4, 8, requires_grad=True)
    torch.library.opcheck(_gather, (left[:2].detach().requires_grad_(), order, places), test_utils=checks)
    torch.library.opcheck(_combine, (left, torch.rand(2, 2), places, order), test_utils=checks)
    for bias in (None, torch.randn(3, 8, requires_grad=True)):
        torch.library.opcheck(_grouped_matmul, (left, torch.randn(3, 8, 8), ends, bias, "loop"), test_utils=checks)


# ---------------------------------------------------------------- configs


@looped("capability", [None, 80, 86, 89, 90, 100, 103, 120])
def test_a_table_has_one_height_of_rows(capability):
    kinds: tuple[Kind, ...] = ("gated", "activated", "rows")
    for dtype in (torch.bfloat16, torch.float32):
        for low in (False, True):
            for aligned in (False, True):
                heights = {tile_config(k, dtype, capability, few_rows=low, aligned=aligned).block_m for k in kinds}
                assert len(heights) == 1
    assert (
        capability is None or tile_config("rows", torch.bfloat16, capability, few_rows=True).block_m == FEW_ROWS_BLOCK_M
    )


def test_low_and_aligned():
    assert has_few_rows(rows=8 * 95, experts=8)
    assert not has_few_rows(rows=8 * 96, experts=8)
    assert is_aligned(1, 16, 4096)
    assert not is_aligned(16, 24)
