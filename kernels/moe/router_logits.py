"""Router logits in fp32 without fp32 copies of 16-bit tokens and weights.

The product of two 16-bit numbers is exact in fp32, so a 16-bit matmul with fp32 accumulation and output equals a matmul
of fp32 copies up to the order of summation. In the backward pass the fp32 gradient of the logits is split into the sum
of two 16-bit numbers, which together keep 16 (bf16) or 22 (fp16) of its 24 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op
from ..launch import supports_fp32_output


def reference_router_logits(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference: (T, h) times (E, h) transposed, in `dtype`."""
    return F.linear(tokens.to(dtype), weight.to(dtype))


def _mm_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply 16-bit matrices with fp32 accumulation and output."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@custom_op("stoker::router_logits")
def _router_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    return _mm_fp32(tokens, weight.t())


@torch.library.register_fake("stoker::router_logits")
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weight.shape[0], dtype=torch.float32)


@custom_op("stoker::router_logits_backward")
def _router_logits_backward(gradient: Tensor, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    high = gradient.to(tokens.dtype)
    low = (gradient - high).to(tokens.dtype)
    both = torch.cat([high, low], dim=1)
    weight_gradients = _mm_fp32(both.t(), tokens)
    weight_gradient = weight_gradients[: len(weight)] + weight_gradients[len(weight) :]
    return both @ torch.cat([weight, weight]), weight_gradient.to(weight.dtype)


@torch.library.register_fake("stoker::router_logits_backward")
def _(gradient: Tensor, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(tokens.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return _router_logits_backward(gradient, *ctx.saved_tensors)


torch.library.register_autograd("stoker::router_logits", _backward, setup_context=_save)


def router_logits(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return tokens times the router's weight, in `dtype`.

    Args:
        tokens: (T, h).
        weight: (E, h).
        dtype: dtype of result and accumulation.

    Returns:
        (T, E), differentiable once.
    """
    narrow = tokens.dtype == weight.dtype and tokens.dtype in (torch.bfloat16, torch.float16)
    aligned = supports_fp32_output(*weight.shape)
    if narrow and aligned and dtype == torch.float32 and tokens.is_cuda:
        return _router_logits(tokens, weight)
    return reference_router_logits(tokens, weight, dtype)
