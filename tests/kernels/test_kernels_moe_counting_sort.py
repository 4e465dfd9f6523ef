"""The counting sort of assignments is torch's stable sort: any number of experts, blocks, drops; on the host too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some
from tiers import examples
from torch import Tensor

from stoker.kernels.moe.assignments import Assignments, sorted_assignments
from stoker.kernels.moe.counting_sort import BLOCK, counting_sort, triton_counting_sort


def drawn(tokens: int, experts: int, topk: int, crowd: int, seed: int = 0) -> Tensor:
    """Choices of which those of `crowd` tokens in ten are the first experts."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[torch.rand(tokens, generator=generator) < crowd / 10, :topk] += 1.0
    return scores.topk(topk).indices


def check(experts: Tensor, number: int, kept: Tensor | None, device: str) -> None:
    wanted = sorted_assignments(experts, number, kept)
    found = Assignments(*triton_counting_sort(experts.to(device), number, None if kept is None else kept.to(device)))
    for name in Assignments._fields:
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == torch.int32
        assert torch.equal(one.cpu(), other), name


@examples(30)
@given(
    some.integers(0, 3 * BLOCK), some.integers(1, 40), some.integers(1, 4), some.integers(0, 10),
    some.sampled_from([None, 0.0, 0.3, 1.0]),
)  # fmt: skip
@example(BLOCK, 8, 2, 5, 0.3)
@example(1, 1, 1, 10, None)
@example(2 * BLOCK + 1, 129, 4, 0, 0.1)
def test_it_is_the_stable_sort(tokens: int, experts: int, topk: int, crowd: int, dropped: float | None) -> None:
    chosen = drawn(tokens, experts, min(topk, experts), crowd)
    kept = None if dropped is None else torch.rand(chosen.shape, generator=torch.Generator().manual_seed(1)) >= dropped
    check(chosen, experts, kept, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"), [(16384, 8, 2), (16384, 128, 8), (5, 3, 1), (4097, 256, 8), (1, 8, 2)]
)
def test_on_a_gpu(tokens: int, experts: int, topk: int, dropped: bool) -> None:
    chosen = drawn(tokens, experts, topk, 5)
    kept = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(1)) >= 0.2 if dropped else None
    check(chosen, experts, kept, "cuda")


@pytest.mark.parametrize("kept", [None, torch.tensor([[True, False], [False, True], [True, True]])])
def test_the_operation_is_well_formed(kept: Tensor | None) -> None:
    torch.library.opcheck(counting_sort, (torch.tensor([[0, 1], [2, 1], [3, 0]]), 4, kept))
