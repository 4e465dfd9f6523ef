"""Linear layers of the decode step of one sequence: the kernel against plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiers import cases
from torch import Tensor

from stoker.kernels.decode_linear import Norm, Tile, reference_decode_linear, triton_decode_linear
from stoker.kernels.launch import HAS_TRITON

interpreted = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")
WIDTH, OUTPUTS = 80, 24


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arguments(case: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of one of CASES."""
    gated = case.startswith("gated")
    outputs = OUTPUTS * (2 if gated else 1)
    made: dict[str, Any] = {"inputs": randn(1, WIDTH, dtype=dtype), "weight": randn(outputs, WIDTH, dtype=dtype)}
    if "bias" in case:
        made["bias"] = randn(outputs, seed=2, dtype=dtype)
    if "residual" in case:
        made["residual"] = randn(1, OUTPUTS, seed=3, dtype=dtype)
    if "norm" in case:
        made["norm"] = Norm(randn(WIDTH, seed=4, dtype=dtype), 1e-2, "centered" in case)
    return made | ({"activation": case.split("_")[-1], "gated": gated} if "act" in case else {})


CASES = [
    "plain", "norm_bias", "norm_centered_residual", "residual_bias", "gated_norm_act_silu",
    "gated_norm_bias_act_gelu", "norm_act_relu",
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("case", cases(CASES, fast=5))
def test_the_kernel_is_plain_torch(case: str) -> None:
    given = arguments(case)
    found = triton_decode_linear(**given, tile=Tile(16, 32, 4))
    torch.testing.assert_close(found, reference_decode_linear(**given), rtol=1e-12, atol=1e-12)


@interpreted
def test_in_bf16_it_is_as_near_to_the_truth_as_separate_operations() -> None:
    for case in CASES:
        given = arguments(case, torch.bfloat16)
        exact: Any = {name: t.double() if isinstance(t, Tensor) else t for name, t in given.items()}
        if "norm" in given:
            exact["norm"] = given["norm"]._replace(weight=given["norm"].weight.double())
        truth = reference_decode_linear(**exact)
        mine, theirs = (
            (f(**given).double() - truth).square().mean() for f in (triton_decode_linear, reference_decode_linear)
        )
        assert mine <= 1.25 * theirs, case


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "outputs"), [(576, 100), (2048, 3072), (5632, 2048)])
def test_on_a_gpu(width: int, outputs: int) -> None:
    """Near the truth, and the same bits every time."""
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    inputs, weight = draw(1, width).bfloat16(), (draw(2 * outputs, width) / width**0.5).bfloat16()
    norm, residual = Norm(draw(width).bfloat16(), 1e-5, False), draw(1, outputs).bfloat16()
    every: tuple[dict[str, Any], ...] = (
        {"weight": weight[:outputs], "residual": residual},
        {"weight": weight, "norm": norm, "bias": weight[:, 0].contiguous(), "activation": "silu", "gated": True},
    )
    for options in every:
        exact: Any = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
        if "norm" in options:
            exact["norm"] = norm._replace(weight=norm.weight.double())
        truth = reference_decode_linear(inputs.double(), **exact)
        found = triton_decode_linear(inputs, **options)
        plain = reference_decode_linear(inputs, **options)
        mine, theirs = ((each.double() - truth).square().mean() for each in (found, plain))
        assert mine <= 1.25 * theirs
        assert torch.equal(found, triton_decode_linear(inputs, **options))
