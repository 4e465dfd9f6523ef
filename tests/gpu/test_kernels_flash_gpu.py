"""Flash attention on a GPU with scores that fp32 exponents do not resolve: a right value or NaN, never a wrong one."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels.attention.flash.ops import attention_and_lse
from stoker.kernels.attention.inputs import AttentionInputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_with_keys_are_not_empty_whatever_their_scores(dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, 256, 2, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in range(3))
    for exponent in range(6, 37, 2):
        size = 10.0 ** (exponent / 2)
        if size > torch.finfo(dtype).max / 8:
            break
        for sign in (1.0, -1.0):  # with -1 all scores are negative and large
            queries, keys = (q.abs(), sign * k.abs()) if sign < 0 else (q, k)
            queries, keys, values = ((size * x).to(dtype) if x is not v else x.to(dtype) for x in (queries, keys, v))
            found, lse = attention_and_lse(AttentionInputs(queries, keys, values, causal=causal))
            assert not torch.isneginf(lse).any(), (exponent, sign)
            is_nan = found.isnan().any(dim=-1)
            assert (found[~is_nan].abs().amax(dim=-1) > 0).all(), (exponent, sign)
            assert exponent > 8 or not is_nan.any()
