"""The three stages in plain PyTorch, for tensors the Triton kernels do not support; same interface."""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeated(chunk: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values of a chunk for each query head, in the accumulation dtype."""
    return _wide(chunk).repeat_interleave(q.shape[2] // chunk.shape[2], dim=2)


def _scores(q: Tensor, k: Tensor, shift: int | None, scale: float) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", _wide(q), _repeated(k, q)) * scale
    if shift is None:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(shift + 1)
    return scores.masked_fill_(hidden, float("-inf"))


def _weights(q: Tensor, k: Tensor, lse: Tensor, shift: int | None, scale: float) -> Tensor:
    scores = _scores(q, k, shift, scale)
    return scores.sub_(lse.masked_fill(lse == float("-inf"), float("inf"))[..., None]).exp_()


def lse_of_chunk_(lse: Tensor, q: Tensor, k: Tensor, *, shift: int | None, scale: float, merge: bool) -> None:
    """Stage 1: write the log-sum-exp over a chunk to `lse` (batch, heads, queries), or merge it."""
    chunk_lse = _scores(q, k, shift, scale).logsumexp(dim=-1)
    lse.copy_(torch.logaddexp(lse, chunk_lse) if merge else chunk_lse)


def output_of_chunk_(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, shift: int | None, scale: float, merge: bool
) -> None:
    """Stage 2: write a chunk's contribution to the output to `out` (like q), or add it."""
    contribution = torch.einsum("bhqk,bkhd->bqhd", _weights(q, k, lse, shift, scale), _repeated(v, q))
    out.copy_(out + contribution if merge else contribution)


def delta_of(out: Tensor, out_gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None) -> Tensor:
    """Return sum(out * dO) over the head minus the gradient of the lse, (batch, heads, queries)."""
    delta = (_wide(out) * _wide(out_gradient)).sum(dim=-1).transpose(1, 2)
    return (delta if lse_gradient is None else delta - lse_gradient).contiguous()


def gradients_of_chunk_(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_gradient: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    shift: int | None,
    scale: float,
    merge: bool,
) -> None:
    """Stage 3: write or add a chunk's contribution to `dq`, and write the gradients of the chunk to `dk` and `dv`."""
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    weights, gradient = _weights(q, k, lse, shift, scale), _wide(out_gradient)
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", weights, gradient).unflatten(2, groups).sum(dim=3))
    weights_gradient = torch.einsum("bqhd,bkhd->bhqk", gradient, _repeated(v, q))
    score_gradient = weights * (weights_gradient - delta[..., None]) * scale
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", score_gradient, _wide(q)).unflatten(2, groups).sum(dim=3))
    contribution = torch.einsum("bhqk,bkhd->bqhd", score_gradient, _repeated(k, q))
    dq.copy_(dq + contribution if merge else contribution)
