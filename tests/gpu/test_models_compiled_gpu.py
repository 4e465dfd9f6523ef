"""Compiled layers on a GPU, with the kernels that serve there alone, give the gradients of plain torch in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft_models import FULL, PARTS, batch_of, keys_of
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec

pytestmark = pytest.mark.gpu

SIZE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "normalization": "rmsnorm"}
LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
BIASES: dict[str, Any] = {"normalization": "layernorm", "bias": True, "activation": "gelu"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("gpt", {}),
    "biases": ("gpt", BIASES),
    "biases, own attention": ("gpt", {**BIASES, "attention_backend": "triton"}),
    "parallel": ("gpt", {"transformer_block_type": "parallel_ln"}),
    "experts": ("experts", {**LOSSES, "moe_shared_expert_intermediate_size": None}),
    "experts, shared one": ("experts", LOSSES),
}


def gradients(
    name: str, device: str, dtype: torch.dtype, *, autocast: bool = False, **changes: Any
) -> dict[str, Tensor]:
    family, more = FAMILIES[name]
    model: LanguageModel = build_model(
        keys_of(family, **{**SIZE, **more, **changes}),
        vocab_size=40,
        device=device,
        dtype=dtype,
        flags=AttentionFlags(),
        micro_batch_size=2,
        batch_spec=BatchSpec(seq_length=12),
        peft=None,
    )
    batch = {name: tensor.to(device) for name, tensor in batch_of("gpt").items()}
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        loss = model.train().batch_loss(batch, 10.0)
    loss.backward()
    return {
        name: parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of one parameter: what gets no gradient has an error of 1."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in wanted.items())


@pytest.mark.parametrize("how", [{}, FULL, PARTS], ids=["kept", "full", "parts"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_fp64(name: str, how: dict[str, Any]) -> None:
    wanted = gradients(name, "cpu", torch.float64, attention_backend="auto")
    assert worst(gradients(name, "cuda", torch.float32, compile=True, **how), wanted) < 5e-3
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        ours = gradients(name, "cuda", dtype, autocast=autocast, compile=True, **how)
        plain = gradients(name, "cuda", dtype, autocast=autocast, compile=False)
        assert worst(ours, wanted) <= 2 * worst(plain, wanted) + 1e-2
