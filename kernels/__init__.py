"""Triton kernels with PyTorch references, custom ops and public functions, one operation per file.

Public functions are imported lazily: importing this package imports neither torch nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "attention_lse": ".attention.lse_first.ops",
    "flash_attention": ".attention.flash.ops",
    "lse_first_attention": ".attention.lse_first.ops",
    "reference_attention": ".attention.reference",
    "scaled_masked_softmax": ".masked_softmax",
}

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
