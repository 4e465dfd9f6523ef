"""RMSNorm fused with the residual branch: its backward against autograd in fp64, and what a compiled layer saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_graphs import CompiledGraphs
from tiers import DEVICES, cases, full_only
from torch import Tensor

from stoker.kernels import rms_norm_residual as module
from stoker.kernels.norm_functions import rms_norm
from stoker.kernels.rms_norm_residual import (
    _backward_with_normed,
    _rms_norm_residual_backward,
    rms_norm_residual,
    rms_norm_residual_linear,
)
from stoker.models.layers.fused_linear import norm_linear
from stoker.models.layers.norm import RMSNorm


def case(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, list[Tensor]]:
    """A stream, a weight, the gradients of stream, norm, and norm again."""
    generator = torch.Generator().manual_seed(0)
    stream, *outer = (torch.randn(2, rows // 2, width, generator=generator) * size for size in (3.0, 1.0, 0.7, 0.4))
    weight = torch.randn(width, generator=generator)
    stream, weight, *outer = (x.to(device, dtype) for x in (stream, weight, *outer))
    return stream.requires_grad_(), weight.requires_grad_(), outer


def exact_gradients(stream: Tensor, weight: Tensor, outer: list[Tensor], *, zero_centered: bool) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in (stream, weight)]
    normed = rms_norm(leaves[0], leaves[1], epsilon=1e-2, zero_centered=zero_centered)
    return torch.autograd.grad((leaves[0], *[normed] * (len(outer) - 1)), leaves, [x.double() for x in outer])


# rows beside the pieces they are cut into: fewer, a whole number, some left over; widths beside powers of two
SHAPES = [(6, 40), (8, 1024), (34, 1500), (1200, 24)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("rows", "width"), cases(SHAPES, fast=2))
def test_gradients_are_those_of_fp64(rows: int, width: int, twice: bool, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 12)
    zero_centered = width == 40
    stream, weight, outer = case(rows, width, torch.float32, device)
    outer = outer[: 2 + twice]
    expected = exact_gradients(stream, weight, outer, zero_centered=zero_centered)
    forked = rms_norm_residual(stream, weight, epsilon=1e-2, zero_centered=zero_centered, two_outputs=twice)
    forked = tuple(x for x in forked if x is not None)
    assert torch.equal(forked[0], stream)
    normed = rms_norm(stream, weight, epsilon=1e-2, zero_centered=zero_centered)
    assert len(forked) == 2 + twice
    assert all(torch.equal(x, normed) for x in forked[1:])
    for got, truth in zip(torch.autograd.grad(forked, (stream, weight), outer), expected, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("twice", [False, True])
def test_bf16_errors_are_those_of_one_rounding(twice: bool, device: str) -> None:
    stream, weight, outer = case(24, 260, torch.bfloat16, device)
    outer = outer[: 2 + twice]
    expected = exact_gradients(stream, weight, outer, zero_centered=False)
    forked = rms_norm_residual(stream, weight, epsilon=1e-2, zero_centered=False, two_outputs=twice)
    forked = tuple(x for x in forked if x is not None)
    for got, truth in zip(torch.autograd.grad(forked, (stream, weight), outer), expected, strict=True):
        assert got.dtype == torch.bfloat16
        error, rounding = ((x - truth).norm() for x in (got.double(), truth.bfloat16().double()))
        assert error <= 1.02 * rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_stream_beside_16_bit_weights(dtype: torch.dtype, device: str) -> None:
    stream, weight, (on, *outer) = case(24, 260, torch.float32, device)
    narrow = [x.detach().to(dtype) for x in (weight, *outer)]
    weight = narrow[0].requires_grad_()
    forked = rms_norm_residual(stream, weight, epsilon=1e-2, zero_centered=False, two_outputs=True)
    forked = tuple(x for x in forked if x is not None)
    assert [x.dtype for x in forked] == [torch.float32, dtype, dtype]
    expected = exact_gradients(stream, weight, [on, *narrow[1:]], zero_centered=False)
    found = torch.autograd.grad(forked, (stream, weight), [on, *narrow[1:]])
    assert [x.dtype for x in found] == [torch.float32, dtype]
    for got, truth, error in zip(found, expected, (1e-5, torch.finfo(dtype).eps), strict=True):
        atol = error * truth.abs().max().item()
        torch.testing.assert_close(got.double(), truth, rtol=error, atol=atol)
    *_, normed = module.triton_backward(
        on, narrow[1], None, stream.detach(), weight.detach(), 1e-2, False, with_normed=True
    )
    assert normed is not None
    truth = rms_norm(stream.double(), weight.double(), epsilon=1e-2)
    assert normed.dtype == dtype
    error, rounding = ((x.double() - truth).norm() for x in (normed, truth.to(dtype)))
    assert error <= 1.02 * rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(("rows", "width"), cases(SHAPES, fast=2))
def test_projection_has_the_gradients_of_fp64_and_keeps_no_norm(
    rows: int, width: int, learns: bool, biased: bool, device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 12)
    zero_centered, out = width == 40, 16
    stream, gain, (on, *_) = case(rows, width, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((out, width), (out,), (2, rows // 2, out))]
    weight, bias, outer = (x.to(device) for x in drawn)
    given = [stream, gain, weight.requires_grad_(learns), *([bias.requires_grad_(learns)] if biased else [])]
    options: dict[str, Any] = {"epsilon": 1e-2, "zero_centered": zero_centered}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = rms_norm_residual_linear(stream, gain, weight, given[3] if biased else None, **options)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (stream, gain, weight)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
    normed = rms_norm(exact[0], exact[1], **options)
    expected = exact[0], torch.nn.functional.linear(normed, exact[2], exact[3] if biased else None)
    leaves, wanted = ([x for x in each if x.requires_grad] for each in (given, exact))
    assert len(leaves) == 2 + learns * (1 + biased)
    truths = torch.autograd.grad(expected, wanted, (on.double(), outer.double()))
    gradients = torch.autograd.grad(found, leaves, (on, outer))
    for got, truth in zip((*found, *gradients), (*expected, *truths), strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_norm_that_is_made_again_has_one_rounding(device: str) -> None:
    stream, weight, (on, outer, _) = case(24, 260, torch.bfloat16, device)
    *_, normed = module.triton_backward(
        on, outer, None, stream.detach(), weight.detach(), 1e-2, False, with_normed=True
    )
    truth = rms_norm(stream.double(), weight.double(), epsilon=1e-2)
    assert normed is not None
    assert normed.dtype == torch.bfloat16
    error, rounding = ((x.double() - truth).norm() for x in (normed, truth.bfloat16()))
    assert error <= 1.02 * rounding


@full_only
def test_the_custom_operations_are_well_formed() -> None:
    stream, weight, outer = case(6, 24, torch.float32)
    torch.library.opcheck(_backward_with_normed, (*outer[:2], stream.detach(), weight.detach(), 1e-5, True))
    for second in (None, outer[2]):
        torch.library.opcheck(
            _rms_norm_residual_backward, (*outer[:2], second, stream.detach(), weight.detach(), 1e-5, True)
        )


# ---------------------------------------------------------------- when it serves


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serves_compiled_norms_that_learn_and_keeps_no_more(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, weight, (matrix, *_) = case(6, 24, dtype)
    matrix = torch.randn(24, 24).to(dtype).requires_grad_()
    norm = RMSNorm(24, 1e-2)
    norm.weight = torch.nn.Parameter(weight.detach())

    def part(hidden: Tensor) -> Tensor:
        read = norm.forward_with_residual(2 * hidden, True)
        again = read.hidden if read.second_hidden is None else read.second_hidden
        return read.residual + read.hidden @ matrix + again.sin()

    def full(kept: list[Tensor]) -> int:
        kept = [x for x in kept if x.numel() == stream.numel()]
        assert all(x.dtype == stream.dtype for x in kept)
        return len(kept)

    leaves = [stream, matrix, norm.weight]
    plain, operations, kept = traced(part, stream, leaves)
    assert not any("forked_norm" in name for name in operations)  # on a CPU
    monkeypatch.setattr(module, "triton_runs_on", lambda tensor: True)
    ours, operations, ours_kept = traced(part, stream, leaves)
    assert sum("forked_norm_backward" in name for name in operations) == 1
    assert full(ours_kept) <= full(kept)
    assert_near(ours, plain, dtype)
    assert norm.forward_with_residual(stream, True).residual is stream  # as written
    norm.requires_grad_(False)
    _, operations, _ = traced(part, stream, leaves)
    assert not any("forked_norm" in name for name in operations)
    torch.compiler.reset()


@full_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_serves_compiled_norms_that_shall_not_be_kept(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, weight, _ = case(6, 24, dtype)
    norm, linear = RMSNorm(24, 1e-2), torch.nn.Linear(24, 32, dtype=dtype)
    norm.weight = torch.nn.Parameter(weight.detach())

    def part(hidden: Tensor) -> Tensor:
        hidden = hidden + 1.0
        projected, on = norm_linear(norm, linear, hidden, hidden)
        assert on is not None
        return on + projected[..., :24]

    leaves = [stream, norm.weight, *linear.parameters()]
    plain, operations, kept = traced(part, stream, leaves)
    assert not any("forked_norm" in name for name in operations)  # on a CPU
    monkeypatch.setattr(module, "triton_runs_on", lambda tensor: True)
    ours, operations, ours_kept = traced(part, stream, leaves)
    assert sum("forked_norm_backward_with_normed" in name for name in operations) == 1
    assert sum(x.numel() for x in ours_kept) <= sum(x.numel() for x in kept)
    assert_near(ours, plain, dtype)
    hidden = stream + 1.0
    assert norm_linear(norm, linear, hidden, hidden)[1] is hidden  # as written
    assert norm_linear(norm, linear, hidden)[1] is None
    torch.compiler.reset()
