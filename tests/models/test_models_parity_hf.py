"""Logits and every gradient equal those of transformers' GPT-2, Llama and Mixtral with the same random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from gpt_builder import build_gpt
from hf_fp64 import keep_input_dtype, map_parameters, relative_difference
from tiers import cases
from torch import nn

from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.hf.architecture import Architecture
from stoker.models.hf.gpt2 import GPT2
from stoker.models.hf.llama import LLAMA, MIXTRAL

VOCAB, LAYERS, TOKENS, BATCH = 53, 2, 13, 3


@pytest.fixture
def hf_upcasts_lifted() -> Iterator[None]:
    with keep_input_dtype():
        yield


def keys(**changes: Any) -> GPTKeys:
    common = {
        "num_layers": LAYERS,
        "encoder_seq_length": TOKENS,
        "make_vocab_size_divisible_by": 8,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return GPTKeys.model_validate(common | changes)


def gpt2() -> tuple[transformers.PreTrainedModel, GPTKeys, Architecture]:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=30, n_layer=LAYERS, n_head=5, attn_pdrop=0, resid_pdrop=0,
        embd_pdrop=0,
    )  # fmt: skip
    ours = keys(hidden_size=30, ffn_hidden_size=120, num_attention_heads=5, openai_gelu=True)
    return transformers.GPT2LMHeadModel(config), ours, GPT2


def llama(
    *, groups: int, tied: bool, bias: bool = False, backend: str = "auto"
) -> tuple[transformers.PreTrainedModel, GPTKeys, Architecture]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=50, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=groups, head_dim=10, rms_norm_eps=1e-5, tie_word_embeddings=tied, attention_bias=bias,
        mlp_bias=bias, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    ours = keys(
        hidden_size=36, ffn_hidden_size=50, num_attention_heads=6, num_query_groups=groups, kv_channels=10,
        normalization="rmsnorm", activation="fast-swiglu", bias=bias, position_embedding_type="rope", rotary_base=500.0,
        share_embeddings_and_output_weights=tied, attention_backend=backend,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ours, LLAMA


def mixtral(experts: int, topk: int, **changes: Any) -> tuple[transformers.PreTrainedModel, GPTKeys, Architecture]:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=50, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, num_local_experts=experts, num_experts_per_tok=topk,
        sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._experts_implementation = "eager"
    ours = keys(
        hidden_size=36, ffn_hidden_size=50, num_attention_heads=6, num_query_groups=2, kv_channels=10,
        normalization="rmsnorm", activation="swiglu", bias=False, position_embedding_type="rope", rotary_base=500.0,
        share_embeddings_and_output_weights=False, num_moe_experts=experts, moe_router_topk=topk, **changes,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), ours, MIXTRAL


def same_weights(reference: nn.Module, ours: GPTKeys, kind: Architecture, dtype: torch.dtype) -> GPT:
    """Randomise the reference (biases and norms too), and our model with the same values."""
    generator = torch.Generator().manual_seed(7)
    for parameter in reference.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    model = build_gpt(ours, vocab_size=VOCAB, dtype=dtype, micro_batch_size=BATCH)
    for name, value in map_parameters(kind, model, reference).items():
        model.get_parameter(name).data.copy_(value)
    return model


def worst_difference(build: tuple[transformers.PreTrainedModel, GPTKeys, Architecture], dtype: torch.dtype) -> float:
    reference, ours, kind = build
    reference.type(dtype)
    reference.set_attn_implementation("sdpa")  # the eager one casts to fp32
    model = same_weights(reference, ours, kind, dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
    labels[0, :4] = -100
    counted = (labels != -100).sum()

    theirs = reference(tokens).logits
    (F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum") / counted).backward()
    errors = [relative_difference(model(tokens)[..., :VOCAB], theirs)]
    model.loss(tokens, labels, counted).backward()
    for name, gradient in map_parameters(kind, model, reference, "grad").items():
        mine = model.get_parameter(name).grad
        assert mine is not None
        errors.append(relative_difference(mine, gradient))  # rows of padding have gradients of zero
    return max(errors)


CASES = {
    "gpt2": gpt2,
    "llama_gqa": lambda: llama(groups=2, tied=False),
    "llama_mqa_tied": lambda: llama(groups=1, tied=True),
    "llama_mha_bias_unfused": lambda: llama(groups=6, tied=False, bias=True, backend="unfused"),
    "llama_gqa_math": lambda: llama(groups=3, tied=True, backend="sdpa_math"),
    "mixtral_top2": lambda: mixtral(8, 2),
    "mixtral_top3_sequential": lambda: mixtral(5, 3, moe_grouped_gemm=False),
    "mixtral_room_for_all": lambda: mixtral(
        4, 2, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True, moe_layer_recompute=True
    ),
}


@pytest.mark.usefixtures("hf_upcasts_lifted")
@pytest.mark.parametrize("case", CASES)
def test_fp64(case: str) -> None:
    assert worst_difference(CASES[case](), torch.float64) <= 1e-10


@pytest.mark.parametrize("case", cases(CASES, fast=3))
def test_fp32_with_their_own_arithmetic(case: str) -> None:
    assert worst_difference(CASES[case](), torch.float32) <= 1e-5
