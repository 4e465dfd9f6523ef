"""Tensors of a model read one at a time, and casts that reject overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..utils.errors import UserError
from ..utils.safetensors_io import TensorSpec

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by command-line name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSource(Protocol):
    """Unsharded tensors of a model, read one at a time."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name to dtype and shape."""
        ...

    @property
    def read(self) -> Callable[[str], Tensor]:
        """Read a tensor to host memory."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedTensors:
    """A source of two parts: dtype and shape of each tensor, and the function that reads it."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]


def host_tensors(tensors: Mapping[str, Tensor]) -> TensorSource:
    """Return tensors in host memory as a source."""
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return ComputedTensors(specs, tensors.__getitem__)


def cast_tensors(source: TensorSource, dtype: torch.dtype | None) -> TensorSource:
    """Return the tensors of another source in one dtype; None keeps the dtype of each. Errors as in `cast_checked`."""
    specs = {name: replace(spec, dtype=dtype or spec.dtype) for name, spec in source.specs.items()}
    return ComputedTensors(specs, lambda name: cast_checked(source.read(name), specs[name].dtype, name))


def describe_differences(found: Mapping[str, TensorSpec], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each tensor that is missing, of another shape than wanted, or no parameter of the model."""
    lines = [f"{name} is missing" for name in wanted if name not in found]
    lines += [f"{name} is not a parameter of this model" for name in found if name not in wanted]
    return lines + [
        f"{name} has the shape {list(found[name].shape)}, which must be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]


def cast_checked(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor.

    Raises:
        UserError: a finite value overflows to infinity.
    """
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((converted.isinf() & tensor.isfinite()).any()):
        shown = DTYPE_NAMES[dtype]
        raise UserError(
            f"{name} holds {float(tensor.abs().max()):.3g}, more than {shown} can: use --dtype bf16 or fp32"
        )
    return converted
