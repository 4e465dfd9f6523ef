"""Fine-tuning with few parameters on a GPU: compiled and recorded layers give what plain torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import FULL, PARTS, batch_of, keys_of
from tiny_run import tiny_config
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.lora.lora_linear import lora_linear, reference_lora_linear
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.peft import PeftKeys, peft_slice
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.train import run_training

pytestmark = pytest.mark.gpu

LORA = {"target_modules": ["all"], "adapter_dim": 8, "row_init_method": "normal"}
WIDE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2}


def model_of(family: str, device: str, dtype: torch.dtype, **changes: Any) -> LanguageModel:
    return build_model(
        keys_of(family, **{**WIDE, **changes}),
        vocab_size=40,
        device=device,
        dtype=dtype,
        flags=AttentionFlags(),
        micro_batch_size=2,
        batch_spec=BatchSpec(seq_length=12),
        peft=peft_slice(PeftKeys.model_validate({"peft_scheme": "lora", "lora_tuning": LORA})),
    )


def gradients(model: LanguageModel, device: str) -> dict[str, Tensor]:
    batch = {name: tensor.to(device) for name, tensor in batch_of("gpt").items()}
    model.train().batch_loss(batch, 10.0).backward()
    return {name: parameter.grad.double().cpu() for name, parameter in trainable_parameters(model).items()}  # pyrefly: ignore[missing-attribute]


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    difference = sum((found[name] - tensor).square().sum() for name, tensor in wanted.items())
    return float(difference / sum(tensor.square().sum() for tensor in wanted.values())) ** 0.5


@pytest.mark.parametrize("how", [{}, FULL, PARTS], ids=["kept", "full", "parts"])
@pytest.mark.parametrize("family", ["gpt", "experts"])
def test_compiled_layers_give_the_gradients(family: str, how: dict[str, Any]) -> None:
    wanted = gradients(model_of(family, "cpu", torch.float64), "cpu")
    found = gradients(model_of(family, "cuda", torch.float32, compile=True, **how), "cuda")
    assert found.keys() == wanted.keys()
    assert error(found, wanted) < 2e-3
    narrow = gradients(model_of(family, "cuda", torch.bfloat16, compile=True, **how), "cuda")
    plain = gradients(model_of(family, "cuda", torch.bfloat16, compile=False), "cuda")
    assert error(narrow, wanted) <= 2 * error(plain, wanted) + 1e-3


@pytest.mark.parametrize("parts", [(256,), (128, 64, 64)])
def test_the_operation_is_its_reference(parts: tuple[int, ...]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, device="cuda", dtype=torch.float64, generator=generator)
        return drawn / shape[-1] ** 0.5

    given = [draw(512, 128) * 128**0.5, draw(256, 128), draw(len(parts) * 16, 128), draw(256, 16)]
    found: list[list[Tensor]] = []
    for function, dtype in (
        (lora_linear, torch.bfloat16),
        (reference_lora_linear, torch.bfloat16),
        (reference_lora_linear, torch.float64),
    ):
        inputs, weight, down, up = (tensor.to(torch.bfloat16).to(dtype) for tensor in given)
        learnt = [tensor.requires_grad_() for tensor in (inputs, down, up)]
        output = function(inputs, weight, None, down, up, scale=2.0, parts=parts)
        output.square().sum().backward()
        found.append([tensor.double() for tensor in (output.detach(), *(tensor.grad for tensor in learnt))])  # pyrefly: ignore[missing-attribute]
    for ours, theirs, truth in zip(*found, strict=True):
        assert (ours - truth).square().mean() <= 1.25**2 * (theirs - truth).square().mean() + 1e-12


@pytest.mark.parametrize("changes", [{}, {"model__num_moe_experts": 4}], ids=["dense", "experts"])
def test_recorded_micro_batches_train_alike(changes: dict[str, Any], tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "trainer__accelerator": "gpu",
        "trainer__max_steps": 8,
        "trainer__limit_val_batches": 0,
        "model__hidden_dropout": 0.0,
        "model__attention_dropout": 0.0,
        "model__peft__peft_scheme": "lora",
        "model__peft__lora_tuning__target_modules": ["all"],
        **changes,
    }
    found = [
        trainable_parameters(
            run_training(tiny_config(tmp_path / str(graph), model__enable_cuda_graph=graph, **shared)).model
        )
        for graph in (False, True)
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_state_may_live_in_host_memory(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"trainer__accelerator": "gpu", "model__peft__peft_scheme": "lora"}
    found = [
        trainable_parameters(
            run_training(tiny_config(tmp_path / str(host), model__cpu_offloading_optimizer=host, **shared)).model
        )
        for host in (False, True)
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
