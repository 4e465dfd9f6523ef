"""Greedy choice of the next token: the largest logit of a row, and whether it is finite, in one kernel."""

# Triton's types are not those that pyright knows:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
from torch import Tensor

from .launch import jit, next_power_of_2, tl, triton_runs_on

# ---------------------------------------------------------------- reference


def reference_greedy_token(logits: Tensor, diverged: int) -> Tensor:
    """Reference of `greedy_token` in plain PyTorch, for any device and floating dtype."""
    largest, token = logits.max(dim=-1)
    return torch.where(largest.abs() < math.inf, token, diverged)  # fewer kernels than `isfinite`


# ---------------------------------------------------------------- Triton


@jit
def greedy_token_kernel(logits_pointer, token_pointer, vocab, stride, diverged, BLOCK: tl.constexpr):
    """Each program chooses the token of one row. logits: (rows, vocab), rows `stride` apart. token: int64 (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        n = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_pointer + row * stride + n, mask=n < vocab, other=float("-inf")).to(tl.float32)
        better = (logit > largest) | (logit != logit)  # a NaN stays
        largest = tl.where(better, logit, largest)
        token = tl.where(better, n, token)
    has_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    maximum = tl.max(largest, 0)
    first = tl.min(tl.where(largest == maximum, token, vocab), 0)
    finite = (tl.abs(maximum) < float("inf")) & (not has_nan)
    tl.store(token_pointer + row, tl.where(finite, first, diverged).to(tl.int64))


def triton_greedy_token(logits: Tensor, diverged: int) -> Tensor:
    """Launch the kernel; see `greedy_token`."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(1 << 13, next_power_of_2(vocab))
    greedy_token_kernel[(rows,)](logits, token, vocab, logits.stride(0), diverged, BLOCK=block, num_warps=32)
    return token


# ---------------------------------------------------------------- public function


def greedy_token(logits: Tensor, diverged: int) -> Tensor:
    """Return the index of the largest logit of each row, int64 (rows,); `diverged` where it is not finite.

    Args:
        logits: (rows, vocab), any floating dtype.
        diverged: a negative number.
    """
    return (triton_greedy_token if triton_runs_on(logits) else reference_greedy_token)(logits, diverged)
