"""Gated activation: the kernels against torch's autograd in fp64, every gate, odd widths."""

import pytest
import torch
from tiers import DEVICES, cases

from stoker.kernels.activations import NONLINEARITIES
from stoker.kernels.gated_activation import (
    _gated_activation,
    gated_activation,
    reference_gated_activation,
    triton_backward,
    triton_forward,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", NONLINEARITIES)
@pytest.mark.parametrize(("shape", "width"), cases([((3,), 5), ((2, 3), 1030)], fast=1))
def test_kernels_equal_autograd_in_fp64(device, kind, shape, width):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(*shape, 2 * width, generator=generator) * 3
    outer = torch.randn(*shape, width, generator=generator)
    exact = gate_up.double().requires_grad_()
    expected = reference_gated_activation(exact, kind)
    expected_gradient = torch.autograd.grad(expected, exact, outer.double())[0]
    product = triton_forward(gate_up.to(device), kind)
    gradient = triton_backward(outer.to(device), gate_up.to(device), kind)
    torch.testing.assert_close(product.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.cpu().double(), expected_gradient, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", NONLINEARITIES)
def test_far_values_stay_finite(kind):
    gate_up = torch.tensor([[-200.0, -30.0, 0.0, 30.0, 200.0] + [1.0] * 5])
    product = triton_forward(gate_up, kind)
    gradient = triton_backward(torch.ones(1, 5), gate_up, kind)
    torch.testing.assert_close(product, reference_gated_activation(gate_up, kind))
    assert gradient.isfinite().all()


def test_custom_operations_are_well_formed():
    gate_up = torch.randn(2, 3, 16, requires_grad=True)
    torch.library.opcheck(_gated_activation, (gate_up, "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NONLINEARITIES)
def test_bf16_error_is_at_most_that_of_torch(kind):
    gate_up = torch.randn(64, 2 * 1000, device="cuda").bfloat16().requires_grad_()
    outer = torch.randn(64, 1000, device="cuda").bfloat16()
    exact = gate_up.detach().double().requires_grad_()
    truth = reference_gated_activation(exact, kind)
    truth_gradient = torch.autograd.grad(truth, exact, outer.double())[0]
    plain = reference_gated_activation(gate_up, kind)
    plain_gradient = torch.autograd.grad(plain, gate_up, outer)[0]
    ours = gated_activation(gate_up, kind)
    ours_gradient = torch.autograd.grad(ours, gate_up, outer)[0]
    assert (ours - truth).norm() <= 1.05 * (plain - truth).norm()
    assert (ours_gradient - truth_gradient).norm() <= 1.05 * (plain_gradient - truth_gradient).norm()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="even"):
        gated_activation(torch.zeros(2, 5), "silu")
    with pytest.raises(ValueError, match="one of gelu"):
        gated_activation(torch.zeros(2, 4), "swish")
