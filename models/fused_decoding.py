"""Decode step of one sequence, each of the usual layers in six kernels.

The kernels of a decode step are short: what lies between them costs as much as they do. Here a layer is the QKV
projection with the norm before it; rotary embedding, append to the KV cache and attention to parts of the keys; their
combination, which every program of the next kernel would have to repeat; the output projection with the residual add;
the first MLP projection with norm and activation; the second one with the residual add.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..kernels.activations import FUSED_ACTIVATIONS
from ..kernels.attention.decode import combine, launch_split_kernel
from ..kernels.decode_linear import Norm, triton_decode_linear
from ..kernels.launch import triton_runs_on
from .layer import Layer
from .layers.context import LayerContext
from .layers.mlp import MLP
from .layers.norm import LayerNorm, RMSNorm


def can_fuse_decode_step(layers: Iterable[nn.Module], rows: int, hidden: Tensor) -> bool:
    """Return True if `fused_decode_step` supports the layers and `rows` rows of a residual stream like `hidden`.

    It does for one row in bf16 on a GPU, pre-norm and parallel layers with RMSNorm, an MLP and plain linear layers: not
    with LoRA or another adapter, fp8, tensor parallelism, experts or cross-attention. Several rows take cuBLAS.
    """
    if not triton_runs_on(hidden) or hidden.dtype != torch.bfloat16 or rows > 1:
        return False
    return all(
        type(each) is Layer and is_plain(each) and all(p.dtype == hidden.dtype for p in each.parameters())
        for each in layers
    )


def is_plain(layer: Layer) -> bool:
    """Return True if the layer consists of what `fused_decode_step` computes, without hooks, which would not run."""
    attention, mlp = layer.attention, layer.mlp
    if layer.block not in ("pre_ln", "parallel_ln") or layer.training or not isinstance(mlp, MLP):
        return False
    others = (layer.cross_attention, layer.attention_adapter, layer.mlp_adapter, attention.head_scale, mlp.inner_norm)
    linear = (attention.qkv, attention.output, mlp.up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    plain = all(type(each) is nn.Linear for each in linear) and all(type(each) is RMSNorm for each in norms)
    hooks = any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules())
    return plain and not hooks and mlp.nonlinearity in FUSED_ACTIVATIONS and all(each is None for each in others)


def fused_decode_step(layer: Layer, hidden: Tensor, context: LayerContext) -> Tensor:
    """Run a layer that `can_fuse_decode_step` accepts; (1, 1, hidden_size) to the same shape."""
    attention, mlp, cache = layer.attention, layer.mlp, context.cache
    assert isinstance(mlp, MLP)
    assert cache is not None
    stream = hidden[:, 0]
    qkv, output = attention.qkv, attention.output
    projected = triton_decode_linear(stream, qkv.weight, qkv.bias, norm=_norm(layer.attention_norm))
    projected = projected.unflatten(-1, (-1, attention.head_dim))
    inputs, append = attention.decode_inputs(projected, context, cache)
    heads, lse = launch_split_kernel(inputs, append=append)
    heads = heads if lse is None else combine(heads, lse, hidden.dtype)
    attended = triton_decode_linear(heads.flatten(1), output.weight, output.bias, stream)
    mlp_input = stream if layer.block == "parallel_ln" else attended
    inner = triton_decode_linear(
        mlp_input,
        mlp.up.weight,
        mlp.up.bias,
        norm=_norm(layer.mlp_norm),
        activation=mlp.nonlinearity,
        gated=mlp.gated,
    )
    return triton_decode_linear(inner, mlp.down.weight, mlp.down.bias, attended)[:, None]


def _norm(norm: LayerNorm | RMSNorm) -> Norm:
    return Norm(norm.weight, norm.epsilon, norm.zero_centered)
