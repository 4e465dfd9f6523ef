"""LoRA added to a wide output: the kernel that writes it first, and an output that starts as the residual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiers import DEVICES, cases

from stoker.kernels.lora import lora_linear as linear_module
from stoker.kernels.lora.lora_forward import reference_lora_update, triton_lora_update
from stoker.kernels.lora.lora_linear import lora_linear


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", cases(["nothing", "a bias", "a stream"], fast=1))
@pytest.mark.parametrize(("parts", "rank"), [([300], 4), ([256, 130], 16), ([129, 3, 128], 20)], ids=str)
def test_the_kernel_equals_plain_torch(parts: list[int], rank: int, start: str, device: str) -> None:
    torch.manual_seed(0)
    rows = 70
    low = torch.randn(rows, len(parts) * rank, device=device)
    up = torch.randn(sum(parts), rank, device=device)
    begins = {"nothing": None, "a bias": torch.randn(sum(parts)), "a stream": torch.randn(rows, sum(parts))}[start]
    begins = None if begins is None else begins.to(device)
    found, wanted = (f(low, up, 0.5, parts, begins) for f in (triton_lora_update, reference_lora_update))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [[2048], [2048, 512, 512]], ids=str)
def test_gpu_bf16_is_rounded_once(parts: list[int]) -> None:
    torch.manual_seed(0)
    low, up = torch.randn(4096, 16 * len(parts), device="cuda"), torch.randn(sum(parts), 16, device="cuda")
    low, up, start = low.bfloat16(), up.bfloat16(), torch.randn(4096, sum(parts), device="cuda").bfloat16()
    truth = reference_lora_update(low.double(), up.double(), 0.5, parts, start.double())
    found = triton_lora_update(low, up, 0.5, parts, start)
    torch.testing.assert_close(found.double(), truth, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "bias", "wider", "dropout"])
def test_an_output_is_added_to_a_stream(case: str) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(7, 8)
    down, up = torch.randn(3, 8, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    stream = torch.randn(2, 6, 7, dtype=torch.float64 if case == "wider" else torch.float32, requires_grad=True)
    bias = torch.randn(7) if case == "bias" else None
    dropped = F.dropout(inputs, 0.3) if case == "dropout" else None
    how = {"scale": 0.5, "parts": (7,), "dropped": dropped}
    outer = torch.randn_like(stream)
    results = []
    for onto in (stream, None):
        output = lora_linear(inputs, weight, bias, down, up, **how, residual=onto)
        output = output if onto is stream else stream + output
        results.append((output, *torch.autograd.grad(output, (stream, inputs, down, up), outer, retain_graph=True)))
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_the_update_is_what_the_large_product_adds_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for a stream and its update: they go to the kernel together."""
    starts = []

    def counted(*given):
        starts.append(given[-1])
        return triton_lora_update(*given)

    monkeypatch.setattr(linear_module, "triton_runs_on", lambda tensor: True)
    monkeypatch.setattr(linear_module, "triton_lora_update", counted)
    stream = torch.randn(6, 7)
    lora_linear(
        torch.randn(6, 8), torch.randn(7, 8), None, torch.randn(3, 8), torch.randn(7, 3), scale=1.0, parts=(7,),
        residual=stream,
    )  # fmt: skip
    assert len(starts) == 1
    assert torch.equal(starts[0], stream)
