"""Functions that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Break a compiled graph around a call: other people's extensions cannot be traced, and wait for the device."""
    return cast("Function", torch.compiler.disable(function))
