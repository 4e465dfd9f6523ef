"""Attention sinks, value heads of another width and chunks on a GPU, in the shapes of the models that brought them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, assert_accurate, build, run
from torch import Tensor

from stoker.kernels import flash_attention, reference_attention, scaled_masked_softmax
from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.inputs import AttentionInputs

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt-oss, full layer": Case(heads=16, groups=2, head_dim=64, queries=1000, keys=1000, causal=True, sinks=True),
    "gpt-oss, window": Case(
        heads=16, groups=2, head_dim=64, queries=1000, keys=1000, causal=True, sinks=True, window=(127, -1)
    ),
    "DeepSeek": Case(heads=4, groups=4, head_dim=192, value_dim=128, queries=700, keys=700, causal=True),
    "Llama 4": Case(heads=10, groups=2, head_dim=128, queries=1500, keys=1500, causal=True, chunk=512),
    "packed": Case(
        lengths=((700, 700), (1, 1), (300, 300)), heads=4, groups=2, head_dim=64, value_dim=128, causal=True,
        sinks=True, chunk=256,
    ),
    "all, wide": Case(
        heads=4, groups=2, head_dim=256, value_dim=64, queries=300, keys=600, causal=True, sinks=True, chunk=200,
        reach=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_accuracy(model: str, dtype: torch.dtype) -> None:
    assert_accurate(flash_attention, MODELS[model], dtype, "cuda")


@pytest.mark.parametrize("model", MODELS)
def test_same_bits_each_time(model: str) -> None:
    problem = build(MODELS[model], torch.bfloat16, "cuda")
    first = run(flash_attention, problem)
    for _ in range(10):
        for name, tensor in run(flash_attention, problem).items():
            assert torch.equal(tensor, first[name]), name


@pytest.mark.parametrize("model", ["gpt-oss, window", "DeepSeek", "Llama 4"])
def test_unfused_attention_with_the_fused_softmax(model: str) -> None:
    """Output and gradients in bf16 against the definition in fp64."""
    problem = build(MODELS[model], torch.bfloat16, "cuda")
    exact = problem.detached(torch.float64)
    options = {name: value for name, value in problem.options.items() if name != "window_size"}
    window = None if problem.options["window_size"] == (-1, -1) else problem.options["window_size"]

    def unfused(**tensors: Any) -> Tensor:
        return UnfusedAttention()(AttentionInputs(**tensors, **options, window_size=window))

    results: list[Any] = []
    for function, given in ((reference_attention, exact), (unfused, problem)):
        arguments: dict[str, Any] = given.arguments if function is reference_attention else {**given.tensors}
        output: Any = function(**arguments)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
        results.append([output, *torch.autograd.grad(output, list(given.tensors.values()), upstream)])
    for wanted, ours in zip(*results, strict=True):
        assert (ours - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("columns", [128, 4096, 32769])
def test_softmax_with_sinks_is_one_over_one_more_column(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 8, columns, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    sinks = torch.tensor([-5.0, 0.0, 3.0, 9.0], device="cuda", requires_grad=True)
    wide = x.detach().double().requires_grad_()
    wide_sinks = sinks.detach().double().requires_grad_()
    column = wide_sinks[:, None, None].expand(1, 4, 8, 1)
    expected = torch.cat((wide, column), dim=-1).softmax(-1)[..., :columns]
    ours = scaled_masked_softmax(x, sinks=sinks)
    upstream = torch.rand(x.shape, generator=generator).to("cuda", torch.bfloat16)  # sums of one sign: none cancels
    found = (ours, *torch.autograd.grad(ours, (x, sinks), upstream))
    truth = (expected, *torch.autograd.grad(expected, (wide, wide_sinks), upstream.double()))
    for got, wanted in zip(found, truth, strict=True):
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("width", [64, 80], ids=["Hopper", "portable"])
def test_tiles_outside_of_a_chunk_are_not_read(width: int) -> None:
    """Queries of the last chunk: NaN in the values of the others would reach a product with probabilities of 0."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(length: int) -> Tensor:
        return torch.randn(1, length, 8, width, generator=generator, device="cuda").bfloat16()

    query, key, value = random(1024), random(4096), random(4096)
    key[:, :3072] = value[:, :3072] = float("nan")
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = flash_attention(*tensors, causal=True, attention_chunk=1024)
    assert isinstance(output, Tensor)
    query_gradient, *others = torch.autograd.grad(output.sum(), tensors)
    assert output.isfinite().all()
    assert query_gradient.isfinite().all()
    for gradient in others:
        assert (gradient[:, :3072] == 0).all()
        assert gradient[:, 3072:].isfinite().all()
