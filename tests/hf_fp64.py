"""Hugging Face's Llama and GPT-2 as fp64 references, and the way their weights map to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    theta, dim = self.config.rope_parameters["rope_theta"], self.config.head_dim
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = position_ids[..., None].to(x.dtype) * frequencies
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


@contextmanager
def upcasts_lifted() -> Iterator[None]:
    """Llama's norm and rotary embedding compute in fp32 whatever comes in; inside, they keep the dtype of the input."""
    with (
        mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", _rms_norm),
        mock.patch.object(modeling_llama.LlamaRotaryEmbedding, "forward", _rotary),
    ):
        yield


def llama_names(reference: nn.Module, layers: int, of: str = "data") -> dict[str, Tensor]:
    """Our parameter names to Llama's values (`of="data"`) or gradients (`of="grad"`)."""
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
