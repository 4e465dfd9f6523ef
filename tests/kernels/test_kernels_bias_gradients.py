"""Gradients of biases, summed where the gradients are computed: the kernels against fp64, and where they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_graphs import CompiledGraphs
from tiers import DEVICES, cases, full_only, spread
from torch import Tensor

from stoker.kernels import bias_gradients as module
from stoker.kernels.activations import NONLINEARITIES
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.layers import fused_linear
from stoker.models.layers.context import LayerContext
from stoker.models.layers.mlp import MLP
from stoker.models.layers.self_attention import SelfAttention

# rows and columns beside tiles and chunks: fewer, a whole number, some left over
SHAPES = [((3,), 5), ((2, 100), 300), ((48,), 512)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", cases(list(NONLINEARITIES), fast=2))
@pytest.mark.parametrize(("shape", "width"), SHAPES)
def test_activation_equals_autograd_in_fp64(
    device: str, kind: str, shape: tuple[int, ...], width: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 6)
    generator = torch.Generator().manual_seed(0)
    inputs, outer = (size * torch.randn(*shape, width, generator=generator) for size in (3.0, 1.0))
    exact = inputs.double().requires_grad_()
    (expected,) = torch.autograd.grad(NONLINEARITIES[kind](exact), exact, outer.double())
    gradient = outer.to(device)
    partial = module.activation_backward_(gradient, inputs.to(device), kind)
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-5, atol=2e-5)
    sums = expected.flatten(0, -2).sum(0)
    torch.testing.assert_close(partial.sum(0).cpu().double(), sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "width"),
    spread((torch.float32, torch.bfloat16), [(3, 3, 8), (12, 4, 64), (5, 1, 72)]),
)
def test_join_concatenates_and_sums(
    device: str, dtype: torch.dtype, heads: int, groups: int, width: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 12)
    parts = [torch.randn(2, 37, count, width, device=device).to(dtype) for count in (heads, groups, groups)]
    parts[1] = parts[1].transpose(0, 1).contiguous().transpose(0, 1)  # any strides
    joined, partial = module.join(*parts)
    expected = torch.cat(parts, dim=2)
    assert torch.equal(joined, expected)
    sums = expected.double().sum((0, 1)).flatten()
    torch.testing.assert_close(partial.sum(0).double(), sums, rtol=1e-5, atol=1e-4)


@full_only
def test_custom_operations_are_well_formed() -> None:
    gradient, inputs = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    torch.library.opcheck(module.activation_backward_, (gradient, inputs, "gelu"))
    torch.library.opcheck(module.join, tuple(torch.randn(2, 3, heads, 8) for heads in (4, 2, 2)))


# ---------------------------------------------------------------- where they serve


def attention(inputs: Any) -> Tensor:
    """A stand-in for a backend whose gradients are separate tensors, one head per group."""
    return inputs.q * inputs.k.sigmoid() + inputs.v


def traced(part: torch.nn.Module, hidden: Tensor, *arguments: Any) -> tuple[tuple[Tensor, ...], str]:
    """Gradients of a compiled part, and the graph of its backward."""
    graphs = CompiledGraphs()
    output = torch.compile(part, backend=graphs.backend, fullgraph=True, dynamic=False)(hidden, *arguments)
    leaves = [hidden, *(x for x in part.parameters() if x.requires_grad)]
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    torch.compiler.reset()
    return gradients, str(graphs.backwards[0])


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_serves_compiled_projections_with_biases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 24, 32, requires_grad=True)
    if name == "mlp":
        part: MLP | SelfAttention = MLP(32, 48, nonlinearity="gelu_tanh", gated=False, bias=True, dropout=0.0)
        arguments: tuple[Any, ...] = ()
        operation, linear = "activation_backward_with_sums", "up"
    else:
        sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "encoder_seq_length": 24}
        keys = GPTKeys.model_validate(sizes | {"attention_dropout": 0.0})
        part = SelfAttention(gpt_slice(keys, vocab_size=8).stack, {"training": attention})
        arguments = (LayerContext("training"),)
        operation, linear = "join_with_sums", "qkv"
    projection: Any = getattr(part, linear)
    torch.nn.init.normal_(projection.bias)
    plain, graph = traced(part, hidden, *arguments)
    assert operation not in graph  # on a CPU
    monkeypatch.setattr(fused_linear, "triton_runs_on", lambda tensor: True)
    ours, graph = traced(part, hidden, *arguments)
    assert graph.count(f"stoker.{operation}.default") == 1
    for got, truth in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4 * truth.abs().max().item())
    projection.bias.requires_grad_(False)
    assert operation not in traced(part, hidden, *arguments)[1]
