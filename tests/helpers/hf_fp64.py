"""Hugging Face models as fp64 references, and the mapping of their weights to ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from stoker.models.build import LanguageModel
from stoker.models.hf.architecture import Architecture
from stoker.models.hf.weight_layout import Geometry
from stoker.models.layers.self_attention import SelfAttention


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def _rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    config, rope = self.config, self.config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta, dim = rope["rope_theta"], int(width * rope.get("partial_rotary_factor", 1.0))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = position_ids[..., None].to(x.dtype) * frequencies
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def _top_k_router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden_states, self.weight)
    values, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
    return logits, values / values.sum(dim=-1, keepdim=True), chosen


@contextmanager
def keep_input_dtype() -> Iterator[None]:
    """Keep norms, rotary embeddings and routers in the dtype of their input, where transformers upcasts to fp32."""
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama
    from transformers.models.mistral import modeling_mistral
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.mt5 import modeling_mt5
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.t5 import modeling_t5

    norms = (
        *(modeling_llama.LlamaRMSNorm, modeling_mistral.MistralRMSNorm, modeling_mixtral.MixtralRMSNorm),
        *(modeling_qwen2.Qwen2RMSNorm, modeling_qwen3.Qwen3RMSNorm, modeling_t5.T5LayerNorm, modeling_mt5.MT5LayerNorm),
    )
    rotaries = (
        *(modeling_llama.LlamaRotaryEmbedding, modeling_mistral.MistralRotaryEmbedding),
        *(modeling_mixtral.MixtralRotaryEmbedding, modeling_gpt_neox.GPTNeoXRotaryEmbedding),
        *(modeling_qwen2.Qwen2RotaryEmbedding, modeling_qwen3.Qwen3RotaryEmbedding),
    )
    with ExitStack() as stack:
        for kind in norms:
            stack.enter_context(mock.patch.object(kind, "forward", _rms_norm))
        for kind in rotaries:
            stack.enter_context(mock.patch.object(kind, "forward", _rotary))
        stack.enter_context(mock.patch.object(modeling_mixtral.MixtralTopKRouter, "forward", _top_k_router))
        yield


def map_parameters(
    kind: Architecture, ours: LanguageModel, reference: nn.Module, attribute: str = "data"
) -> dict[str, Tensor]:
    """Map our parameter names to the reference's values or gradients, by the tables of `stoker convert`.

    Args:
        kind: architecture of the reference.
        ours: our model of the same shape; a padded vocabulary gets zeros.
        reference: the transformers model.
        attribute: attribute of the reference's parameters: `data` or `grad`.
    """
    theirs = {name: getattr(parameter, attribute) for name, parameter in reference.named_parameters()}
    for name in [name for name in theirs if ".mlp.experts." in name]:  # stored per expert on disk
        layer, part = name.split(".mlp.experts.")
        theirs[f"{layer}.block_sparse_moe.gate.weight"] = theirs[f"{layer}.mlp.gate.weight"]
        for number, expert in enumerate(theirs[name]):
            matrices = expert.chunk(2) if part == "gate_up_proj" else [expert]
            for matrix, tensor in zip(("w1", "w3") if len(matrices) == 2 else ("w2",), matrices, strict=True):
                theirs[f"{layer}.block_sparse_moe.experts.{number}.{matrix}.weight"] = tensor
    attention = next(module for module in ours.modules() if isinstance(module, SelfAttention))
    geometry = Geometry(heads=attention.heads, groups=attention.groups, vocab_size=ours.vocab_size)
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    placed, unmatched = kind.weights.map_parameters(shapes, geometry)
    assert unmatched == []
    return {entry.parameter: entry.join([theirs[name] for name, _ in entry.hf_tensors], geometry) for entry in placed}


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest element of their tensor."""
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
