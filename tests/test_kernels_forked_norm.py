"""The norm beside a stream that goes on: its backward against autograd in fp64, and what a compiled layer keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from stoker.kernels import forked_norm
from stoker.kernels.forked_norm import _forked_norm_backward, forked_rms_norm
from stoker.kernels.norms import rms_norm
from stoker.models.norms import RMSNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gradients_are_those_of_fp64(rows: int, width: int, twice: bool, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(forked_norm, "PROGRAMS", 12)
    zero_centered = width == 40
    stream, weight, outer = case(rows, width, torch.float32, device)
    outer = outer[: 2 + twice]
    expected = exact_gradients(stream, weight, outer, zero_centered=zero_centered)
    forked = forked_rms_norm(stream, weight, epsilon=1e-2, zero_centered=zero_centered, twice=twice)
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
    forked = forked_rms_norm(stream, weight, epsilon=1e-2, zero_centered=False, twice=twice)
    forked = tuple(x for x in forked if x is not None)
    for got, truth in zip(torch.autograd.grad(forked, (stream, weight), outer), expected, strict=True):
        assert got.dtype == torch.bfloat16
        error, rounding = ((x - truth).norm() for x in (got.double(), truth.bfloat16().double()))
        assert error <= 1.02 * rounding


def test_the_custom_operation_is_well_formed() -> None:
    stream, weight, outer = case(6, 24, torch.float32)
    for second in (None, outer[2]):
        torch.library.opcheck(_forked_norm_backward, (*outer[:2], second, stream.detach(), weight.detach(), 1e-5, True))


# ---------------------------------------------------------------- when it serves


def traced(norm: RMSNorm, stream: Tensor, matrix: Tensor) -> tuple[tuple[Tensor, ...], list[str], int]:
    """Gradients of a compiled part after a norm, operations of its backward, full tensors that are kept for that."""
    graphs: list[tuple[torch.fx.Graph, torch.fx.Graph, int]] = []

    def split(*given: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(*given, **options)
        graphs.append((forward.graph, backward.graph, options["num_fwd_outputs"]))
        return forward, backward

    def part(hidden: Tensor) -> Tensor:
        read = norm.forked(2 * hidden, True)
        again = read.normed if read.again is None else read.again
        return read.stream + read.normed @ matrix + again.sin()

    torch.compiler.reset()
    compiler = make_boxed_compiler(lambda graph, _: graph.forward)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=split, decompositions=select_decomp_table())
    output = torch.compile(part, backend=backend, fullgraph=True, dynamic=False)(stream)
    leaves = [x for x in (stream, matrix, norm.weight) if x.requires_grad]
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    ((forward, backward, outputs),) = graphs
    kept = [x.meta["val"] for x in next(iter(forward.find_nodes(op="output"))).args[0][outputs:]]
    full = [x for x in kept if x.numel() == stream.numel()]
    assert all(x.dtype == stream.dtype for x in full)
    return gradients, [str(node.target) for node in backward.nodes], len(full)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serves_compiled_norms_that_learn_and_keeps_no_more(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, weight, (matrix, *_) = case(6, 24, dtype)
    matrix = torch.randn(24, 24).to(dtype).requires_grad_()
    norm = RMSNorm(24, 1e-2)
    norm.weight = torch.nn.Parameter(weight.detach())
    plain, operations, kept = traced(norm, stream, matrix)
    assert not any("forked_norm" in name for name in operations)  # on a CPU
    monkeypatch.setattr(forked_norm, "triton_runs_on", lambda tensor: True)
    ours, operations, ours_kept = traced(norm, stream, matrix)
    assert sum("forked_norm_backward" in name for name in operations) == 1
    assert ours_kept <= kept
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=4 * torch.finfo(dtype).eps, atol=0.01 * expected.abs().max().item()
        )
    assert norm.forked(stream, True).stream is stream  # as written
    norm.requires_grad_(False)
    _, operations, _ = traced(norm, stream, matrix)
    assert not any("forked_norm" in name for name in operations)
    torch.compiler.reset()
