"""The router's logits in fp32 from 16-bit tokens and weights: as exact as from fp32 copies of them."""

from __future__ import annotations

import pytest
import torch
from tiers import DEVICES
from torch import Tensor

from stoker.kernels.moe.router_logits import _router_logits, reference_router_logits, router_logits


def case(dtype: torch.dtype, device: str, experts: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a weight, and the gradient of the logits."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((300, 64), (experts, 64), (300, experts))
    tokens, weight, outer = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return tokens.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), outer


def error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_exact_as_copies_in_fp32(dtype: torch.dtype, device: str) -> None:
    tokens, weight, outer = case(dtype, device)
    leaves = [x.detach().double().requires_grad_() for x in (tokens, weight)]
    truth = leaves[0] @ leaves[1].t()
    expected = torch.autograd.grad(truth, leaves, outer.double())
    got = _router_logits(tokens, weight)
    assert got.dtype == torch.float32
    assert error(got, truth) < 1e-6
    gradients = torch.autograd.grad(got, (tokens, weight), outer)
    rounded = torch.autograd.grad(reference_router_logits(tokens, weight, torch.float32), (tokens, weight), outer)
    for mine, reference, exact in zip(gradients, rounded, expected, strict=True):
        assert mine.dtype == dtype
        assert error(mine, exact) < 1.05 * error(reference, exact)  # which is that of rounding the result


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    tokens, weight, _ = case(torch.bfloat16, device)
    torch.library.opcheck(_router_logits, (tokens, weight))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "of_weight", "experts", "narrow"),
    [
        (torch.bfloat16, torch.bfloat16, 8, True),
        (torch.bfloat16, torch.float32, 8, False),
        (torch.bfloat16, torch.bfloat16, 6, False),
        (torch.float32, torch.float32, 8, False),
    ],
)
def test_no_copy_of_the_tokens_where_none_is_needed(
    dtype: torch.dtype, of_weight: torch.dtype, experts: int, narrow: bool
) -> None:
    tokens, weight, _ = case(torch.float32, "cuda", experts)
    got = router_logits(tokens.to(dtype), weight.to(of_weight), torch.float32)
    assert got.dtype == torch.float32
    assert ("router_logits" in type(got.grad_fn).__name__) == narrow
