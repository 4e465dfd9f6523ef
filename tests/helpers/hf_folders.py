"""Tiny random transformers models of every architecture, and helpers to save and change their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCAB = 389
TOKENS = 24
_WIDE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2}
_LLAMA: dict[str, Any] = _WIDE | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "rms_norm_eps": 1e-5,
}
_NEOX = _WIDE | {"num_attention_heads": 3, "max_position_embeddings": TOKENS, "rotary_pct": 0.5}


def _t5(*, gated: bool, tied: bool, layers: tuple[int, int] = (2, 3), **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 10, "d_ff": 37, "num_heads": 3}
    buckets = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 30}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    depth = {"num_layers": layers[0], "num_decoder_layers": layers[1], "dropout_rate": 0.0}
    activation = {"feed_forward_proj": "gated-gelu" if gated else "relu"}
    return {**sizes, **buckets, **tokens, **depth, **activation, "tie_word_embeddings": tied, **more}


def _rope(rope_type: str, **fields: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, **fields}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_LLAMA, "head_dim": 10, **_rope("default", rope_theta=500.0)}),
    "llama_tied_mha_bias": (
        "LlamaForCausalLM",
        {
            **_LLAMA,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "llama3_rotary": (
        "LlamaForCausalLM",
        {
            **_LLAMA,
            **_rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=3.0,
                original_max_position_embeddings=16,
            ),
        },
    ),
    "llama_yarn": (
        "LlamaForCausalLM",
        {**_LLAMA, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "llama_linear": ("LlamaForCausalLM", {**_LLAMA, **_rope("linear", factor=2.0)}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 10}),
    "mixtral": (
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 10},
    ),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCAB, "n_positions": TOKENS, "n_embd": 30, "n_layer": 2, "n_head": 5}),
    "pythia": ("GPTNeoXForCausalLM", {**_NEOX}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": False}),
    "t5_v1_0": ("T5ForConditionalGeneration", _t5(gated=False, tied=True)),
    "t5_unscaled": ("T5ForConditionalGeneration", _t5(gated=True, tied=True, scale_decoder_outputs=False)),
    "t5_v1_1": ("T5ForConditionalGeneration", _t5(gated=True, tied=False)),
    "byt5": ("T5ForConditionalGeneration", _t5(gated=True, tied=False, layers=(3, 1))),
    "mt5": ("MT5ForConditionalGeneration", _t5(gated=True, tied=False)),
    "bert": ("BertForMaskedLM", {**_WIDE, "num_attention_heads": 4, "max_position_embeddings": TOKENS}),
}
"""Class of the model and fields of its configuration."""


def _build(name: str) -> transformers.PreTrainedModel:
    kind, fields = MODELS[name]
    model_class: Any = getattr(transformers, kind)  # imports the modules of this architecture only
    config = model_class.config_class(**fields)
    if name == "mixtral":
        config._experts_implementation = "eager"
    model = model_class(config)
    if "T5" in kind and not fields["tie_word_embeddings"]:
        # transformers 5 ties the head anyway, although v1.1 and ByT5 have untied heads
        model.lm_head = nn.Linear(24, VOCAB, bias=False)
    return model


def random_model(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return a model in eval mode with all parameters random, including biases and norms."""
    model = _build(name)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model.to(dtype).eval()  # pyrefly: ignore[bad-argument-type]


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model with `save_pretrained` and return the folder."""
    model.save_pretrained(folder, **options)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite `model.safetensors` after `change` has modified its tensors."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of a config.json; `None` is null, `...` removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def letter_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of single letters, its tokenizer_config.json and a chat template."""
    import tokenizers

    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    model = tokenizers.models.BPE(vocab={**letters, "<unk>": 27}, merges=[], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
