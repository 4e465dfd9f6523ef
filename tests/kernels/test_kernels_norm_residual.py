"""Norms fused with the residual branch: their backward against autograd in fp64, and what a compiled layer saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from compiled_graphs import CompiledGraphs
from tiers import DEVICES, full_only, spread
from torch import Tensor

from stoker.kernels import norm_residual as module
from stoker.kernels.norm_functions import layer_norm, rms_norm
from stoker.kernels.norm_residual import (
    _backward_with_normed,
    _norm_residual_backward,
    norm_residual,
    norm_residual_linear,
)
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.layer import Layer
from stoker.models.layers import fused_linear
from stoker.models.layers.context import LayerContext
from stoker.models.layers.fused_linear import norm_linear
from stoker.models.layers.mlp import MLP
from stoker.models.layers.norm import LayerNorm, RMSNorm
from stoker.models.layers.self_attention import SelfAttention


class Case(NamedTuple):
    """A residual stream, weight and bias of its norm, if it is LayerNorm, and gradients of stream, norm, norm again."""

    stream: Tensor
    weight: Tensor
    bias: Tensor | None
    outer: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self[:3] if isinstance(x, Tensor)]

    def detached(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.stream.detach(), self.weight.detach(), None if self.bias is None else self.bias.detach()


KINDS = ["layernorm", "rmsnorm"]


def case(kind: str, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    generator = torch.Generator().manual_seed(0)
    stream, *outer = (torch.randn(2, rows // 2, width, generator=generator) * size for size in (3.0, 1.0, 0.7, 0.4))
    weight, bias = torch.randn(2, width, generator=generator)
    stream, weight, bias, *outer = (x.to(device, dtype) for x in (stream + 1.0, weight, bias, *outer))
    leaves = [x.requires_grad_() for x in (stream, weight, bias)]
    return Case(leaves[0], leaves[1], leaves[2] if kind == "layernorm" else None, outer)


def plain_norm(leaves: list[Tensor], **options: Any) -> Tensor:
    """Return the norm of stream, weight and, if there is one, bias."""
    return (layer_norm if len(leaves) > 2 else rms_norm)(*leaves, **options)


def exact_gradients(given: list[Tensor], outer: list[Tensor], *, zero_centered: bool) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in given]
    normed = plain_norm(leaves, epsilon=1e-2, zero_centered=zero_centered)
    return torch.autograd.grad((leaves[0], *[normed] * (len(outer) - 1)), leaves, [x.double() for x in outer])


# rows beside the pieces they are cut into: fewer, a whole number, some left over; widths beside powers of two
SHAPES = [(6, 40), (8, 1024), (34, 1500), (1200, 24)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "width", "twice", "kind"), spread(SHAPES, (False, True), KINDS))
def test_gradients_are_those_of_fp64(
    rows: int, width: int, twice: bool, kind: str, device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 12)
    options: dict[str, Any] = {"epsilon": 1e-2, "zero_centered": width == 40}
    given = case(kind, rows, width, torch.float32, device)
    outer = given.outer[: 2 + twice]
    expected = exact_gradients(given.leaves, outer, zero_centered=width == 40)
    output_bias = torch.zeros(width, device=device, requires_grad=True) if rows < 1000 else None
    forked = norm_residual(*given[:3], two_outputs=twice, output_bias=output_bias, **options)
    forked = tuple(x for x in forked if x is not None)
    assert torch.equal(forked[0], given.stream)
    normed = plain_norm(given.leaves, **options)
    assert len(forked) == 2 + twice
    assert all(torch.equal(x, normed) for x in forked[1:])
    leaves = given.leaves
    if output_bias is not None:
        leaves, expected = [*leaves, output_bias], (*expected, outer[0].double().sum((0, 1)))
    for got, truth in zip(torch.autograd.grad(forked, leaves, outer), expected, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twice", [False, True])
def test_bf16_errors_are_those_of_one_rounding(twice: bool, kind: str, device: str) -> None:
    given = case(kind, 24, 260, torch.bfloat16, device)
    outer = given.outer[: 2 + twice]
    expected = exact_gradients(given.leaves, outer, zero_centered=False)
    forked = norm_residual(*given[:3], epsilon=1e-2, zero_centered=False, two_outputs=twice)
    forked = tuple(x for x in forked if x is not None)
    for got, truth in zip(torch.autograd.grad(forked, given.leaves, outer), expected, strict=True):
        assert got.dtype == torch.bfloat16
        error, rounding = ((x - truth).norm() for x in (got.double(), truth.bfloat16().double()))
        assert error <= 1.02 * rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_stream_beside_16_bit_weights(dtype: torch.dtype, kind: str, device: str) -> None:
    given = case(kind, 24, 260, torch.float32, device)
    on, *outer = given.outer
    leaves = [given.stream, *(x.detach().to(dtype).requires_grad_() for x in given.leaves[1:])]
    outer = [on, *(x.to(dtype) for x in outer)]
    bias = leaves[2] if kind == "layernorm" else None
    forked = norm_residual(leaves[0], leaves[1], bias, epsilon=1e-2, zero_centered=False, two_outputs=True)
    forked = tuple(x for x in forked if x is not None)
    assert [x.dtype for x in forked] == [torch.float32, dtype, dtype]
    expected = exact_gradients(leaves, outer, zero_centered=False)
    found = torch.autograd.grad(forked, leaves, outer)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    for got, truth in zip(found, expected, strict=True):
        error = max(1e-5, torch.finfo(got.dtype).eps)
        torch.testing.assert_close(got.double(), truth, rtol=error, atol=error * truth.abs().max().item())
    detached = Case(leaves[0], leaves[1], bias, outer).detached()
    *_, normed = module.triton_backward(on, outer[1], None, *detached, 1e-2, False, with_normed=True)
    assert normed is not None
    truth = plain_norm([x.detach().double() for x in leaves], epsilon=1e-2)
    assert normed.dtype == dtype
    error, rounding = ((x.double() - truth).norm() for x in (normed, truth.to(dtype)))
    assert error <= 1.02 * rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "width", "learns", "biased", "kind"), spread(SHAPES, (True, False), (True, False), KINDS)
)
def test_projection_has_the_gradients_of_fp64_and_keeps_no_norm(
    rows: int, width: int, learns: bool, biased: bool, kind: str, device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 12)
    zero_centered, out = width == 40, 16
    given = case(kind, rows, width, torch.float32, device)
    on = given.outer[0]
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((out, width), (out,), (2, rows // 2, out))]
    weight, bias, outer = (x.to(device) for x in drawn)
    linear = [weight.requires_grad_(learns), *([bias.requires_grad_(learns)] if biased else [])]
    options: dict[str, Any] = {"epsilon": 1e-2, "zero_centered": zero_centered}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = norm_residual_linear(*given[:3], weight, linear[1] if biased else None, **options)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (*given.leaves, weight)]
    norms, tensors = len(given.leaves), [*given.leaves, *linear]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    normed = plain_norm(exact[:norms], **options)
    expected = exact[0], torch.nn.functional.linear(normed, *exact[norms:])
    leaves, wanted = ([x for x in each if x.requires_grad] for each in (tensors, exact))
    assert len(leaves) == norms + learns * (1 + biased)
    truths = torch.autograd.grad(expected, wanted, (on.double(), outer.double()))
    gradients = torch.autograd.grad(found, leaves, (on, outer))
    for got, truth in zip((*found, *gradients), (*expected, *truths), strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_that_is_made_again_has_one_rounding(kind: str, device: str) -> None:
    given = case(kind, 24, 260, torch.bfloat16, device)
    on, outer, _ = given.outer
    *_, normed = module.triton_backward(on, outer, None, *given.detached(), 1e-2, False, with_normed=True)
    truth = plain_norm([x.detach().double() for x in given.leaves], epsilon=1e-2)
    assert normed is not None
    assert normed.dtype == torch.bfloat16
    error, rounding = ((x.double() - truth).norm() for x in (normed, truth.bfloat16()))
    assert error <= 1.02 * rounding


@full_only
@pytest.mark.parametrize("kind", KINDS)
def test_the_custom_operations_are_well_formed(kind: str) -> None:
    given = case(kind, 6, 24, torch.float32)
    operands, outer = (*given.detached(), 1e-5, True), given.outer
    torch.library.opcheck(_backward_with_normed, (*outer[:2], *operands))
    for second, with_sum in ((None, True), (outer[2], False)):
        torch.library.opcheck(_norm_residual_backward, (*outer[:2], second, *operands, with_sum))


# ---------------------------------------------------------------- when it serves


def module_of(given: Case) -> LayerNorm | RMSNorm:
    """Return a norm of these parameters."""
    norm: LayerNorm | RMSNorm = RMSNorm(24, 1e-2)
    if given.bias is not None:
        norm = LayerNorm(24, 1e-2)
        norm.bias = torch.nn.Parameter(given.bias.detach())
    norm.weight = torch.nn.Parameter(given.weight.detach())
    return norm


def traced(
    part: Callable[[Tensor], Tensor], stream: Tensor, leaves: list[Tensor]
) -> tuple[Any, list[str], list[Tensor]]:
    """Gradients of a compiled part, operations of its backward, and what is kept for that."""
    graphs = CompiledGraphs()
    output = torch.compile(part, backend=graphs.backend, fullgraph=True, dynamic=False)(stream)
    gradients = torch.autograd.grad(output.square().sum(), [x for x in leaves if x.requires_grad])
    (forward,), (backward,), (outputs,) = graphs.forwards, graphs.backwards, graphs.num_outputs
    kept = [x.meta["val"] for x in next(iter(forward.find_nodes(op="output"))).args[0][outputs:]]
    return gradients, [str(node.target) for node in backward.nodes], kept


def assert_near(found: Any, expected: Any, dtype: torch.dtype) -> None:
    for got, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=4 * torch.finfo(dtype).eps, atol=0.01 * truth.abs().max().item())


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serves_compiled_norms_that_learn_and_keeps_no_more(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(kind, 6, 24, dtype)
    stream, norm = given.stream, module_of(given)
    matrix = torch.randn(24, 24).to(dtype).requires_grad_()

    def part(hidden: Tensor) -> Tensor:
        read = norm.forward_with_residual(2 * hidden, True)
        again = read.hidden if read.second_hidden is None else read.second_hidden
        return read.residual + read.hidden @ matrix + again.sin()

    def full(kept: list[Tensor]) -> int:
        kept = [x for x in kept if x.numel() == stream.numel()]
        assert all(x.dtype == stream.dtype for x in kept)
        return len(kept)

    leaves = [stream, matrix, *norm.parameters()]
    plain, operations, kept = traced(part, stream, leaves)
    assert not any("norm_residual_backward" in name for name in operations)  # on a CPU
    monkeypatch.setattr(module, "triton_runs_on", lambda tensor: True)
    ours, operations, ours_kept = traced(part, stream, leaves)
    assert sum("norm_residual_backward" in name for name in operations) == 1
    assert full(ours_kept) <= full(kept)
    assert_near(ours, plain, dtype)
    assert norm.forward_with_residual(stream, True).residual is stream  # as written
    norm.requires_grad_(False)
    _, operations, _ = traced(part, stream, leaves)
    assert not any("norm_residual_backward" in name for name in operations)
    torch.compiler.reset()


@full_only
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_serves_compiled_norms_that_shall_not_be_kept(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(kind, 6, 24, dtype)
    stream, norm, linear = given.stream, module_of(given), torch.nn.Linear(24, 32, dtype=dtype)

    def part(hidden: Tensor) -> Tensor:
        hidden = hidden + 1.0
        projected, on = norm_linear(norm, linear, hidden, hidden)
        assert on is not None
        return on + projected[..., :24]

    leaves = [stream, *norm.parameters(), *linear.parameters()]
    plain, operations, kept = traced(part, stream, leaves)
    assert not any("norm_residual_backward" in name for name in operations)  # on a CPU
    monkeypatch.setattr(module, "triton_runs_on", lambda tensor: True)
    ours, operations, ours_kept = traced(part, stream, leaves)
    assert sum("norm_residual_backward_with_normed" in name for name in operations) == 1
    assert sum(x.numel() for x in ours_kept) <= sum(x.numel() for x in kept)
    assert_near(ours, plain, dtype)
    hidden = stream + 1.0
    assert norm_linear(norm, linear, hidden, hidden)[1] is hidden  # as written
    assert norm_linear(norm, linear, hidden)[1] is None
    torch.compiler.reset()


def attention(inputs: Any) -> Tensor:
    """A stand-in for a backend, one head per group."""
    return inputs.q * inputs.k.sigmoid() + inputs.v


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_norms_of_a_compiled_layer_compute_the_gradients_of_the_output_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "encoder_seq_length": 24}
    keys = GPTKeys.model_validate(sizes | {"attention_dropout": 0.0})
    mlp = MLP(32, 48, nonlinearity="gelu_tanh", gated=False, bias=True, dropout=0.0)
    layer = Layer(
        attention_norm=LayerNorm(32, 1e-5),
        attention=SelfAttention(gpt_slice(keys, vocab_size=8).stack, {"training": attention}),
        mlp_norm=LayerNorm(32, 1e-5),
        mlp=mlp,
        dropout=0.0,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    stream, context = torch.randn(2, 12, 32, requires_grad=True), LayerContext("training")
    leaves = [stream, *layer.parameters()]

    def part(hidden: Tensor) -> Tensor:
        return layer(hidden, context)[0]

    def sums(operations: list[str]) -> int:
        return sum(name.startswith("stoker.norm_residual_backward") for name in operations)

    plain, operations, _ = traced(part, stream, leaves)
    assert sums(operations) == 0
    for module_of_path in (module, fused_linear):
        monkeypatch.setattr(module_of_path, "triton_runs_on", lambda tensor: True)
    summed: list[bool] = []
    run = module.triton_backward

    def recorded(*arguments: Any, with_sum: bool = False, **options: Any) -> Any:
        summed.append(with_sum)
        return run(*arguments, with_sum=with_sum, **options)

    monkeypatch.setattr(module, "triton_backward", recorded)
    ours, operations, _ = traced(part, stream, leaves)
    assert sums(operations) == 2
    assert summed == [True, True]
    for got, truth in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4 * truth.abs().max().item())
    summed.clear()
    mlp.down.bias.requires_grad_(False)
    traced(part, stream, leaves)
    assert summed == [False, True]
    torch.compiler.reset()
