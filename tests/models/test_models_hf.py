"""The tables of `models/hf/`: the config.json of released models are read whole, and describe the presets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from config_helpers import load
from tiers import cases, looped

from stoker.models.config.batch_shape import BatchSpec
from stoker.models.hf.architecture import slice_differences, slice_from_keys, unflatten_keys
from stoker.models.hf.architectures import architecture_of
from stoker.models.hf.config_fields import HFConfig
from stoker.models.hf.weight_layout import ConcatenatedRows, Geometry, PerExpert, QKVInterleavedByHead
from stoker.trainer.config.schema.root import MODEL_BLOCKS, AnyModelBlock, T5ModelBlock

_T5: dict[str, Any] = {
    "model_type": "t5", "d_kv": 64, "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "output_past": True,
    "pad_token_id": 0, "relative_attention_num_buckets": 32, "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
_V1_1 = {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "architectures": ["T5ForConditionalGeneration"],
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False,
    "pretraining_tp": 1, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": _LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "Llama-3.1-8B": _LLAMA | {
        "bos_token_id": 128000, "eos_token_id": [128001, 128008], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "vocab_size": 128256, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936,
    },
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.36.0.dev0", "vocab_size": 32000,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "t5-small": _T5 | {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_model": 512, "n_positions": 512,
        "num_heads": 8, "num_layers": 6, "task_specific_params": {"summarization": {"num_beams": 4}},
    },
    "t5-v1_1-base": _T5 | _V1_1 | {
        "d_ff": 2048, "d_model": 768, "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12,
    },
    "byt5-small": _T5 | _V1_1 | {
        "d_ff": 3584, "d_model": 1472, "num_decoder_layers": 4, "num_heads": 6, "num_layers": 12, "vocab_size": 384,
        "tokenizer_class": "ByT5Tokenizer", "gradient_checkpointing": False,
    },
    "mt5-small": _T5 | _V1_1 | {
        "model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_model": 512,
        "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "vocab_size": 250112,
        "tokenizer_class": "T5Tokenizer",
    },
    "bert-base-uncased": {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    },
}  # fmt: skip
"""config.json as their authors published them."""

PRESETS = {
    "gpt2": "gpt2_124m",
    "t5-small": "t5_small",
    "t5-v1_1-base": "t5_v1_1_base",
    "byt5-small": "byt5_small",
    "bert-base-uncased": "bert_base",
}


def keys_of(name: str) -> AnyModelBlock:
    config = RELEASED[name]
    architecture = architecture_of(config)
    assert architecture is not None
    own_head = config.get("tie_word_embeddings") is False
    keys, problems = architecture.to_keys(HFConfig(config, own_head))
    assert problems == []
    return MODEL_BLOCKS[architecture.family].model_validate({"family": architecture.family, **unflatten_keys(keys)})


@looped("name", RELEASED)
def test_released_models_are_read_and_written(name: str) -> None:
    """No field is in the way; what is written from the keys describes the same model."""
    config, keys = RELEASED[name], keys_of(name)
    architecture = architecture_of(config)
    assert architecture is not None
    written = architecture.to_config(keys, vocab_size=config["vocab_size"])
    again, problems = architecture.to_keys(HFConfig(written, has_separate_head=written["tie_word_embeddings"] is False))
    assert problems == []
    back = MODEL_BLOCKS[architecture.family].model_validate({"family": architecture.family, **unflatten_keys(again)})
    form, vocabulary = BatchSpec(seq_length=512, decoder_seq_length=114), config["vocab_size"]
    assert slice_differences(slice_from_keys(keys, vocabulary, form), slice_from_keys(back, vocabulary, form)) == []
    ours = {"torch_dtype", "transformers_version", "n_ctx", "tokenizer_class"}
    said = {field: value for field, value in config.items() if field in written and field not in ours}
    for field, value in said.items():
        if field not in ("rope_scaling", "sliding_window", "max_window_layers"):
            assert written[field] == value, field


@pytest.mark.parametrize("name", cases(PRESETS, fast=2))
def test_presets_are_the_released_models(name: str) -> None:
    preset = load(f"model={PRESETS[name]}", "data=mock").root.model
    form = BatchSpec(seq_length=512, decoder_seq_length=114)
    vocabulary = RELEASED[name]["vocab_size"]
    theirs = keys_of(name)
    if isinstance(preset, T5ModelBlock):  # their fields say no length of texts
        theirs = theirs.model_copy(update={"seq_length": preset.seq_length})
    assert slice_differences(slice_from_keys(preset, vocabulary, form), slice_from_keys(theirs, vocabulary, form)) == []


EXPERTS = ("model.num_moe_experts=4", "model.moe_router_topk=2")


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        ([], ["model.cpu_offloading=true", "model.cpu_offloading_num_layers=1"]),
        ([], ["model.activations_checkpoint_modules=[norm,mlp_activation]"]),
        ([], ["model.hidden_dropout=0.3", "model.attention_dropout=0.2", "model.init_method_std=0.5", "model.seed=9"]),
        ([], ["model.attention_backend=unfused", "model.compile=false", "model.label_smoothing=0.1"]),
        (EXPERTS, ["model.cpu_offloading=true", "model.cpu_offloading_num_layers=1", "model.moe_layer_recompute=true"]),
        (EXPERTS, ["model.moe_aux_loss_coeff=0.1", "model.moe_z_loss_coeff=0.1", "model.moe_input_jitter_eps=0.1"]),
        (EXPERTS, ["model.moe_router_force_load_balancing=true"]),
    ],
)
def test_how_a_model_was_trained_is_no_other_model(base: tuple[str, ...], keys: list[str]) -> None:
    def read(*overrides: str) -> Any:
        return load("model=gpt_tiny", "data=mock", *overrides).root.model

    form = BatchSpec(seq_length=256)
    plain, changed = (slice_from_keys(read(*base, *more), 512, form) for more in ((), keys))
    assert plain != changed
    assert slice_differences(plain, changed) == []
    assert slice_differences(plain, slice_from_keys(read(*base, *keys, "model.qk_layernorm=true"), 512, form))


def test_layouts_by_hand() -> None:
    """Rows where they are said to be."""
    geometry = Geometry(heads=2, groups=1, vocab_size=5)
    rows = torch.arange(8)[:, None]  # two query heads of two rows, a key, a value
    query, key, value = ConcatenatedRows(("heads", "groups", "groups")).split(rows, 3, geometry)
    assert (query.flatten().tolist(), key.flatten().tolist(), value.flatten().tolist()) == (
        [0, 1, 2, 3],
        [4, 5],
        [6, 7],
    )
    assert ConcatenatedRows(("heads", "groups", "groups")).shapes((9, 1), 3, geometry) is None

    square = Geometry(heads=2, groups=2, vocab_size=5)
    theirs = torch.tensor([0, 1, 2, 10, 11, 12])[:, None]  # q, k, v of head 0, then of head 1
    assert QKVInterleavedByHead().join([theirs], (6, 1), square).flatten().tolist() == [0, 10, 1, 11, 2, 12]
    assert QKVInterleavedByHead().shapes((6, 1), 1, geometry) is None

    experts = [torch.full((1, 2), float(n)) for n in range(4)]  # gate and up of expert 0, of expert 1
    assert PerExpert(2).join(experts, (2, 2, 2), geometry)[:, :, 0].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert PerExpert(2).shapes((2, 2, 2), 3, geometry) is None
