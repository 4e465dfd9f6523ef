"""Attention in fp8 by TransformerEngine's cuDNN kernels, with scales of the caller's.

The kernels read queries, keys and values in fp8 and multiply the attention weights and the gradients of the scores in
it as well; output and gradients of the inputs leave them in fp8. Scales of what is computed inside must be known
before, so all six tensors have delayed scaling, whatever that of the linear layers is. TransformerEngine does so on
Hopper too, where it has no attention of current scaling (`NVTE_DPA_FP8_RECIPE=DelayedScaling`). Read at release 2.20
(transformer_engine/pytorch/attention/dot_product_attention/backends.py, FusedAttnFunc).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..attention.inputs import AttentionInputs
from ..launch import disable_compile
from .delayed_scaling import DelayedScales, Pass
from .recipe import Fp8Recipe
from .te_linear import float8_quantizer, transformer_engine

QKV, WEIGHTS, OUTPUT, OUTPUT_GRADIENT, SCORE_GRADIENT, QKV_GRADIENT = range(6)
"""Operands of an attention that have a scale: queries, keys and values, which share one; the attention weights; the
output; its gradient; the gradient of the scores; those of queries, keys and values.
"""
ATTENTION: tuple[Pass, ...] = ("forward",) * 3 + ("backward",) * 3
"""The pass in which each of them is cast, which decides on its format."""


@dataclass(eq=False)
class TEFp8Attention:
    """Attention of one layer in fp8, in training.

    Attributes:
        recipe: formats; its scaling is delayed.
        deterministic: use a bitwise reproducible backward pass.
        scales: state of delayed scaling, once the model is on its device.
    """

    recipe: Fp8Recipe
    deterministic: bool = False
    scales: DelayedScales | None = None

    @disable_compile
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: an option besides scale and causal mask, or a causal mask over unequal lengths.
            RuntimeError: there is no state of the scales.
        """
        if given := inputs.given_options():
            raise ValueError(
                f"`{given[0]}` must not be given to attention in fp8; use fp8_dot_product_attention=false."
            )
        if inputs.causal and inputs.queries != inputs.keys:
            raise ValueError(f"`causal` needs as many keys ({inputs.keys}) as queries ({inputs.queries}) in fp8.")
        if self.scales is None:
            raise RuntimeError("delayed scaling has no state: call `models.fp8.build_delayed_scaling` after building")
        deterministic = self.deterministic or torch.are_deterministic_algorithms_enabled()
        options = {
            "qkv_layout": "bshd_bshd_bshd",
            "o_format": "bshd",
            "attn_scale": inputs.scale,
            "attn_mask_type": "causal" if inputs.causal else "no_mask",
            "window_size": (-1, 0 if inputs.causal else -1),
        }
        output: Any = _Fp8Attention.apply(*inputs[:3], self.recipe, self.scales, options, deterministic)
        return output


class _Fp8Attention(torch.autograd.Function):
    """Save queries, keys, values and output in fp8, and the log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: Fp8Recipe,
        scales: DelayedScales,
        options: dict[str, Any],
        deterministic: bool,
    ) -> Tensor:
        cast = _quantizer(QKV, recipe, scales, scales.amax)
        inputs = [cast(each.contiguous()) for each in (q, k, v)]
        lengths = [
            torch.arange(0, (q.shape[0] + 1) * each.shape[1], each.shape[1], dtype=torch.int32, device=q.device)
            for each in (q, k)
        ]
        amax, fused = torch.zeros_like(scales.amax), _fused_attention()
        output, saved = fused.fused_attn_fwd(
            True,
            q.shape[1],
            k.shape[1],
            *lengths,
            *inputs,
            q.dtype,
            fused.FusedAttnBackend["FP8"],
            s_quantizer=_quantizer(WEIGHTS, recipe, scales, amax),
            o_quantizer=_quantizer(OUTPUT, recipe, scales, amax),
            **options,
        )
        # the kernel casts exp(score - largest score so far), at most 1, and records the amax of the weights, which is
        # less where no key has nearly all weight: its scale would send casts out of range
        amax[WEIGHTS : WEIGHTS + 1].fill_(1.0)  # a kernel, where an index would copy from the host
        torch.maximum(scales.amax, amax, out=scales.amax)
        result = output.dequantize(dtype=q.dtype)
        tensors, ctx.objects = transformer_engine().prepare_for_saving(*inputs, output)
        ctx.save_for_backward(*lengths, *saved, *tensors)
        ctx.recipe, ctx.scales, ctx.options, ctx.lengths = recipe, scales, options, (q.shape[1], k.shape[1])
        ctx.dtype, ctx.deterministic, ctx.num_saved = q.dtype, deterministic, len(saved)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe, scales = ctx.recipe, ctx.scales
        first, second, *others = ctx.saved_tensors
        saved, tensors = others[: ctx.num_saved], others[ctx.num_saved :]
        inputs = transformer_engine().restore_from_saved(ctx.objects, tensors)
        amax, fused = torch.zeros_like(scales.amax), _fused_attention()
        found = fused.fused_attn_bwd(
            *ctx.lengths,
            first,
            second,
            *inputs,
            _quantizer(OUTPUT_GRADIENT, recipe, scales, scales.amax)(gradients[0].contiguous()),
            ctx.dtype,
            saved,
            fused.FusedAttnBackend["FP8"],
            s_quantizer=_quantizer(WEIGHTS, recipe, scales, amax),
            dp_quantizer=_quantizer(SCORE_GRADIENT, recipe, scales, amax),
            dqkv_quantizer=_quantizer(QKV_GRADIENT, recipe, scales, amax),
            do_format="bshd",
            dqkv_layout="bshd_bshd_bshd",
            deterministic=ctx.deterministic,
            **ctx.options,
        )
        torch.maximum(scales.amax, amax, out=scales.amax)
        return *(each.dequantize(dtype=ctx.dtype) for each in found[:3]), *(None,) * 4


def _quantizer(operand: int, recipe: Fp8Recipe, scales: DelayedScales, amax: Tensor) -> Any:
    """Return the quantizer of an operand, which records the amax there."""
    kind = recipe.forward if ATTENTION[operand] == "forward" else recipe.backward
    own = slice(operand, operand + 1)
    quantizer = float8_quantizer(scales.scale[own], amax[own], kind, columns=False)
    quantizer.internal = True  # the bare data, no subclass of Tensor
    return quantizer


def _fused_attention() -> Any:
    """Return TransformerEngine's calls of cuDNN's attention, which leave the amaxes of their own call."""
    return import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
