"""Triton kernels with PyTorch references, custom ops and public functions, one operation per file.

Public functions are imported lazily: importing this package imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import Any

_PUBLIC = ("attention_lse", "flash_attention", "lse_first_attention", "reference_attention", "scaled_masked_softmax")
__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    match name:
        case "attention_lse":
            from .attention.lse_first.ops import attention_lse as function
        case "flash_attention":
            from .attention.flash.ops import flash_attention as function
        case "lse_first_attention":
            from .attention.lse_first.ops import lse_first_attention as function
        case "reference_attention":
            from .attention.reference import reference_attention as function
        case "scaled_masked_softmax":
            from .masked_softmax import scaled_masked_softmax as function
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return function


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
