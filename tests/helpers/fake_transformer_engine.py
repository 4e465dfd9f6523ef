"""The calls that `te_linear` makes to TransformerEngine, in plain PyTorch on a CPU: for what is called and with what.

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
quantizers: list[Any] = []
"""All that were made, oldest first."""


class Cast:
    """Result of a cast: values that fp8 holds, readable along rows and along columns or not."""

    def __init__(self, values: Tensor, columns: bool) -> None:
        self.values: Tensor | None = values
        self.rows, self.columns = True, columns

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
        assert values.shape[0] % 16 == values.shape[1] % 16 == 0
        return Cast(self._round(values), self.columnwise)

    def update_quantized(self, values: Tensor, out: Cast) -> Cast:
        assert out.values is not None
        out.values.copy_(self._round(values))
        return out

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


def prepare_for_saving(value: Any) -> tuple[list[Tensor | None], list[Any]]:
    if not isinstance(value, Cast):
        return [value], [None]
    data, value.values = value.values, None
    return [data], [value]


def restore_from_saved(objects: list[Any], saved: list[Tensor]) -> list[Any]:
    (value,), (data,) = objects, saved
    if value is None:
        return [data]
    value.values = data
    return [value]


def install(patch: Callable[[Any, str, Any], None] = setattr, item: Callable[..., None] = dict.__setitem__) -> None:
    """Let `te_linear` find this in place of TransformerEngine, on a CPU."""
    from stoker.kernels.attention import installed_software
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
