"""Attention backend for LSE-first attention; selected by name only."""

from __future__ import annotations

from torch import Tensor

from ..inputs import AttentionInputs
from ..lse_first.ops import lse_first_attention


def lse_first(inputs: AttentionInputs) -> Tensor:
    """Compute attention.

    Raises:
        ValueError: an option other than scale and causal mask is given, or a tensor is invalid.
    """
    if given := inputs.given_options():
        raise ValueError(f"`{given[0]}` must not be given: LSE-first attention supports scale and causal masks only.")
    context = lse_first_attention(*inputs[:3], causal=inputs.causal, softmax_scale=inputs.scale)
    assert isinstance(context, Tensor)
    return context
