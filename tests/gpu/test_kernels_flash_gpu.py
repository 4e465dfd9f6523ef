"""Flash attention on a GPU: scores that fp32 does not resolve, gradients in one tensor, dQ in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch

from stoker.kernels import reference_attention
from stoker.kernels.attention.backends.registry import ATTENTION_FUNCTIONS
from stoker.kernels.attention.flash.kernel_arguments import FlashAttentionParams
from stoker.kernels.attention.flash.ops import NeedsGradient, _gradients, _results, attention_and_lse
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


@pytest.mark.parametrize(
    ("length", "head_dim", "causal", "biased"),
    [
        (320, 64, False, True),
        (320, 64, True, False),
        (4096, 64, True, False),
        (200, 80, True, True),
        (320, 128, True, True),
        (320, 256, False, False),
    ],
)
def test_gradients_in_one_tensor_have_the_same_bits(length: int, head_dim: int, causal: bool, biased: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    projected = torch.randn(2, length, 8, head_dim, device="cuda", generator=generator).bfloat16()
    q, k, v = projected.split((4, 2, 2), dim=2)
    bias = torch.randn(4, 65, device="cuda", generator=generator) if biased else None
    window = (-1, 0 if causal else -1)
    problem = FlashAttentionParams(
        None, bias, None, None, None, None, None, None, *window, head_dim**-0.5, 0.0, 0.0, length, length
    )
    needs = NeedsGradient(True, True, False, biased, False, False)
    out, lse = _results(q, k, v, problem)
    inputs = (torch.randn_like(out), None, q, k, v, out, lse, problem)
    apart, whole = _gradients(*inputs, needs), _gradients(*inputs, needs._replace(joined=3))
    assert whole[1] is None
    assert whole[2] is None
    found = whole[0]
    assert found is not None
    assert torch.equal(torch.cat([x for x in apart[:3] if x is not None], dim=2), found)
    if bias is not None:
        assert apart[4] is not None
        assert whole[4] is not None
        assert torch.equal(apart[4], whole[4])


@pytest.mark.parametrize(("batch", "biased"), [(2, False), (2, True), (20, False)])
def test_gradients_of_keys_and_values_in_one_tensor_have_the_same_bits(batch: int, biased: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    q = torch.randn(batch, 114, 4, 64, device="cuda", generator=generator).bfloat16()
    k, v = torch.randn(batch, 512, 8, 64, device="cuda", generator=generator).bfloat16().chunk(2, dim=2)
    bias = torch.randn(4, 65, device="cuda", generator=generator) if biased else None
    problem = FlashAttentionParams(None, bias, None, None, None, None, None, None, -1, -1, 0.125, 0.0, 0.0, 114, 512)
    out, lse = _results(q, k, v, problem)
    inputs = (torch.randn_like(out), None, q, k, v, out, lse, problem)
    for needs_q in (True, False):
        needs = NeedsGradient(needs_q, True, False, biased, False, False)
        apart, whole = _gradients(*inputs, needs), _gradients(*inputs, needs._replace(joined=2))
        assert whole[1] is not None
        assert whole[2] is None
        assert torch.equal(torch.cat([x for x in apart[1:3] if x is not None], dim=2), whole[1])
        for one, other in ((apart[0], whole[0]), (apart[4], whole[4])):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("causal", "queries", "keys"), [(True, 1024, 1024), (True, 2304, 2304), (False, 1024, 1024), (False, 700, 1100)]
)
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_queries_in_the_order_of_arrival(
    head_dim: int, groups: int, causal: bool, queries: int, keys: int
) -> None:
    """As accurate as bf16, alone, compiled and repeated in a CUDA graph; with more tiles than multiprocessors."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((4, queries, 8, head_dim), *((4, keys, groups, head_dim),) * 2)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes)
    upstream = torch.randn(shapes[0], device="cuda", generator=generator).bfloat16()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ATTENTION_FUNCTIONS["triton_atomic"](AttentionInputs(q, k, v, causal=causal))

    def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = function(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)

    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    expected = cast("torch.Tensor", reference_attention(*wide, causal=causal))
    exact = (expected.detach(), *torch.autograd.grad(expected, wide, upstream.double()))
    found = [run(attend), run(torch.compile(attend, fullgraph=True))]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(attend)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(attend)
    for _ in range(20):
        graph.replay()
        found.append(tuple(each.clone() for each in captured))
    for results in found:
        for ours, gold in zip(results, exact, strict=True):
            assert (ours.double() - gold).norm() < 0.01 * gold.norm()
