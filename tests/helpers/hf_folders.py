"""Tiny random transformers models of every architecture, and helpers to save and change their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 389
TOKENS = 24
_WIDE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2}
_LLAMA: dict[str, Any] = _WIDE | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "rms_norm_eps": 1e-5,
}


def _config(kind: Any, **fields: Any) -> Any:
    return kind(**fields)


def _t5(
    kind: Any, config: Any, *, gated: bool, tied: bool, layers: tuple[int, int] = (2, 3), **more: Any
) -> PreTrainedModel:
    model = kind(
        _config(
            config, vocab_size=VOCAB, d_model=24, d_kv=10, d_ff=37, num_layers=layers[0], num_decoder_layers=layers[1],
            num_heads=3, relative_attention_num_buckets=12, relative_attention_max_distance=30, dropout_rate=0.0,
            feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=tied, pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0, **more,
        )
    )  # fmt: skip
    if not tied:  # transformers 5 ties the head anyway, although v1.1 and ByT5 have untied heads
        model.lm_head = nn.Linear(24, VOCAB, bias=False)
    return model


def _mixtral() -> PreTrainedModel:
    config = _config(
        MixtralConfig, **_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, head_dim=10
    )
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(
        _config(LlamaConfig, **_LLAMA, head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ),
    "llama_tied_mha_bias": lambda: LlamaForCausalLM(
        _config(
            LlamaConfig, **_LLAMA | {"num_key_value_heads": 6}, tie_word_embeddings=True, attention_bias=True,
            mlp_bias=True, hidden_act="gelu",
        )
    ),
    "llama3_rotary": lambda: LlamaForCausalLM(
        _config(
            LlamaConfig, **_LLAMA, rope_parameters={
                "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 3.0, "original_max_position_embeddings": 16,
            },
        )
    ),
    "llama_yarn": lambda: LlamaForCausalLM(
        _config(
            LlamaConfig, **_LLAMA, rope_parameters={
                "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            },
        )
    ),
    "llama_linear": lambda: LlamaForCausalLM(
        _config(LlamaConfig, **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0})
    ),
    "mistral": lambda: MistralForCausalLM(_config(MistralConfig, **_LLAMA, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(_config(Qwen2Config, **_LLAMA, tie_word_embeddings=True)),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        _config(Qwen2Config, **_LLAMA, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(_config(Qwen3Config, **_LLAMA, head_dim=10)),
    "mixtral": _mixtral,
    "gpt2": lambda: GPT2LMHeadModel(
        _config(GPT2Config, vocab_size=VOCAB, n_positions=TOKENS, n_embd=30, n_layer=2, n_head=5)
    ),
    "pythia": lambda: GPTNeoXForCausalLM(
        _config(GPTNeoXConfig, **_WIDE, num_attention_heads=3, max_position_embeddings=TOKENS, rotary_pct=0.5)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        _config(
            GPTNeoXConfig, **_WIDE, num_attention_heads=3, max_position_embeddings=TOKENS,
            use_parallel_residual=False, rotary_pct=0.5,
        )
    ),
    "t5_v1_0": lambda: _t5(T5ForConditionalGeneration, T5Config, gated=False, tied=True),
    "t5_unscaled": lambda: _t5(
        T5ForConditionalGeneration, T5Config, gated=True, tied=True, scale_decoder_outputs=False
    ),
    "t5_v1_1": lambda: _t5(T5ForConditionalGeneration, T5Config, gated=True, tied=False),
    "byt5": lambda: _t5(T5ForConditionalGeneration, T5Config, gated=True, tied=False, layers=(3, 1)),
    "mt5": lambda: _t5(MT5ForConditionalGeneration, MT5Config, gated=True, tied=False),
    "bert": lambda: BertForMaskedLM(
        _config(BertConfig, **_WIDE, num_attention_heads=4, max_position_embeddings=TOKENS)
    ),
}  # fmt: skip


def random_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model in eval mode with all parameters random, including biases and norms."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model.to(dtype).eval()  # type: ignore[arg-type]


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
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
