"""`trainer.deterministic`: only operations that give equal bits from equal inputs, every time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from ...kernels.attention.flags import AttentionFlags, read_flags
from ..config.schema.root import RootBlock
from ..utils.environment import make_cublas_deterministic


@contextmanager
def determinism(wish: bool | Literal["warn"]) -> Iterator[None]:
    """Within it torch takes deterministic operations only.

    Args:
        wish: `trainer.deterministic`: True makes an operation that has no such form an error, `warn` a warning.
    """
    if not wish:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS reads it when its first handle is made, which is later than this.
    make_cublas_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=wish == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def attention_flags(root: RootBlock, variables: Mapping[str, str] | None = None) -> AttentionFlags:
    """The NVTE_* variables, with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 for `trainer.deterministic: true` or `warn`.

    Torch reports deterministic algorithms in both, which TransformerEngine takes for the same wish.

    Args:
        root: the configuration.
        variables: the environment; None is this process's.

    Raises:
        ValueError: a variable is neither 0 nor 1.
    """
    flags = read_flags(variables)
    return replace(flags, allow_nondeterministic=False) if root.trainer.deterministic else flags
