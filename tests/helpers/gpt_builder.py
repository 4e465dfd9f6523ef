"""Build models from their keys alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models import build
from stoker.models.build import LanguageModel
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import FamilyKeys
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.layer import Layer


def build_model(keys: FamilyKeys, **arguments: Any) -> LanguageModel:
    """Build a model in fp32 on the CPU, for micro batches of 2, unless `arguments` of `build_model` say otherwise."""
    usual: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "flags": AttentionFlags(), "micro_batch_size": 2}
    return build.build_model(keys, **{**usual, **arguments})


def build_gpt(
    keys: GPTKeys,
    *,
    seq_length: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    **arguments: Any,
) -> GPT:
    """Build a GPT for samples of `encoder_seq_length` tokens, or of `seq_length`; `arguments` as in `build_model`."""
    spec = BatchSpec(
        seq_length=seq_length or keys.encoder_seq_length,
        packed=reset_attention_mask,
        reset_position_ids=reset_position_ids,
    )
    model = build_model(keys, batch_spec=spec, **arguments)
    assert isinstance(model, GPT)
    return model


def gradients_of(model: LanguageModel) -> dict[str, Tensor]:
    """Return copies of the gradients by name of the parameter."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def layers_of(model: GPT) -> list[Layer]:
    """Return the layers of a GPT."""
    return [layer for layer in model.decoder.layers if isinstance(layer, Layer)]
