"""Every key that T5 or BERT has besides GPT's acts: changed alone, it changes the model. None is left out.

The keys of a stack are covered by test_key_effects.py; here each is shown to reach its own stack of a T5, no other.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from resolved import batch_spec, build_data, build_model
from tiers import looped

from stoker.models.build import num_parameters
from stoker.models.config.families import family_slice
from stoker.models.config.model import Family
from stoker.models.config.stack import StackKeys
from stoker.models.config.t5 import T5Slice
from stoker.trainer.config import dotted_paths
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.config.schema.root import RootBlock

CPU = torch.device("cpu")
STACK: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.3,
}  # fmt: skip
COMMON: dict[str, Any] = {"data": {"data_impl": "mock"}, "make_vocab_size_divisible_by": 8, "micro_batch_size": 1}
T5: dict[str, Any] = COMMON | {"family": "t5", "seq_length": 16, "encoder": dict(STACK), "decoder": dict(STACK)}
BERT: dict[str, Any] = COMMON | STACK | {"family": "bert", "encoder_seq_length": 16, "bert": {}}
ROPE = {"position_embedding_type": "rope"}
LLAMA3 = ROPE | {"rotary_scaling": "llama3"}
RELATIVE = {"position_embedding_type": "relative"}
MOE = {"num_moe_experts": 4}
FULL = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "block",
    "activations_checkpoint_num_layers": 1,
}
BLOCK = FULL | {"activations_checkpoint_method": "block"}

OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_layers": (2, {}),
    "hidden_size": (32, {}),
    "ffn_hidden_size": (32, {}),
    "num_attention_heads": (4, {}),
    "kv_channels": (12, {}),
    "num_query_groups": (1, {}),
    "fp32_residual_connection": (True, {}),
    "normalization": ("rmsnorm", {}),
    "layernorm_epsilon": (1e-3, {}),
    "layernorm_zero_centered_gamma": (True, {}),
    "qk_layernorm": (True, {}),
    "transformer_block_type": ("post_ln", {}),
    "headscale": (True, {}),
    "activation": ("swiglu", {}),
    "openai_gelu": (True, {}),
    "bias": (False, {}),
    "qkv_bias": (True, {"bias": False}),
    "hidden_dropout": (0.2, {}),
    "attention_dropout": (0.2, {}),
    "ffn_dropout": (0.2, {}),
    "init_method_std": (0.1, {}),
    "use_scaled_init_method": (False, {}),
    "position_embedding_type": ("none", {}),
    "rotary_percentage": (0.5, ROPE),
    "rotary_base": (500.0, ROPE),
    "rotary_interleaved": (True, ROPE),
    "seq_len_interpolation_factor": (2.0, ROPE),
    "scale_positional_embedding": (True, ROPE),
    "rotary_scaling": ("yarn", ROPE),
    "rotary_scaling_factor": (3.0, LLAMA3),
    "rotary_original_length": (77, LLAMA3),
    "rotary_low_turns": (0.5, LLAMA3),
    "rotary_high_turns": (9.0, LLAMA3),
    "num_attention_heads_alibi": (1, {"position_embedding_type": "alibi"}),
    "relative_attention_num_buckets": (8, RELATIVE),
    "relative_attention_max_distance": (64, RELATIVE),
    "window_size": ([3, 0], {}),
    "attn_logit_softcapping": (5.0, {}),
    "softmax_type": ("learnable", {}),
    "normalize_attention_scores": (False, {}),
    "use_flash_attention": (True, {}),
    "attention_backend": ("unfused", {}),
    "transformer_engine": (False, {}),
    "masked_softmax_fusion": (False, {}),
    "activations_checkpoint_granularity": ("selective", {}),
    "activations_checkpoint_method": ("uniform", {"num_layers": 2} | FULL),
    "activations_checkpoint_num_layers": (2, {"num_layers": 2} | FULL),
    "num_micro_batches_with_partial_activation_checkpoints": (1, {"num_layers": 2} | BLOCK),
    "activations_checkpoint_layers_per_pipeline": (1, {"num_layers": 2} | BLOCK),
    "activations_checkpoint_modules": (["norm"], {}),
    "cpu_offloading": (True, {"num_layers": 3}),
    "cpu_offloading_num_layers": (1, {"num_layers": 3, "cpu_offloading": True}),
    "cpu_offloading_activations": (False, {"num_layers": 3, "cpu_offloading": True}),
    "cpu_offloading_weights": (False, {"num_layers": 3, "cpu_offloading": True}),
    "num_moe_experts": (8, {}),
    "moe_router_topk": (3, MOE),
    "moe_router_load_balancing_type": ("none", MOE),
    "moe_aux_loss_coeff": (0.1, MOE | {"moe_router_topk": 2}),
    "moe_z_loss_coeff": (0.1, MOE),
    "moe_input_jitter_eps": (0.1, MOE),
    "moe_router_force_load_balancing": (True, MOE),
    "moe_token_dropping": (True, MOE),
    "moe_expert_capacity_factor": (2.0, MOE),
    "moe_pad_expert_input_to_capacity": (True, MOE),
    "moe_token_drop_policy": ("position", MOE),
    "moe_layer_recompute": (True, MOE),
    "moe_grouped_gemm": (False, MOE),
    "moe_router_pre_softmax": (True, MOE),
    "moe_ffn_hidden_size": (8, MOE),
    "moe_layer_freq": (2, MOE | {"num_layers": 2}),
    "moe_frequency": (2, MOE | {"num_layers": 2}),
    "moe_dropout": (0.1, MOE),
    "moe_shared_expert_intermediate_size": (8, MOE),
    "moe_router_dtype": ("fp64", MOE),
    "moe_router_score_function": ("sigmoid", MOE),
    "moe_router_enable_expert_bias": (True, MOE),
    "moe_router_bias_update_rate": (0.1, MOE | {"moe_router_enable_expert_bias": True}),
    "moe_router_topk_scaling_factor": (2.0, MOE),
    "moe_router_num_groups": (2, MOE | {"moe_router_group_topk": 1}),
    "moe_router_group_topk": (1, MOE | {"moe_router_num_groups": 2}),
}
"""Another value for each key of a stack, and what must be set for it to act."""
ELSEWHERE = {"apply_query_key_layer_scaling", "moe_token_dispatcher_type", "moe_per_layer_logging"}
"""Not about the model: the first two change nothing, which is told, the third is about what is logged."""


def root_of(model: dict[str, Any], changes: dict[str, Any]) -> RootBlock:
    document = {"model": deepcopy(model), "trainer": {"accelerator": "cpu"}}
    for path, value in changes.items():
        dotted_paths.put(document, path, value)
    return RootBlock.model_validate(document)


def sliced(changes: dict[str, Any]) -> T5Slice:
    root = root_of(T5, changes)
    found = family_slice(root.model, vocab_size=32, batch_spec=batch_spec(root))
    assert isinstance(found, T5Slice)
    return found


def test_every_key_of_a_stack_is_tried() -> None:
    assert set(OTHER) | ELSEWHERE == set(StackKeys.model_fields)


@looped("name", OTHER)
@looped("stack", ["encoder", "decoder"])
def test_a_key_of_a_stack_reaches_its_stack_alone(stack: str, name: str) -> None:
    value, others = OTHER[name]
    before = {f"model.{stack}.{other}": setting for other, setting in others.items()}
    first, second = sliced(before), sliced(before | {f"model.{stack}.{name}": value})
    assert (first.encoder != second.encoder) == (stack == "encoder")
    assert (first.decoder != second.decoder) == (stack == "decoder")
    of_attention = name in ("num_attention_heads", "kv_channels", "attention_dropout", "attention_backend", "headscale")
    if of_attention:
        assert (first.cross_attention != second.cross_attention) == (stack == "decoder")


# ---------------------------------------------------------------- keys around the stacks


def shapes(root: RootBlock) -> Any:
    model = build_model(root, build_data(root))
    assert num_parameters(model) > 0
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def loss(root: RootBlock) -> Any:
    data = build_data(root)
    model = build_model(root, data)
    torch.manual_seed(0)
    batch: Any = data.train.batch(0, 1)
    return model.batch_loss(batch, 1.0).item()


def form(root: RootBlock) -> Any:
    return batch_spec(root)


AROUND: dict[Family, list[tuple[str, Any, Any, dict[str, Any]]]] = {
    "t5": [
        ("model.seq_length", 24, form, {}),
        ("model.max_position_embeddings", 40, shapes, {}),
        ("model.share_token_embeddings", False, shapes, {}),
        ("model.share_decoder_tokens_head_embeddings", False, shapes, {}),
        ("model.tokens_head_bias", False, shapes, {}),
        ("model.scale_tied_logits", True, loss, {}),
        (
            "model.decoder.relative_position_bias_self_attention_only",
            False,
            shapes,
            {"model.decoder.position_embedding_type": "relative"},
        ),
        ("model.embedding_dropout", 0.5, loss, {}),
        ("model.embedding_init_method_std", 1.0, loss, {}),
        ("model.label_smoothing", 0.3, loss, {}),
    ],
    "bert": [
        ("model.bert.token_types", 0, shapes, {}),
        ("model.bert.embedding_norm", False, shapes, {}),
        ("model.bert.mlm_transform", False, shapes, {}),
        ("model.bert.head_bias", False, shapes, {}),
        ("model.embedding_dropout", 0.5, loss, {}),
        ("model.embedding_init_method_std", 1.0, loss, {}),
        ("model.label_smoothing", 0.3, loss, {}),
        ("model.encoder_seq_length", 24, form, {}),
        ("model.max_position_embeddings", 40, shapes, {}),
        ("model.share_embeddings_and_output_weights", False, shapes, {}),
    ],
}
ROWS = [(family, *row) for family, rows in AROUND.items() for row in rows]


@pytest.mark.parametrize(("family", "key", "value", "observable", "others"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
def test_a_key_around_the_stacks_acts(
    family: Family, key: str, value: Any, observable: Any, others: dict[str, Any]
) -> None:
    model = T5 if family == "t5" else BERT
    assert observable(root_of(model, others)) != observable(root_of(model, others | {key: value}))


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_no_key_is_left_out(family: Family) -> None:
    own = set(schema_keys(family)) - set(schema_keys())
    stacks = {f"model.{stack}.{name}" for stack in ("encoder", "decoder") for name in (*OTHER, *ELSEWHERE)}
    assert own <= {row[0] for row in AROUND[family]} | stacks
