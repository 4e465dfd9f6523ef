"""The functions behind the names of the dispatcher's table, and the versions it asks about."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .call import Installed
from .packed import PackedSequences
from .reference import reference_attention
from .sdpa import sdpa_cudnn, sdpa_efficient, sdpa_flash, sdpa_math
from .unfused import unfused_attention


class AttentionFunction(Protocol):
    """What every backend is: the arguments and result of `reference_attention`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool,
        dropout: float = 0.0,
        bias: Tensor | None = None,
        window: tuple[int, int] | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """Attend from (batch, queries, heads, head_dim) to (batch, keys, groups, head_dim)."""
        ...


FUNCTIONS: dict[str, AttentionFunction] = {
    "sdpa_flash": sdpa_flash,
    "sdpa_efficient": sdpa_efficient,
    "sdpa_cudnn": sdpa_cudnn,
    "sdpa_math": sdpa_math,
    "unfused": unfused_attention,
    "reference": reference_attention,
}


def torch_version() -> tuple[int, int]:
    """(major, minor) of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def installed() -> Installed:
    """The versions in this process."""
    return Installed(
        torch=torch_version(),
        cudnn=torch.backends.cudnn.version(),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
    )
