"""Tiny GPT, T5 and mixture-of-experts models with every fine-tuning scheme."""

from __future__ import annotations

from typing import Any

import torch
from gpt_builder import build_model
from torch import Tensor

from stoker.models.build import LanguageModel
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.peft import PeftKeys, peft_slice
from stoker.models.config.t5 import T5Keys

F64 = torch.float64
STACK: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.3, "activation": "swiglu",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 8}
FULL: dict[str, Any] = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 2,
}
PARTS: dict[str, Any] = {"activations_checkpoint_modules": ["norm", "mlp_activation", "core_attention"]}
SCHEMES: dict[str, dict[str, Any]] = {
    "lora": {"lora_tuning": {"target_modules": ["all"], "adapter_dim": 3, "alpha": 5.0, "row_init_method": "normal"}},
    "adapter": {"adapter_tuning": {"adapter_dim": 5, "row_init_method": "normal"}},
    "ptuning": {"p_tuning": {"virtual_tokens": 3, "bottleneck_dim": 6, "embedding_dim": 5}},
    "ia3": {},
    "selective": {"selective_tuning": {"tunable_base_param_names": ["layers.1.mlp", "final_norm"]}},
}
LENGTH, ANSWER, VOCAB = 12, 6, 40


def keys_of(family: str, **changes: Any) -> GPTKeys | T5Keys:
    common: dict[str, Any] = {"make_vocab_size_divisible_by": 8, "seed": 5}
    if family == "t5":
        stack = {**STACK, **changes}
        return T5Keys.model_validate(
            {"seq_length": LENGTH, "max_position_embeddings": 2 * LENGTH, "encoder": stack, "decoder": stack, **common}
        )
    more = EXPERTS if family == "experts" else {}
    return GPTKeys.model_validate(
        {"encoder_seq_length": LENGTH, "max_position_embeddings": 2 * LENGTH, **STACK, **more, **common, **changes}
    )


def model_of(
    family: str, scheme: str | None, *, dtype: torch.dtype = F64, peft: Any = None, **changes: Any
) -> LanguageModel:
    keys = PeftKeys.model_validate({"peft_scheme": scheme, **(SCHEMES.get(scheme or "", {}) if peft is None else peft)})
    form = BatchSpec(seq_length=LENGTH, decoder_seq_length=ANSWER) if family == "t5" else BatchSpec(seq_length=LENGTH)
    return build_model(
        keys_of(family, **changes), vocab_size=VOCAB, dtype=dtype, batch_spec=form, peft=peft_slice(keys)
    )


def batch_of(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> Tensor:
        return torch.randint(0, VOCAB, (2, length), generator=generator)

    if family == "t5":
        return {"encoder_tokens": draw(LENGTH), "decoder_tokens": draw(ANSWER), "labels": draw(ANSWER)}
    return {"tokens": draw(LENGTH), "labels": draw(LENGTH)}
