"""Linear layers in fp8 by TransformerEngine's casts and matmuls, with a weight and scales of the caller's.

TransformerEngine's modules own weight and state, save the state with pickle, and let `autocast` update it after each
pass. Its quantizers and its GEMM, of which these modules are made, have none of that. Read at release 2.20
(transformer_engine/pytorch/ops/basic/basic_linear.py).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.backends.transformer_engine import import_transformer_engine
from ..attention.call_spec import InstalledSoftware
from ..attention.support_checks import format_version
from ..attention.te_support import MIN_TE_FP8, why_not_te
from ..autocast import autocast
from .delayed_scaling import GRADIENT, INPUT, WEIGHT, DelayedScales
from .linear import check_weight
from .quantize import Reduce, amaxes
from .recipe import MAX_VALUE, Format, Fp8Recipe
from .reference import SMALLEST_AMAX

_DTYPES: dict[Format, str] = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
_MULTIPLE = 16
"""Multiple to which the tokens of an fp8 GEMM are padded."""


def runs_on(tensor: Tensor) -> bool:
    """Return True on a GPU; elsewhere TransformerEngine has no kernels."""
    return tensor.is_cuda


def check_transformer_engine(recipe: Fp8Recipe, installed: InstalledSoftware) -> None:
    """Raise ValueError if TransformerEngine's linear layers do not run on this machine, which has a GPU."""
    problem = why_not_te(installed)
    if problem is None and installed.te is not None and installed.te < MIN_TE_FP8:
        problem = f"needs TransformerEngine {format_version(MIN_TE_FP8)}, found {format_version(installed.te)}"
    if problem is not None:
        raise ValueError(
            f"`fp8` (True) with `transformer_engine` (True) is not available: {problem}; use transformer_engine=null."
        )
    if recipe.scaling != "blockwise":
        return
    found, reason = import_transformer_engine().is_fp8_block_scaling_available(return_reason=True)
    if not found:
        raise ValueError(
            f"`fp8_recipe` (blockwise) is not available through TransformerEngine: {reason.rstrip('.')}; use "
            "transformer_engine=null, or model.fp8_recipe=delayed."
        )


def transformer_engine() -> Any:
    """Return `transformer_engine.pytorch`."""
    return sys.modules.get("transformer_engine.pytorch") or import_transformer_engine()


def _quantizer(
    values: Tensor, operand: int, recipe: Fp8Recipe, scales: DelayedScales | None, reduce: Reduce | None, columns: bool
) -> Any:
    """Return the quantizer of an operand: with the scale of its state, or one that follows from its values."""
    kind = recipe.backward if operand == GRADIENT else recipe.forward
    if recipe.scaling == "blockwise":
        blocks = 2 if operand == WEIGHT else 1
        return transformer_engine().Float8BlockQuantizer(
            fp8_dtype=_dtype(kind),
            rowwise=True,
            columnwise=columns,
            block_scaling_dim=blocks,
            force_pow_2_scales=False,
        )
    if recipe.scaling == "delayed":
        if scales is None:
            raise RuntimeError("delayed scaling has no state: call `models.fp8.build_delayed_scaling` after building")
        scale, amax = scales.scale[operand : operand + 1], scales.amax[operand : operand + 1]
    else:
        found = amaxes(values, "tensor", columns=False, reduce=reduce)[0]
        scale, amax = MAX_VALUE[kind] * 2.0**-recipe.margin / found.clamp(min=SMALLEST_AMAX), found
    return float8_quantizer(scale, amax, kind, columns=columns)


def float8_quantizer(scale: Tensor, amax: Tensor, kind: Format, *, columns: bool) -> Any:
    """Return a quantizer to this format.

    Args:
        scale: (1,) fp32, what values are multiplied by.
        amax: (1,) fp32, in which a cast leaves the largest magnitude of its values, if that is larger.
        kind: format.
        columns: cast the transpose too.
    """
    return transformer_engine().Float8Quantizer(scale, amax, _dtype(kind), rowwise=True, columnwise=columns)


def _dtype(kind: Format) -> Any:
    return getattr(import_module("transformer_engine_torch").DType, _DTYPES[kind])


def _cast(
    values: Tensor, operand: int, recipe: Fp8Recipe, scales: DelayedScales | None, reduce: Reduce | None, columns: bool
) -> Any:
    """Return the cast of a matrix, with `columns` also of its transpose."""
    quantizer = _quantizer(values, operand, recipe, scales, reduce, columns)
    quantizer.internal = True  # the bare data, no subclass of Tensor
    return quantizer(values)


def te_cast_weight(
    weight: Tensor, recipe: Fp8Recipe, scales: DelayedScales | None, reduce: Reduce | None, out: Any = None
) -> Any:
    """Return the cast of a weight (N, K) and of its transpose, for all micro batches of a step; in `out` if given."""
    values = weight.detach()
    quantizer = _quantizer(values, WEIGHT, recipe, scales, reduce, columns=True)
    return quantizer(values) if out is None else quantizer.update_quantized(values, out)


class _TELinear(torch.autograd.Function):
    """Save the cast of the transposed input (with `wgrad` off, the input), and the weight unless its cast is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        recipe: Fp8Recipe,
        scales: DelayedScales | None,
        cast: Any,
        reduce: Reduce | None,
        weight_reduce: Reduce | None,
    ) -> Tensor:
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        columns = needs_weight and recipe.wgrad
        rows = _cast(inputs, INPUT, recipe, scales, reduce, columns)
        of_weight = cast if cast is not None else _cast(weight, WEIGHT, recipe, scales, weight_reduce, columns=False)
        output = _multiply(of_weight, rows, "TN", inputs.dtype, use_split_accumulator=False)
        kept: Any = inputs if needs_weight else None
        if columns:
            rows.update_usage(rowwise_usage=False, columnwise_usage=True)
            kept = rows
        tensors, ctx.objects = transformer_engine().prepare_for_saving(kept)
        ctx.save_for_backward(weight if needs_inputs and cast is None else None, *tensors)
        ctx.recipe, ctx.scales, ctx.cast, ctx.reduce, ctx.weight_reduce = recipe, scales, cast, reduce, weight_reduce
        ctx.dtypes = inputs.dtype, weight.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        weight, *saved = ctx.saved_tensors
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        gradient, (input_dtype, weight_dtype) = gradients[0].contiguous(), ctx.dtypes
        columns, options = needs_weight and recipe.wgrad, {"use_split_accumulator": True, "grad": True}
        rows = _cast(gradient, GRADIENT, recipe, ctx.scales, ctx.reduce, columns)
        input_gradient = weight_gradient = None
        if needs_inputs:
            cast = ctx.cast
            if cast is None:
                cast = _cast(weight, WEIGHT, recipe, ctx.scales, ctx.weight_reduce, columns=True)
            input_gradient = _multiply(cast, rows, "NN", input_dtype, **options)
        if needs_weight:
            (inputs,) = transformer_engine().restore_from_saved(ctx.objects, saved)
            if columns:
                weight_gradient = _multiply(inputs, rows, "NT", weight_dtype, **options)
            else:
                weight_gradient = (gradient.t() @ inputs).to(weight_dtype)
        return input_gradient, weight_gradient, *(None,) * 5


def _multiply(first: Any, second: Any, layout: str, dtype: torch.dtype, **options: bool) -> Tensor:
    gemm = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    return gemm(first, second, out_dtype=dtype, layout=layout, **options)[0]


def te_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    *,
    scales: DelayedScales | None = None,
    cast: Any = None,
    reduce: Reduce | None = None,
    weight_reduce: Reduce | None = None,
) -> Tensor:
    """Return `F.linear(inputs, weight, bias)` with all products in fp8.

    Args:
        inputs: (..., K) on a GPU; under autocast, cast to its dtype, as is the bias.
        weight: (N, K); N and K multiples of 16.
        bias: (N,), added to the rounded product, or None; its gradient is computed without fp8.
        recipe: `tensorwise`, `blockwise` or `delayed`.
        scales: the state of delayed scaling, whose amaxes are updated; None with another recipe.
        cast: of `weight`, from `te_cast_weight`; None casts it in each pass.
        reduce: as in `fp8_linear`, for `tensorwise`.
        weight_reduce: likewise.

    Returns:
        (..., N) in the dtype of `inputs`, differentiable once.

    Raises:
        ValueError: shapes do not match, or a width is no multiple of 16.
        RuntimeError: delayed scaling without its state.
    """
    check_weight("weight", weight, inputs.shape[-1])
    inputs, bias = autocast(inputs, bias)
    flat = inputs.flatten(0, -2)
    tokens = flat.shape[0]
    padded = F.pad(flat, (0, 0, 0, -tokens % _MULTIPLE)) if tokens % _MULTIPLE else flat.contiguous()
    output: Any = _TELinear.apply(padded, weight, recipe, scales, cast, reduce, weight_reduce)
    output = output[:tokens].view(*inputs.shape[:-1], -1)
    return output if bias is None else output + bias
