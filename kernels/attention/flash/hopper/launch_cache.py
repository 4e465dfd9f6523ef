"""Launches that cost the host little: arguments are checked once per variant of a kernel, then only passed on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....launch import INTERPRETED

# compiled variants: name of the kernel, device and constants -> what Triton returned at the first launch
_COMPILED: dict[tuple[Any, ...], Any] = {}


class Tiles(TensorDescriptor):
    """Tiles of a strided tensor, read and written by TMA; unlike those of the base class not checked when made."""

    def __post_init__(self) -> None:
        pass

    def checked(self) -> TensorDescriptor:
        """As Triton wants it where it compiles."""
        return TensorDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout, self.padding
        )


@cache
def _parameters(kernel: Any) -> tuple[list[str], list[str]]:
    """Names of a kernel's parameters, and of those that are constants."""
    names = [parameter.name for parameter in kernel.params]
    return names, [parameter.name for parameter in kernel.params if parameter.is_constexpr]


def launch(kernel: Any, programs: int, dtype: torch.dtype, device: torch.device, arguments: dict[str, Any]) -> None:
    """Launch a kernel of `schedule.kernel` with one warp group for each of its roles, or a plain one of four warps.

    Such a kernel is compiled for its constants and the dtypes of its tensors, which `dtype` implies; numbers are not
    specialised. So all else can change from launch to launch.
    """
    if INTERPRETED:
        kernel[(programs,)](**arguments)
        return
    names, constants = _parameters(kernel)
    key = (kernel.__name__, dtype, device, *[arguments[name] for name in constants])
    values = [arguments[name] for name in names]
    compiled = _COMPILED.get(key)
    if compiled is None:
        values = [value.checked() if isinstance(value, Tiles) else value for value in values]
        _COMPILED[key] = kernel[(programs,)](*values, num_warps=4)
    else:
        compiled[(programs, 1, 1)](*values)
