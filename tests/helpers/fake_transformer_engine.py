"""The calls of `te_linear` and `te_attention` to TransformerEngine, in plain PyTorch on a CPU: for what is called, with
what.

Casts round to fp8 with the scale that they are given and record the amax, and a GEMM needs the layouts that
TransformerEngine's needs on Hopper. How TransformerEngine rounds and adds is for the tests on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import parallel_models
import torch
from torch import Tensor

DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
LAYOUT = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}
quantizers: list[Any] = []
"""All that were made, oldest first."""


class Cast:
    """Result of a cast: values that fp8 holds, readable along rows and along columns or not."""

    def __init__(self, values: Tensor, columns: bool) -> None:
        self.values: Tensor | None = values
        self.rows, self.columns = True, columns

    def dequantize(self, *, dtype: torch.dtype) -> Tensor:
        assert self.values is not None
        return self.values.to(dtype)

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert not columnwise_usage or self.columns
        self.rows, self.columns = rowwise_usage, columnwise_usage


class Float8Quantizer:
    def __init__(self, scale: Tensor, amax: Tensor, dtype: str, *, rowwise: bool, columnwise: bool) -> None:
        assert rowwise
        assert scale.numel() == amax.numel() == 1
        self.scale, self.amax, self.dtype, self.columnwise, self.internal = scale, amax, dtype, columnwise, False
        quantizers.append(self)

    def __call__(self, values: Tensor) -> Cast:
        assert values.is_contiguous()
        assert values.dim() == 4 or values.shape[0] % 16 == values.shape[1] % 16 == 0
        return Cast(self._round(values), self.columnwise)

    def update_quantized(self, values: Tensor, out: Cast) -> Cast:
        assert out.values is not None
        out.values.copy_(self._round(values))
        return out

    def overwrite(self, values: Tensor) -> Tensor:
        """Round as the attention kernels do, which leave the amax of their call."""
        self.amax.zero_()
        return self._round(values)

    def _round(self, values: Tensor) -> Tensor:
        self.amax.copy_(torch.maximum(self.amax, values.abs().max().float()))
        kind = DTYPES[self.dtype]
        wide = torch.promote_types(values.dtype, torch.float32)
        limit, scale = torch.finfo(kind).max, self.scale.to(wide)
        return (values.to(wide) * scale).clamp(-limit, limit).float().to(kind).to(wide) / scale


class Float8BlockQuantizer(Float8Quantizer):
    """Rounds with one scale for a matrix: which blocks have one is `block_scaling_dim`."""

    def __init__(self, *, fp8_dtype: str, rowwise: bool, columnwise: bool, **options: Any) -> None:
        super().__init__(torch.ones(1), torch.zeros(1), fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.options = options


def general_gemm(
    first: Cast, second: Cast, *, out_dtype: torch.dtype, layout: str, use_split_accumulator: bool, grad: bool = False
) -> tuple[Tensor]:
    assert grad == (layout != "TN")
    assert use_split_accumulator or not grad
    assert first.rows if layout[0] == "T" else first.columns
    assert second.columns if layout[1] == "T" else second.rows
    assert first.values is not None
    assert second.values is not None
    left = second.values.t() if layout[1] == "T" else second.values
    return ((left @ (first.values.t() if layout[0] == "T" else first.values)).to(out_dtype),)


def fused_attn_fwd(
    is_training: bool,
    queries: int,
    keys: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Cast,
    k: Cast,
    v: Cast,
    dtype: torch.dtype,
    backend: str,
    *,
    s_quantizer: Float8Quantizer,
    o_quantizer: Float8Quantizer,
    attn_scale: float,
    attn_mask_type: str,
    **options: Any,
) -> tuple[Cast, list[Tensor]]:
    assert is_training
    assert backend == "FP8"
    assert options == LAYOUT | {"window_size": (-1, 0 if attn_mask_type == "causal" else -1)}
    for lengths, length in ((cu_seqlens_q, queries), (cu_seqlens_kv, keys)):
        assert lengths.tolist() == [length * row for row in range(len(lengths))]
        assert lengths.dtype == torch.int32
    _, _, values, weights = _weights(q, k, v, attn_scale, attn_mask_type == "causal")
    output = s_quantizer.overwrite(weights) @ values
    return Cast(o_quantizer.overwrite(output.transpose(1, 2)), False), [weights, torch.zeros(2)]


def fused_attn_bwd(
    queries: int,
    keys: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Cast,
    k: Cast,
    v: Cast,
    output: Cast,
    gradient: Cast,
    dtype: torch.dtype,
    saved: list[Tensor],
    backend: str,
    *,
    s_quantizer: Float8Quantizer,
    dp_quantizer: Float8Quantizer,
    dqkv_quantizer: Float8Quantizer,
    attn_scale: float,
    attn_mask_type: str,
    do_format: str,
    dqkv_layout: str,
    deterministic: bool,
    **options: Any,
) -> list[Any]:
    assert backend == "FP8"
    assert options == LAYOUT | {"window_size": (-1, 0 if attn_mask_type == "causal" else -1)}
    assert (do_format, dqkv_layout, len(saved)) == ("bshd", "bshd_bshd_bshd", 2)
    assert output.values is not None
    assert gradient.values is not None
    query, key, value, weights = _weights(q, k, v, attn_scale, attn_mask_type == "causal")
    upstream, groups = gradient.values.transpose(1, 2), len(query[0]) // heads_of(k)
    summed = (upstream * output.values.transpose(1, 2)).sum(-1, keepdim=True)
    scores = dp_quantizer.overwrite(weights * (upstream @ value.transpose(2, 3) - summed))
    found = [
        attn_scale * scores @ key,
        attn_scale * scores.transpose(2, 3) @ query,
        s_quantizer.overwrite(weights).transpose(2, 3) @ upstream,
    ]
    found[1:] = [each.unflatten(1, (-1, groups)).sum(2) for each in found[1:]]
    dqkv_quantizer.amax.zero_()  # one for all three
    return [*(Cast(dqkv_quantizer._round(each.transpose(1, 2)), False) for each in found), None, None]


def heads_of(tensor: Cast) -> int:
    assert tensor.values is not None
    return tensor.values.shape[2]


def _weights(q: Cast, k: Cast, v: Cast, scale: float, causal: bool) -> list[Tensor]:
    """Return queries, keys and values of all heads (batch, heads, tokens, width), and the attention weights."""
    found = []
    for each in (q, k, v):
        assert each.values is not None
        heads = each.values.transpose(1, 2)
        found.append(heads.repeat_interleave(heads_of(q) // heads.shape[1], 1))
    scores = scale * found[0] @ found[1].transpose(2, 3)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return [*found, scores.softmax(-1)]


def prepare_for_saving(*values: Any) -> tuple[list[Tensor | None], list[Any]]:
    tensors = [value.values if isinstance(value, Cast) else value for value in values]
    objects = [value if isinstance(value, Cast) else None for value in values]
    for value in objects:
        if value is not None:
            value.values = None
    return tensors, objects


def restore_from_saved(objects: list[Any], saved: list[Tensor]) -> list[Any]:
    for value, data in zip(objects, saved, strict=True):
        if value is not None:
            value.values = data
    return [data if value is None else value for value, data in zip(objects, saved, strict=True)]


def install(patch: Callable[[Any, str, Any], None] = setattr, item: Callable[..., None] = dict.__setitem__) -> None:
    """Let `te_linear` and `te_attention` find this in place of TransformerEngine, on a CPU."""
    from stoker.kernels.attention import backend_support, installed_software
    from stoker.kernels.fp8 import te_linear
    from stoker.models import build
    from stoker.models.parallel import fp8
    from stoker.trainer.core import run_checks

    package: Any = ModuleType("transformer_engine.pytorch")
    for each in (Float8Quantizer, Float8BlockQuantizer, prepare_for_saving, restore_from_saved):
        setattr(package, each.__name__, each)
    parent = ModuleType("transformer_engine")
    parent.__spec__ = ModuleSpec("transformer_engine", None)
    item(sys.modules, "transformer_engine", parent)
    item(sys.modules, "transformer_engine.pytorch", package)
    item(sys.modules, "transformer_engine.pytorch.cpp_extensions", SimpleNamespace(general_gemm=general_gemm))
    fused = SimpleNamespace(
        fused_attn_fwd=fused_attn_fwd, fused_attn_bwd=fused_attn_bwd, FusedAttnBackend={"FP8": "FP8"}
    )
    item(sys.modules, "transformer_engine.pytorch.cpp_extensions.fused_attn", fused)
    te_fused = backend_support.BACKENDS_BY_NAME["te_fused"]
    on_cpu = replace(te_fused, why_not=lambda call, found: None if call.fp8 else te_fused.why_not(call, found))
    item(backend_support.BACKENDS_BY_NAME, "te_fused", on_cpu)
    names = SimpleNamespace(**{name: name for name in DTYPES})
    item(sys.modules, "transformer_engine_torch", SimpleNamespace(DType=names))
    for module in (te_linear, fp8):
        patch(module, "runs_on", lambda tensor: True)
    detect = installed_software.detect_installed_software
    for user in (build, run_checks):
        patch(user, "detect_installed_software", lambda device="cpu": replace(detect(device), te=(2, 20)))
    patch(build, "check_fp8", lambda *_: None)  # which refuses delayed scaling on a CPU


def compare(directory: str, size: int, cases: list[list[Any]]) -> list[dict[str, float]]:
    """`parallel_models.compare` with this TransformerEngine."""
    from stoker.models.fp8 import build_delayed_scaling

    def build_with_state(*arguments: Any, **options: Any) -> Any:
        model = build(*arguments, **options)
        build_delayed_scaling(model, torch.device("cpu"))
        return model

    install()
    build, parallel_models.build = parallel_models.build, build_with_state
    return parallel_models.compare(directory, size, cases)
