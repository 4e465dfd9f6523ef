"""Detection of the installed software versions; the backends are not imported, which takes seconds."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import cache
from importlib import metadata

import torch

from ..launch import INTERPRETED
from .call_spec import InstalledSoftware
from .te_support import why_not_te


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


@cache
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
        from .backends.transformer_engine import import_transformer_engine

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other frameworks it finds and their missing extensions
            import_transformer_engine()
    except Exception as error:  # any error: built for another torch, a missing library, a failed version check
        message = " ".join(str(error).split())[:160]
        return f"transformer_engine is installed but cannot be imported: {type(error).__name__}: {message}"
    return ""
