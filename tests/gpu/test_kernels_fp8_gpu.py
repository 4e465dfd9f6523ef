"""fp8 on a GPU: casts bit for bit as the reference, products against fp64 of the rounded operands, whole layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_sync import forbid_device_sync
from torch import Tensor

from stoker.kernels.fp8.cast_kernels import triton_amax, triton_cast
from stoker.kernels.fp8.expert_rows import aligned_assignments
from stoker.kernels.fp8.experts import fp8_experts
from stoker.kernels.fp8.gated_mlp import fp8_gated_mlp
from stoker.kernels.fp8.grouped import (
    _expert_matrices,
    grouped_scaled_matmul,
    grouped_scaled_outer,
)
from stoker.kernels.fp8.hopper_launch import uses_hopper
from stoker.kernels.fp8.linear import fp8_linear
from stoker.kernels.fp8.operands import Quantized, Source, dequantize
from stoker.kernels.fp8.quantize import _cast, _eager_amax, quantize, quantize_backward, transpose
from stoker.kernels.fp8.recipe import Format, Fp8Recipe, Granularity, Scaling
from stoker.kernels.fp8.reference import produce
from stoker.kernels.fp8.scaled_matmul import scaled_matmul
from stoker.kernels.fp8.weight_cast import cast_weight
from stoker.kernels.gated_activation import gated_activation
from stoker.kernels.moe.assignments import Assignments, sorted_assignments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8"
    ),
]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "tile", "block")
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise", "blockwise")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return bf16 rows of different magnitudes."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(shape, device="cuda", generator=generator)
    return (values * torch.randn(*shape[:-1], 1, device="cuda", generator=generator).exp()).bfloat16()


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("shape", [(384, 512), (133, 80), (1, 16), (16, 2048)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_casts_equal_the_reference_bit_for_bit(granularity: Granularity, shape: tuple[int, int], spoiled: bool) -> None:
    tensor = random(*shape)
    tensor[-1, :8] = torch.tensor([0.0, -0.0, 2.0**-133, 1e-30, -1e-38, 3e38, 1e-6, 448.0])
    if spoiled:
        tensor[0, 1], tensor[shape[0] // 2, 15] = torch.nan, torch.inf
    none = torch.empty(0, device="cuda")
    amax = none, none
    if granularity in ("tensor", "row"):
        amax = _eager_amax(tensor, granularity, True, True)
        for got, expected in zip(triton_amax([tensor], "none", "", granularity, True, True), amax, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    formats: tuple[Format, ...] = ("e4m3", "e5m2")
    for format in formats:
        for margin in (0, 1):
            options: Any = (*amax, format, granularity, margin, True, True)
            got = triton_cast([tensor], "none", "", *options)
            expected = _cast([tensor.cpu()], "none", "", *(x.cpu() if isinstance(x, Tensor) else x for x in options))
            for first in (0, 2):
                for ours, theirs in zip(got[first : first + 2], expected[first : first + 2], strict=True):
                    assert ours.shape == theirs.shape
                    if not spoiled:
                        assert torch.equal(ours.cpu().float(), theirs.float())
                ours, theirs = (
                    dequantize(Quantized(data.cpu(), scale.cpu(), granularity))
                    for data, scale in (got[first : first + 2], expected[first : first + 2])
                )
                assert torch.equal(ours.isfinite(), theirs.isfinite())
                assert spoiled == (not ours.isfinite().all())


@pytest.mark.parametrize("granularity", ["tensor", "row", "tile"])
@pytest.mark.parametrize("producer", ["activation", "gated", "gated_backward", "rms_norm", "layer_norm"])
def test_casts_of_producers_are_as_near_as_those_of_the_unrounded_values(
    producer: Any, granularity: Granularity
) -> None:
    rows = random(300, 512).float()
    variance, mean = torch.var_mean(rows, 1, correction=0)
    norm = rows.bfloat16(), variance.add(1e-5).rsqrt(), random(512, seed=2), mean, random(512, seed=3)
    tensors = {"gated_backward": (rows.bfloat16(), random(300, 256, seed=1)), "rms_norm": norm[:3], "layer_norm": norm}
    tensors = tensors.get(producer, norm[:1])
    exact, _ = produce(producer, [tensor.double() for tensor in tensors], "silu")
    pair = quantize(Source(producer, tensors, "silu"), "e4m3", granularity)
    wanted = quantize(exact, "e4m3", granularity)
    assert pair.columns is not None
    transposed = F.pad(exact.t(), (0, pair.columns.data.shape[1] - 300))
    for got, expected, truth in zip(pair, wanted, (exact, transposed), strict=True):
        assert got is not None
        assert expected is not None
        error, least = (dequantize(x, torch.float64) - truth for x in (got, expected))
        assert error.norm() <= 1.001 * least.norm()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("left", "right"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("tile", "block"), ("tile", "tile")], ids=str)
@pytest.mark.parametrize("shape", [(256, 384, 512), (133, 80, 144), (640, 272, 1040)], ids=str)
def test_products_equal_fp64_of_the_rounded_operands(
    kinds: tuple[Granularity, Granularity], left: Format, right: Format, shape: tuple[int, int, int], fast: bool
) -> None:
    rows, columns, depth = shape
    a = quantize(random(rows, depth), left, kinds[0], columns=False).rows
    b = quantize(random(columns, depth, seed=1), right, kinds[1], columns=False).rows
    assert a is not None
    assert b is not None
    exact = dequantize(a, torch.float64) @ dequantize(b, torch.float64).t()
    size = dequantize(a, torch.float64).abs() @ dequantize(b, torch.float64).abs().t()
    got = scaled_matmul(a, b, torch.bfloat16, fast_accumulation=fast)
    assert ((got.double() - exact).abs() <= error_bound(exact, size, fast)).all()


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    output = function(*tensors)
    outer = torch.linspace(-9, 9, output.numel(), device=output.device).view_as(output).sin().bfloat16()
    outer = outer.to(output.dtype)  # the same values in every dtype
    return output.detach(), *torch.autograd.grad(output, tensors, outer)


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], relative: float) -> None:
    for number, (first, second) in enumerate(zip(got, expected, strict=True)):
        error = ((first.double() - second.double()).norm() / second.double().norm()).item()
        assert error < relative, (number, error)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_layers_equal_their_emulation(scaling: Scaling, compiled: bool) -> None:
    """fp64 inputs are emulated exactly, with the same casts; bf16 results round, as do sums in the tensor cores: by
    2^-13 of the sum of magnitudes, which is some 30 times the sum of 768 products of either sign.
    """
    torch._dynamo.reset()
    recipe = Fp8Recipe(scaling)
    inputs, up, down = (random(*shape).requires_grad_() for shape in ((2, 133, 256), (768, 256), (128, 384)))

    def linear(inputs: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(inputs, weight, None, recipe)

    def mlp(inputs: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return fp8_gated_mlp(inputs, up, down, "silu", recipe)

    run: Any = torch.compile(fullgraph=True) if compiled else lambda function: function
    wide = [tensor.detach().double().requires_grad_() for tensor in (inputs, up, down)]
    assert_close(gradients(run(linear), inputs, up), gradients(linear, *wide[:2]), 1e-2)
    # [gate | up] and the gradient of the product are rounded to bf16 before they are cast, so some elements are cast to
    # the neighbour: one of 2^8 in e5m2, by 18 % of itself, which is 1.1 % of a matrix; in a gradient several add up
    assert_close(gradients(run(mlp), inputs, up, down), gradients(mlp, *wide), 4e-2)
    plain = gradients(lambda x, up, down: F.linear(gated_activation(F.linear(x, up), "silu"), down), *wide)
    assert_close(gradients(run(mlp), inputs, up, down), plain, 0.12)


def test_a_step_is_captured_in_a_graph_and_never_synchronizes() -> None:
    recipe = Fp8Recipe()
    inputs, up, down = (random(*shape).requires_grad_() for shape in ((2, 128, 256), (768, 256), (128, 384)))
    casts = [cast_weight(weight, recipe) for weight in (up, down)]

    def step() -> tuple[Tensor, ...]:
        for weight, cast in zip((up, down), casts, strict=True):
            cast_weight(weight, recipe, out=cast)
        return gradients(
            lambda x, up, down: fp8_gated_mlp(x, up, down, "silu", recipe, up_cast=casts[0], down_cast=casts[1]),
            inputs, up, down,
        )  # fmt: skip

    step()
    with forbid_device_sync():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs.mul_(2)
        up.mul_(3)
    graph.replay()
    expected = step()
    torch.cuda.synchronize()
    assert all(torch.equal(first, second) for first, second in zip(captured, expected, strict=True))


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_weights_kept_in_fp8_are_transposed_exactly(granularity: Granularity) -> None:
    rows = quantize(random(272, 400), "e4m3", granularity, columns=False).rows
    assert rows is not None
    assert torch.equal(dequantize(transpose(rows)), dequantize(rows).t())


def test_the_gradient_of_a_gate_and_the_product_come_from_one_pass() -> None:
    gate_up, outer = random(256, 1024), random(256, 512, seed=1)
    product = Source("gated", (gate_up,), "silu")
    recipe = Fp8Recipe()
    expected = quantize(product, "e4m3", "tensor", rows=False).columns
    amax = _eager_amax(produce("gated", [gate_up], "silu")[0], "tensor", True, True)[0]
    _, got, _ = quantize_backward(
        Source("gated_backward", (gate_up, outer), "silu"), recipe, amax, rows=True, columns=True
    )
    assert got is not None
    assert expected is not None
    difference = dequantize(got) - dequantize(expected)
    assert difference.norm() < 1e-2 * dequantize(expected).norm()


def routed_rows(tokens: int = 4096, experts: int = 4, topk: int = 2) -> tuple[Assignments, Tensor]:
    """Return assignments of uneven numbers of tokens to experts, some of which are dropped, and their gates."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(tokens, experts, generator=generator) + torch.linspace(0, 2, experts)
    kept = torch.rand(tokens, topk, generator=generator) > 0.1
    chosen = sorted_assignments(scores.topk(topk, 1).indices.cuda(), experts, kept.cuda())
    return chosen, torch.rand(tokens, topk, generator=generator).cuda()


@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_grouped_products_equal_fp64_of_the_rounded_operands(
    granularity: Granularity, fast: bool, multiple: int
) -> None:
    """Experts at multiples of 128 rows are multiplied by the kernels for Hopper, on it."""
    (order, ends, _), experts, width, depth = aligned_assignments(routed_rows()[0], multiple), 4, 384, 640
    rows = order.shape[0]
    a = quantize(random(rows, depth), "e5m2", granularity, columns=False).rows
    stacked = quantize(random(experts * width, depth, seed=1), "e4m3", granularity, columns=False).rows
    beside = quantize(random(width, experts * depth, seed=1), "e4m3", granularity, columns=False).rows
    assert a is not None
    assert stacked is not None
    assert beside is not None
    hopper = uses_hopper(a, stacked, torch.bfloat16, multiple, width, depth)
    assert hopper == (multiple == 128 and torch.cuda.get_device_capability() == (9, 0))
    options: dict[str, Any] = {"fast_accumulation": fast, "multiple": multiple}
    left, firsts = dequantize(a, torch.float64), [0, *ends.tolist()[:-1]]
    for b in (stacked, beside):
        got, amax = grouped_scaled_matmul(a, b, ends, width, torch.bfloat16, row_amax=True, **options)
        matrices = _expert_matrices(b, experts, depth, torch.float64)
        exact, size = (torch.zeros(rows, width, dtype=torch.float64, device="cuda") for _ in range(2))
        for expert, (first, stop) in enumerate(zip(firsts, ends.tolist(), strict=True)):
            exact[first:stop] = left[first:stop] @ matrices[expert].t()
            size[first:stop] = left[first:stop].abs() @ matrices[expert].t().abs()
        assert ((got.double() - exact).abs() <= error_bound(exact, size, fast)).all()
        assert torch.equal(amax, got.abs().amax(1).float())
    down = quantize(random(rows, width), "e5m2", granularity, rows=False).columns
    across = quantize(random(rows, depth, seed=1), "e4m3", granularity, rows=False).columns
    assert down is not None
    assert across is not None
    got = grouped_scaled_outer(down, across, ends, torch.bfloat16, **options)
    left, right = dequantize(down, torch.float64), dequantize(across, torch.float64)
    for expert, (first, stop) in enumerate(zip(firsts, ends.tolist(), strict=True)):
        pair = left[:, first:stop], right[:, first:stop].t()
        exact, size = pair[0] @ pair[1], pair[0].abs() @ pair[1].abs()
        assert ((got[expert].double() - exact).abs() <= error_bound(exact, size, fast)).all()


def error_bound(exact: Tensor, size: Tensor, fast: bool) -> Tensor:
    """Return the bound of a bf16 result: the tensor cores of Hopper keep 13 bits of the fraction of a partial sum
    (DeepSeek-V3, section 3.3.2).
    """
    return 2.0**-8 * exact.abs() + (2.0**-9 if fast else 2.0**-11) * size


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_equal_their_emulation(scaling: Scaling, gated: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    recipe, (assignments, gates) = Fp8Recipe(scaling), routed_rows()
    hidden, up, down = random(4096, 256), random(4, 256 * (1 + gated), 256, seed=1), random(4, 256, 256, seed=2)
    tensors = [tensor.requires_grad_() for tensor in (hidden, gates, up * 0.05, down * 0.05)]

    def experts(hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return fp8_experts(hidden, gates, up, down, assignments, nonlinearity="silu", gated=gated, recipe=recipe)

    run: Any = torch.compile(experts, fullgraph=True) if compiled else experts
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    assert_close(gradients(run, *tensors), gradients(experts, *wide), 3e-2)


def test_an_infinite_value_reaches_every_gradient_of_experts() -> None:
    assignments, gates = routed_rows()
    hidden, up, down = random(4096, 256), random(4, 512, 256, seed=1), random(4, 256, 256, seed=2)
    hidden[assignments.order[0] // 2, 5] = torch.inf  # of a row of the first expert
    tensors = [tensor.requires_grad_() for tensor in (hidden, gates, up, down)]

    def experts(hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return fp8_experts(hidden, gates, up, down, assignments, nonlinearity="silu", gated=True, recipe=Fp8Recipe())

    assert not any(found.isfinite().all() for found in gradients(experts, *tensors))
