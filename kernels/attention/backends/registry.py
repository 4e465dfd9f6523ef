"""Functions of the attention backends, by name, and detection of the installed software versions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import metadata

import torch
from torch import Tensor

from ...launch import INTERPRETED
from ..backend_support import why_not_te
from ..call_spec import InstalledSoftware
from ..dispatch import BackendSelection
from ..inputs import AttentionInputs
from ..reference import reference_backend
from .flash_attn import FlashAttn
from .lse_first import lse_first
from .sdpa import sdpa_cudnn, sdpa_efficient, sdpa_flash, sdpa_math
from .transformer_engine import TEAttention, import_transformer_engine, te_flash, te_fused, te_unfused
from .triton import triton_attention
from .unfused import UnfusedAttention

AttentionFunction = Callable[[AttentionInputs], Tensor]
"""An attention backend: dense inputs, result like `q`. A fully masked query has output and gradients 0."""

ATTENTION_FUNCTIONS: dict[str, AttentionFunction] = {
    "triton": triton_attention,
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


# ---------------------------------------------------------------- versions


def torch_version() -> tuple[int, int]:
    """Return (major, minor) of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def detect_installed_software(device_type: str = "cpu") -> InstalledSoftware:
    """Detect the software versions of this process.

    Args:
        device_type: for `cuda`, an installed TransformerEngine is imported to check that it works.
    """
    triton, te, flash_attn = (_version(name) for name in ("triton", "transformer-engine", "flash-attn"))
    found = InstalledSoftware(
        torch=torch_version(),
        cudnn=torch.backends.cudnn.version(),
        triton=triton and triton[:2],
        interpreted=INTERPRETED,
        te=te and te[:2],
        flash_attn=flash_attn,
        flash_attn_3=_version("flash-attn-3") is not None,
        flash_attn_4=_version("flash-attn-4") is not None,
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
    )
    if device_type != "cuda" or why_not_te(found) is not None:
        return found
    return replace(found, te_problem=_te_problem())


def _version(distribution: str) -> tuple[int, int, int] | None:
    """Return (major, minor, patch) of an installed distribution without importing it, None if it is missing."""
    try:
        numbers = re.findall(r"\d+", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    major, minor, patch = (int(number) for number in [*numbers, 0, 0, 0][:3])
    return major, minor, patch


@cache
def _te_problem() -> str:
    """Return why the installed TransformerEngine cannot be imported, in one line; empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other frameworks it finds and their missing extensions
            import_transformer_engine()
    except Exception as error:  # any error: built for another torch, a missing library, a failed version check
        message = " ".join(str(error).split())[:160]
        return f"transformer_engine is installed but cannot be imported: {type(error).__name__}: {message}"
    return ""
