"""Hugging Face's models as fp64 references, and the way their weights map to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.t5 import modeling_t5


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    theta, dim = self.config.rope_parameters["rope_theta"], self.config.head_dim
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = position_ids[..., None].to(x.dtype) * frequencies
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _top_k_router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden_states, self.weight)
    values, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
    return logits, values / values.sum(dim=-1, keepdim=True), chosen


@contextmanager
def upcasts_lifted() -> Iterator[None]:
    """Norms, rotary embedding and routers compute in fp32; inside, they keep the dtype of the input."""
    with (
        mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", _rms_norm),
        mock.patch.object(modeling_llama.LlamaRotaryEmbedding, "forward", _rotary),
        mock.patch.object(modeling_mixtral.MixtralRMSNorm, "forward", _rms_norm),
        mock.patch.object(modeling_mixtral.MixtralRotaryEmbedding, "forward", _rotary),
        mock.patch.object(modeling_mixtral.MixtralTopKRouter, "forward", _top_k_router),
        mock.patch.object(modeling_t5.T5LayerNorm, "forward", _rms_norm),
    ):
        yield


def llama_names(reference: nn.Module, layers: int, of: str = "data") -> dict[str, Tensor]:
    """Our parameter names to Llama's or Mixtral's values (`of="data"`) or gradients (`of="grad"`)."""
    theirs = {name: getattr(parameter, of) for name, parameter in reference.named_parameters()}
    ours = {
        "token_embedding.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_norm.weight": theirs["model.norm.weight"],
    }
    if "lm_head.weight" in theirs:
        ours["head.weight"] = theirs["lm_head.weight"]
    for index in range(layers):
        source, target = f"model.layers.{index}.", f"decoder.layers.{index}."
        for norm, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            ours[f"{target}{norm}.weight"] = theirs[f"{source}{name}.weight"]
        for kind in ("weight", "bias"):
            if f"{source}self_attn.q_proj.{kind}" in theirs:
                parts = [theirs[f"{source}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                ours[f"{target}attention.qkv.{kind}"] = torch.cat(parts)
                ours[f"{target}attention.output.{kind}"] = theirs[f"{source}self_attn.o_proj.{kind}"]
            if f"{source}mlp.gate_proj.{kind}" in theirs:
                parts = [theirs[f"{source}mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
                ours[f"{target}mlp.up.{kind}"] = torch.cat(parts)
                ours[f"{target}mlp.down.{kind}"] = theirs[f"{source}mlp.down_proj.{kind}"]
        if f"{source}mlp.gate.weight" in theirs:
            ours[f"{target}mlp.router.weight"] = theirs[f"{source}mlp.gate.weight"]
            ours[f"{target}mlp.experts.up"] = theirs[f"{source}mlp.experts.gate_up_proj"]
            ours[f"{target}mlp.experts.down"] = theirs[f"{source}mlp.experts.down_proj"]
    return ours


def gpt2_names(reference: nn.Module, layers: int, of: str = "data") -> dict[str, Tensor]:
    """Our parameter names to GPT-2's values or gradients; its Conv1D matrices are (in, out)."""
    theirs = {name: getattr(parameter, of) for name, parameter in reference.named_parameters()}
    ours = {
        "token_embedding.weight": theirs["transformer.wte.weight"],
        "position_embedding.weight": theirs["transformer.wpe.weight"],
        "decoder.final_norm.weight": theirs["transformer.ln_f.weight"],
        "decoder.final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    parts = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for index in range(layers):
        for target, source in parts.items():
            for kind in ("weight", "bias"):
                value = theirs[f"transformer.h.{index}.{source}.{kind}"]
                matrix = kind == "weight" and value.ndim == 2
                ours[f"decoder.layers.{index}.{target}.{kind}"] = value.t() if matrix else value
    return ours


def t5_names(reference: nn.Module, of: str = "data") -> dict[str, Tensor]:
    """Our parameter names to T5's values or gradients."""
    theirs = {name: getattr(parameter, of) for name, parameter in reference.named_parameters()}
    ours = {"token_embedding.weight": theirs["shared.weight"]}
    if "lm_head.weight" in theirs:
        ours["head.weight"] = theirs["lm_head.weight"]
    for stack in ("encoder", "decoder"):
        ours[f"{stack}.final_norm.weight"] = theirs[f"{stack}.final_layer_norm.weight"]
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ours[f"{stack}.score_positions.table"] = theirs[f"{stack}.{bias}"]
        for index in range(len({name.split(".")[2] for name in theirs if name.startswith(f"{stack}.block.")})):
            source, target = f"{stack}.block.{index}.layer.", f"{stack}.layers.{index}."
            own = [theirs[f"{source}0.SelfAttention.{part}.weight"] for part in "qkv"]
            ours[f"{target}attention.qkv.weight"] = torch.cat(own)
            ours[f"{target}attention.output.weight"] = theirs[f"{source}0.SelfAttention.o.weight"]
            ours[f"{target}attention_norm.weight"] = theirs[f"{source}0.layer_norm.weight"]
            if stack == "decoder":
                cross = f"{source}1.EncDecAttention."
                ours[f"{target}cross_attention.query.weight"] = theirs[f"{cross}q.weight"]
                ours[f"{target}cross_attention.kv.weight"] = torch.cat([theirs[f"{cross}{x}.weight"] for x in "kv"])
                ours[f"{target}cross_attention.output.weight"] = theirs[f"{cross}o.weight"]
                ours[f"{target}cross_attention_norm.weight"] = theirs[f"{source}1.layer_norm.weight"]
            source += "1." if stack == "encoder" else "2."
            ours[f"{target}mlp_norm.weight"] = theirs[f"{source}layer_norm.weight"]
            up = [f"{source}DenseReluDense.{name}.weight" for name in ("wi", "wi_0", "wi_1")]
            ours[f"{target}mlp.up.weight"] = torch.cat([theirs[name] for name in up if name in theirs])
            ours[f"{target}mlp.down.weight"] = theirs[f"{source}DenseReluDense.wo.weight"]
    return ours


def bert_names(reference: nn.Module, of: str = "data") -> dict[str, Tensor]:
    """Our parameter names to BERT's values or gradients."""
    theirs = {name: getattr(parameter, of) for name, parameter in reference.named_parameters()}
    embeddings, head = "bert.embeddings.", "cls.predictions."
    ours = {
        "token_embedding.weight": theirs[f"{embeddings}word_embeddings.weight"],
        "position_embedding.weight": theirs[f"{embeddings}position_embeddings.weight"],
        "token_type_embedding.weight": theirs[f"{embeddings}token_type_embeddings.weight"],
        "head_bias": theirs[f"{head}bias"],
    }
    parts = {
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }
    layers = len({name.split(".")[3] for name in theirs if name.startswith("bert.encoder.layer.")})
    for kind in ("weight", "bias"):
        ours[f"embedding_norm.{kind}"] = theirs[f"{embeddings}LayerNorm.{kind}"]
        ours[f"transform.{kind}"] = theirs[f"{head}transform.dense.{kind}"]
        ours[f"transform_norm.{kind}"] = theirs[f"{head}transform.LayerNorm.{kind}"]
        for index in range(layers):
            source, target = f"bert.encoder.layer.{index}.", f"encoder.layers.{index}."
            own = [theirs[f"{source}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            ours[f"{target}attention.qkv.{kind}"] = torch.cat(own)
            for name, their in parts.items():
                ours[f"{target}{name}.{kind}"] = theirs[f"{source}{their}.{kind}"]
    return ours
