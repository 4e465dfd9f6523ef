"""Kernel launches with little host overhead: arguments are checked once per compiled variant only."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....launch import INTERPRETED

# compiled variants: (kernel name, dtype, device, constants) -> compiled kernel returned by Triton's first launch
_COMPILED: dict[tuple[Any, ...], Any] = {}


class TileDescriptor(TensorDescriptor):
    """TMA descriptor of a strided tensor's tiles; skips the checks of the base class at construction."""

    def __post_init__(self) -> None:
        pass

    def checked(self) -> TensorDescriptor:
        """Return a checked descriptor of the base class, which compilation requires."""
        return TensorDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout, self.padding
        )


@cache
def _parameters(kernel: Any) -> tuple[list[str], list[str]]:
    """Return the names of a kernel's parameters, and of its constexpr parameters."""
    names = [parameter.name for parameter in kernel.params]
    return names, [parameter.name for parameter in kernel.params if parameter.is_constexpr]


def launch_kernel(
    kernel: Any, programs: int, dtype: Hashable, device: torch.device, arguments: dict[str, Any], *,
    cooperative: bool = False,
) -> None:  # fmt: skip
    """Launch a `persistent_loop.kernel`, with one warp group per role, or a plain Triton kernel with four warps.

    A variant is compiled per constexpr values, device and dtype, or dtypes, which determine those of all tensors. Other
    arguments are not specialized and may change between launches. The programs of a `cooperative` kernel, which wait
    for each other, start when there is room on the device for all of them.
    """
    if INTERPRETED:
        kernel[(programs,)](**arguments)
        return
    names, constants = _parameters(kernel)
    key = (kernel.__name__, dtype, device, *[arguments[name] for name in constants])
    values = [arguments[name] for name in names]
    compiled = _COMPILED.get(key)
    if compiled is None:
        values = [value.checked() if isinstance(value, TileDescriptor) else value for value in values]
        _COMPILED[key] = kernel[(programs,)](*values, num_warps=4, launch_cooperative_grid=cooperative)
    else:
        compiled[(programs, 1, 1)](*values)
