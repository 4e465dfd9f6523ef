"""Assignments sorted by expert, by counting: there are few experts, and a sort of any keys takes ten times as long.

Each block of assignments counts its own of every expert; a running sum over (expert, block) says where each block's
assignments of an expert begin, and within a block a key comes after its equals before it. Equal keys keep their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import jit, next_power_of_2, tl, triton

BLOCK = 128

# ---------------------------------------------------------------- Triton


@jit
def _keys(experts_pointer, kept_pointer, at, size, experts, HAS_KEPT: tl.constexpr):
    """The expert of each assignment, `experts` for a dropped one and `experts + 1` behind the last."""
    key = tl.load(experts_pointer + at, mask=at < size, other=0).to(tl.int32)
    if HAS_KEPT:
        key = tl.where(tl.load(kept_pointer + at, mask=at < size, other=0) != 0, key, experts)
    return tl.where(at < size, key, experts + 1)


@jit
def count_kernel(
    experts_pointer, kept_pointer, counts_pointer, size, experts, blocks,
    HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: how many of BLOCK assignments each expert has, a column of counts (experts + 1, blocks)."""
    block = tl.program_id(0)
    key = _keys(experts_pointer, kept_pointer, block * BLOCK + tl.arange(0, BLOCK), size, experts, HAS_KEPT)
    expert = tl.arange(0, BINS)
    tl.store(counts_pointer + expert * blocks + block, tl.histogram(key, BINS), mask=expert <= experts)


@jit
def place_kernel(
    experts_pointer, kept_pointer, counts_pointer, sums_pointer, order_pointer, places_pointer, size, experts, blocks,
    HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the rows of BLOCK assignments, and the assignments of these rows. sums: of counts, running."""
    block = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    at = block * BLOCK + number
    key = _keys(experts_pointer, kept_pointer, at, size, experts, HAS_KEPT)
    same = tl.reshape(key, (BLOCK, 1)) == tl.reshape(key, (1, BLOCK))
    earlier = tl.reshape(number, (1, BLOCK)) < tl.reshape(number, (BLOCK, 1))
    rank = tl.sum((same & earlier).to(tl.int32), axis=1)
    exists = at < size
    cell = tl.where(exists, key, 0) * blocks + block
    place = tl.load(sums_pointer + cell) - tl.load(counts_pointer + cell) + rank
    used = key < experts
    tl.store(order_pointer + place, tl.where(used, at, -1), mask=exists)
    tl.store(places_pointer + at, tl.where(used, place, -1), mask=exists)


# ---------------------------------------------------------------- custom operation


def triton_sorted(experts: Tensor, num_experts: int, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels: order, ends and places of `assignments.sorted_assignments`."""
    experts = experts.contiguous()
    kept = None if kept is None else kept.contiguous()
    size = experts.numel()
    blocks = triton.cdiv(size, BLOCK)
    order, places = (torch.empty(size, dtype=torch.int32, device=experts.device) for _ in range(2))
    counts = torch.empty(num_experts + 1, max(1, blocks), dtype=torch.int32, device=experts.device)
    if not size:
        return order, counts.new_zeros(num_experts), places.view(experts.shape)
    options = {"HAS_KEPT": kept is not None, "BLOCK": BLOCK, "num_warps": 4}
    bins = next_power_of_2(num_experts + 2)
    count_kernel[(blocks,)](experts, kept, counts, size, num_experts, blocks, BINS=bins, **options)
    sums = counts.flatten().cumsum(0, dtype=torch.int32)
    place_kernel[(blocks,)](experts, kept, counts, sums, order, places, size, num_experts, blocks, **options)
    return order, sums.view(-1, blocks)[:-1, -1].contiguous(), places.view(experts.shape)


@torch.library.custom_op("stoker::moe_sorted_assignments", mutates_args=())
def sorted_on_device(experts: Tensor, num_experts: int, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_sorted` as an operation that the compiler does not look into."""
    return triton_sorted(experts, num_experts, kept)


@sorted_on_device.register_fake
def _(experts: Tensor, num_experts: int, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    narrow = {"dtype": torch.int32, "device": experts.device}
    return (
        torch.empty(experts.numel(), **narrow),
        torch.empty(num_experts, **narrow),
        torch.empty(experts.shape, **narrow),
    )
