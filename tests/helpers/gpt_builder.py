"""Build a GPT from its keys alone."""

from __future__ import annotations

from typing import Any

from stoker.models.build import build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT


def build_gpt(
    keys: GPTKeys,
    *,
    seq_length: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    **arguments: Any,
) -> GPT:
    """Build a GPT for samples of `encoder_seq_length` tokens, or of `seq_length`; for `arguments` see `build_model`."""
    spec = BatchSpec(
        seq_length=seq_length or keys.encoder_seq_length,
        packed=reset_attention_mask,
        reset_position_ids=reset_position_ids,
    )
    model = build_model(keys, batch_spec=spec, **arguments)
    assert isinstance(model, GPT)
    return model
