"""Exclude functions from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def disable_compile(function: Function) -> Function:
    """Exclude a function from torch.compile: third-party extensions cannot be traced and may synchronize."""
    return cast("Function", torch.compiler.disable(function))
