"""Triton kernels with PyTorch references, custom ops and public functions, one operation per file.

The names below are public (docs/kernels.md), as are those of `stoker.kernels.compat`, the interface of flash-attn. They
are imported lazily: importing this package imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.flash.ops import flash_attention as flash_attention
    from .attention.lse_first.ops import attention_lse as attention_lse
    from .attention.lse_first.ops import lse_first_attention as lse_first_attention
    from .attention.reference import reference_attention as reference_attention
    from .cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .masked_softmax import scaled_masked_softmax as scaled_masked_softmax
    from .moe.expert_mlps import expert_mlp as expert_mlp
    from .moe.grouped_matmul import grouped_matmul as grouped_matmul
    from .moe.routing import topk_routing as topk_routing
    from .norm_functions import layer_norm as layer_norm
    from .norm_functions import rms_norm as rms_norm
    from .rope import apply_rotary as apply_rotary
    from .rope import rotary_table as rotary_table

_MODULES = {
    "apply_rotary": "rope",
    "attention_lse": "attention.lse_first.ops",
    "expert_mlp": "moe.expert_mlps",
    "flash_attention": "attention.flash.ops",
    "grouped_matmul": "moe.grouped_matmul",
    "layer_norm": "norm_functions",
    "linear_cross_entropy": "cross_entropy",
    "lse_first_attention": "attention.lse_first.ops",
    "reference_attention": "attention.reference",
    "rms_norm": "norm_functions",
    "rotary_table": "rope",
    "scaled_masked_softmax": "masked_softmax",
    "topk_routing": "moe.routing",
}
"""The module of each public function."""
__all__ = list(_MODULES)  # pyrefly: ignore[unresolvable-dunder-all]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
