"""`trainer.deterministic`: restrict torch to deterministic operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from ...kernels.attention.flags import AttentionFlags, read_flags
from ..utils.environment import set_cublas_workspace


@contextmanager
def deterministic_algorithms(mode: bool | Literal["warn"]) -> Iterator[None]:
    """Context in which torch uses deterministic algorithms only.

    Args:
        mode: `trainer.deterministic`; an operation without a deterministic algorithm raises (True) or warns (`warn`).
    """
    if not mode:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS reads the variable when its first handle is created, which is later.
    set_cublas_workspace()
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def attention_flags(
    deterministic: bool | Literal["warn"], variables: Mapping[str, str] | None = None
) -> AttentionFlags:
    """Return the NVTE_* flags, with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 for `trainer.deterministic: true` or `warn`.

    Torch reports deterministic algorithms as enabled in both cases, and TransformerEngine follows that. `variables` is
    the environment, None for `os.environ`.

    Raises:
        ValueError: a variable is neither 0 nor 1.
    """
    flags = read_flags(variables)
    return replace(flags, allow_nondeterministic=False) if deterministic else flags
