"""Gated down projection: kernel and function against autograd, every gate, odd widths, frozen weights, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import DEVICES, cases
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stoker.kernels import gated_activation as activation_module
from stoker.kernels import gated_down_projection as projection_module
from stoker.kernels.activations import NONLINEARITIES
from stoker.kernels.gated_activation import (
    gated_activation,
    reference_gated_activation,
    triton_forward,
)
from stoker.kernels.gated_down_projection import (
    _backward_with_product,
    gated_projection,
    reference_gated_projection,
    triton_backward_with_product,
)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve the CPU too, in the interpreter."""
    for module in (activation_module, projection_module):
        monkeypatch.setattr(module, "triton_runs_on", lambda _: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", NONLINEARITIES)
@pytest.mark.parametrize(("shape", "width"), cases([((3,), 5), ((2, 3), 1030)], fast=1))
def test_kernel_equals_autograd_in_fp64(device: str, kind: str, shape: tuple[int, ...], width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(*shape, 2 * width, generator=generator) * 3
    outer = torch.randn(*shape, width, generator=generator)
    exact = gate_up.double().requires_grad_()
    expected = reference_gated_activation(exact, kind)
    (expected_gradient,) = torch.autograd.grad(expected, exact, outer.double())
    gradient, product = triton_backward_with_product(outer.to(device), gate_up.to(device), kind)
    torch.testing.assert_close(product.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.cpu().double(), expected_gradient, rtol=1e-5, atol=2e-5)
    assert torch.equal(product, triton_forward(gate_up.to(device), kind))  # the bits of the first run


def drawn(bias: bool, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 2 * 24), (10, 24), *([(10,)] if bias else [])]
    return tuple(torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)


def gradients(function: Any, given: tuple[Tensor, ...], kind: str) -> tuple[Tensor, ...]:
    gate_up, weight, *bias = given
    output = function(gate_up, weight, bias[0] if bias else None, kind)
    wanted = [tensor for tensor in given if tensor.requires_grad]
    outer = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return (output, *torch.autograd.grad((output.float() * outer).sum(), wanted))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", cases(NONLINEARITIES, fast=2))
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (1, 2), (0, 1)])
def test_function_equals_autograd(kind: str, frozen: tuple[int, ...]) -> None:
    given = drawn(True, torch.float32)
    for number in frozen:
        given[number].requires_grad_(False)
    ours, expected = (gradients(f, given, kind) for f in (gated_projection, reference_gated_projection))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_only_what_goes_in_is_kept() -> None:
    given = drawn(True, torch.float32)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        gated_projection(given[0], given[1], given[2], "silu")
    assert {tensor.data_ptr() for tensor in kept} == {given[0].data_ptr(), given[1].data_ptr()}


@pytest.mark.usefixtures("interpreted")
def test_under_autocast_weights_are_narrow_and_their_gradients_wide() -> None:
    given = (drawn(True, torch.bfloat16)[0], *drawn(True, torch.float32)[1:])  # as a projection gives it
    with torch.autocast("cpu", torch.bfloat16):
        ours, *found = gradients(gated_projection, given, "silu")
        expected, *wanted = gradients(reference_gated_projection, given, "silu")
    assert ours.dtype == expected.dtype == torch.bfloat16
    for one, other, of in zip(found, wanted, given, strict=True):
        assert one.dtype == other.dtype == of.dtype
        assert (one - other).norm() <= 0.02 * other.norm()


def test_custom_operation_is_well_formed() -> None:
    torch.library.opcheck(_backward_with_product, (torch.randn(2, 3, 8), torch.randn(2, 3, 16), "silu"))


def test_without_a_gpu_it_is_plain_torch() -> None:
    given = drawn(False, torch.float64)
    for one, other in zip(
        *(gradients(f, given, "gelu") for f in (gated_projection, reference_gated_projection)), strict=True
    ):
        assert torch.equal(one, other)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="one of gelu"):
        gated_projection(torch.zeros(2, 8), torch.zeros(3, 4), None, "swish")
    with pytest.raises(ValueError, match="twice the width"):
        gated_projection(torch.zeros(2, 8), torch.zeros(3, 5), None, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NONLINEARITIES)
@pytest.mark.parametrize("bias", [False, True])
def test_gpu_bits_are_those_of_activation_and_linear(kind: str, bias: bool) -> None:
    given = drawn(bias, torch.bfloat16, "cuda")

    def plain(gate_up: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        return F.linear(gated_activation(gate_up, kind), weight, bias)

    for one, other in zip(*(gradients(f, given, kind) for f in (gated_projection, plain)), strict=True):
        assert torch.equal(one, other)
