"""Fused split of QKV and rotary embedding: Triton against plain torch, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import cases, full_only, looped
from torch import Tensor

from stoker.kernels.fused_qkv_rope import (
    _fused_qkv_rope,
    fused_qkv_rope,
    reference_qkv_rope,
    triton_backward,
    triton_forward,
)
from stoker.kernels.launch import HAS_TRITON
from stoker.kernels.rope import rotary_table

ROWS, TOKENS, HEADS, GROUPS, WIDTH = 2, 5, 6, 3, 24
interpreted = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")
KINDS = {"whole": WIDTH, "part": 10}
ROTATIONS = [(False, torch.float64), (True, torch.float32), (False, torch.bfloat16)]  # interleaved, dtype
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles(kind: str, dtype: torch.dtype, own_positions: bool) -> tuple[Tensor, Tensor]:
    cosine, sine = rotary_table(20, KINDS[kind], dtype=torch.promote_types(dtype, torch.float32))
    if own_positions:
        places = torch.tensor([[0, 1, 2, 0, 1], [9, 3, 3, 19, 0]])
        return cosine[places], sine[places]
    return cosine[:TOKENS], sine[:TOKENS]


def heads_first(gradient: Tensor) -> Tensor:
    """The same numbers in the order of memory that some attention kernels write: (batch, heads, tokens, head_dim)."""
    return gradient.transpose(1, 2).contiguous().transpose(1, 2)


def compare(device: str, dtype: torch.dtype, kind: str, interleaved: bool, own_positions: bool) -> None:
    projected = randn(ROWS, TOKENS, HEADS + 2 * GROUPS, WIDTH, dtype=dtype).to(device).requires_grad_()
    cosine, sine = (table.to(device) for table in angles(kind, dtype, own_positions))
    wanted = reference_qkv_rope(projected, cosine, sine, GROUPS, interleaved)
    gradients = tuple(randn(*part.shape, dtype=dtype, seed=n).to(device) for n, part in enumerate(wanted, start=1))
    (wanted_gradient,) = torch.autograd.grad(wanted, projected, gradients)
    found = triton_forward(projected.detach(), cosine, sine, GROUPS, interleaved)
    bound = TOLERANCE[dtype]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)
    assert torch.equal(found[2], wanted[2])  # values are not touched
    for query, key, value in (gradients, [heads_first(gradient) for gradient in gradients]):
        gradient = triton_backward((query, key, value), cosine, sine, interleaved)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=bound, atol=bound)


@interpreted
@pytest.mark.parametrize(
    ("kind", "own_positions", "interleaved", "dtype"),
    cases(((kind, own, *more) for kind in KINDS for own in (False, True) for more in ROTATIONS), fast=3),
)
def test_triton_is_plain_torch(kind: str, own_positions: bool, interleaved: bool, dtype: torch.dtype) -> None:
    compare("cpu", dtype, kind, interleaved, own_positions)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(kind: str, own_positions: bool, interleaved: bool, dtype: torch.dtype) -> None:
    compare("cuda", dtype, kind, interleaved, own_positions)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_through_autograd(compiled: bool) -> None:
    """The size of a model: many heads, programs of several heads, a part that no program fills."""
    projected = randn(2, 300, 40, 128, dtype=torch.bfloat16).cuda().requires_grad_()
    cosine, sine = (table.cuda() for table in rotary_table(300, 128))
    split: Any = torch.compile(fused_qkv_rope, fullgraph=True) if compiled else fused_qkv_rope
    wanted = reference_qkv_rope(projected, cosine, sine, 4, False)
    gradients = [torch.randn_like(part) for part in wanted]
    (wanted_gradient,) = torch.autograd.grad(wanted, projected, gradients)
    found = split(projected, cosine, sine, 4)
    (gradient,) = torch.autograd.grad(found, projected, gradients)
    for mine, theirs in zip((*found, gradient), (*wanted, wanted_gradient), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=8e-3, atol=8e-3)


@full_only
@interpreted
def test_custom_operation_is_well_formed() -> None:
    projected = randn(ROWS, TOKENS, HEADS + 2 * GROUPS, WIDTH, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(_fused_qkv_rope, (projected, *angles("part", torch.float32, False), GROUPS, False))


GOOD: dict[str, Any] = {
    "projected": torch.zeros(2, 5, 10, 8),
    "cosine": torch.zeros(5, 4),
    "sine": torch.zeros(5, 4),
    "groups": 2,
}


@looped(
    ("name", "value"),
    [
        ("projected", torch.zeros(2, 5, 4, 8)),
        ("projected", torch.zeros(2, 5, 80)),
        ("cosine", torch.zeros(4, 4)),
        ("cosine", torch.zeros(5, 5)),
        ("sine", torch.zeros(5, 3)),
        ("sine", torch.zeros(3, 5, 4)),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, value: Any) -> None:
    fused_qkv_rope(**GOOD)
    with pytest.raises(ValueError, match=f"^`{name}`"):
        fused_qkv_rope(**GOOD | {name: value})
