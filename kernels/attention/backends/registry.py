"""Functions of the attention backends, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..backend_support import BACKENDS
from ..dispatch import BackendSelection
from ..inputs import AttentionInputs
from ..reference import reference_backend
from .flash_attn import FlashAttn
from .lse_first import lse_first
from .sdpa import sdpa_cudnn, sdpa_efficient, sdpa_flash, sdpa_math
from .transformer_engine import TEAttention, te_flash, te_fused, te_unfused
from .triton import triton_attention
from .unfused import UnfusedAttention

AttentionFunction = Callable[[AttentionInputs], Tensor]
"""An attention backend: dense inputs, result like `q`. A fully masked query has output and gradients 0."""

ATTENTION_FUNCTIONS: dict[str, AttentionFunction] = {
    "triton": triton_attention,
    "triton_atomic": partial(triton_attention, atomic=True),
    "sdpa_flash": sdpa_flash,
    "flash_attn": FlashAttn(),
    "te_flash": te_flash,
    "sdpa_efficient": sdpa_efficient,
    "sdpa_cudnn": sdpa_cudnn,
    "te_fused": te_fused,
    "unfused": UnfusedAttention(),
    "sdpa_math": sdpa_math,
    "te_unfused": te_unfused,
    "lse_first": lse_first,
    "reference": reference_backend,
}


def draws_from_keys(function: AttentionFunction) -> bool:
    """Return True if dropout is a function of the `rng` of the call, False if of PyTorch's generator."""
    keyed = [ATTENTION_FUNCTIONS[backend.name] for backend in BACKENDS if backend.keyed_dropout]
    return isinstance(function, UnfusedAttention) or any(function is each for each in keyed)


def get_attention_function(decision: BackendSelection, *, masked_softmax_fusion: bool = True) -> AttentionFunction:
    """Return the attention function of the selected backend.

    Args:
        decision: result of `select_backend`; its call determines whether the function must be deterministic.
        masked_softmax_fusion: allow `unfused` to use the fused softmax kernel.
    """
    function = ATTENTION_FUNCTIONS[decision.backend]
    if isinstance(function, UnfusedAttention):
        return UnfusedAttention(masked_softmax_fusion=masked_softmax_fusion)
    if isinstance(function, FlashAttn):
        return FlashAttn(deterministic=decision.call.deterministic)
    if isinstance(function, TEAttention):
        return TEAttention(function.family, deterministic=decision.call.deterministic)
    return function
