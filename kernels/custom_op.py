"""Definition of custom operations, which torch.compile leaves whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def custom_op(name: str, *, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Define an operation by a function that changes no argument; return it as torch calls it (`torch.ops`).

    Like `torch.library.custom_op`, for less than half of the host's time in each call (5 instead of 13 us): only an
    operation with a backward pass has a kernel for autograd, and that no result shares memory with an argument is left
    to the tests (`torch.library.opcheck`). Fake results and backward passes are registered by name, with
    `torch.library.register_fake` and `register_autograd`.

    Args:
        name: `stoker::NAME`.
        schema: arguments and results; None for those of the function's annotations.

    Raises:
        RuntimeError: in a call, a gradient is wanted of an operation without a backward pass, as by a second backward
            pass.
    """

    def define(function: Callable[..., Any]) -> Any:
        def run(*arguments: Any) -> Any:
            # autograd.Function and the backward pass of a registered one run without gradients
            if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments):
                raise RuntimeError(f"{name} has no backward pass")
            return function(*arguments)

        types = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, types, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", run)
        namespace, operation = name.split("::")
        return getattr(getattr(torch.ops, namespace), operation).default

    return define
