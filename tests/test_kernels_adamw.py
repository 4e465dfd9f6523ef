"""AdamW: equal to torch's own, kernel equal to the reference, 16-bit weights follow their main weights."""

import pytest
import torch

from stoker.kernels.adamw import adamw_step, reference_adamw_step, triton_adamw_step

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(shapes, dtype, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def number(step, device="cpu"):
    return torch.tensor(step, dtype=torch.float64, device=device)


def test_equals_torch_adamw_in_fp64():
    shapes = [(7, 5), (11,)]
    weights = tensors(shapes, torch.float64, 0)
    theirs = [w.clone().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    moments = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    for step in range(1, 6):
        gradients = tensors(shapes, torch.float64, step)
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient * 0.5
        optimizer.step()
        adamw_step(weights, weights, gradients, *moments, step=number(step), grad_scale=torch.tensor(0.5), **SETTINGS)
    for ours, expected in zip(weights, theirs, strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_kernel_equals_reference(device, scaled, separate):
    rates = torch.tensor([0.5, 1.0, 20.0], device=device) if scaled else None
    shapes = [(33, 65), (1,), (1025,)]
    state = {}
    for name, function in (("reference", reference_adamw_step), ("triton", triton_adamw_step)):
        main = tensors(shapes, torch.float32, 0, device)
        params = [w.to(torch.float16) for w in main] if separate else main
        moments = [[torch.zeros_like(w) for w in main] for _ in range(2)]
        for step in range(1, 4):
            gradients = tensors(shapes, torch.float16 if separate else torch.float32, step, device)
            scale = torch.tensor(0.7, device=device)
            step_of = {"step": number(step, device), "grad_scale": scale, "rates": rates}
            function(params, main, gradients, *moments, **step_of, **SETTINGS)
        state[name] = [*params, *main, *moments[0], *moments[1]]
    for ours, expected in zip(state["triton"], state["reference"], strict=True):
        tolerance = 2e-3 if ours.dtype == torch.float16 else 2e-6
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    if separate:
        count = len(shapes)
        for param, main in zip(state["triton"][:count], state["triton"][count : 2 * count], strict=True):
            assert torch.equal(param, main.to(torch.float16))
