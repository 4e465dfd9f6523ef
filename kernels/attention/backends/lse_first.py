"""Attention backend for LSE-first attention; selected by name only."""

from __future__ import annotations

from torch import Tensor

from ..lse_first.ops import lse_first_attention
from ..packed_sequences import PackedSequences


def lse_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    packed: PackedSequences | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Compute attention; arguments as in `AttentionFunction`.

    Raises:
        ValueError: an option other than scale and causal mask is given, or a tensor is invalid.
    """
    options = {
        "dropout": bool(dropout),
        "bias": bias is not None,
        "distance_bias": distance_bias is not None,
        "alibi_slopes": alibi_slopes is not None,
        "window": window is not None,
        "softcap": bool(softcap),
        "packed": packed is not None,
        "key_padding_mask": key_padding_mask is not None,
    }
    if given := [name for name, is_given in options.items() if is_given]:
        raise ValueError(f"`{given[0]}` must not be given: LSE-first attention supports scale and causal masks only.")
    context = lse_first_attention(query, key, value, causal=causal, softmax_scale=scale)
    assert isinstance(context, Tensor)
    return context
