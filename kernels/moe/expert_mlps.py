"""Expert MLPs: every token through its top-k experts, weighted by the gates and summed."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..activations import FUSED_ACTIVATIONS, NONLINEARITIES
from ..autocast import autocast
from ..dropout import dropout as apply_dropout
from ..launch import triton_runs_on
from .assignments import Assignments, draw_assignment_rows, sorted_assignments
from .eager_experts import eager_experts, padded_experts
from .fused_experts import fused_experts
from .grouped_matmul import Backend, unsupported_reason
from .permute import use_triton
from .reference_experts import ExpertWeights, sequential_experts

Implementation = Literal["auto", "sequential", "grouped_mm", "triton", "padded"]

_BACKENDS: dict[str, Backend] = {"auto": "auto", "triton": "triton", "grouped_mm": "torch", "sequential": "loop"}


def expert_mlp(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    nonlinearity: str,
    gated: bool,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    kept: Tensor | None = None,
    capacity: int | None = None,
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,
    assignments: Assignments | None = None,
    implementation: Implementation = "auto",
    residual: Tensor | None = None,
) -> Tensor:
    """Return the sum over each token's kept experts e of gate * down_e(dropout(act(up_e(hidden)))).

    T tokens, E experts, k experts per token, h hidden width, f expert FFN width.

    Args:
        hidden: (T, h), any floating dtype; under autocast, cast to its dtype with the weights.
        experts: experts of each token, (T, k) int64, without duplicates among those that a row keeps.
        gates: weights of these experts, (T, k), fp32 (fp64 with fp64).
        up: (E, f, h), or gated (E, 2 f, h) with the rows [gate | up].
        down: (E, h, f).
        nonlinearity: a name in `kernels.activations.NONLINEARITIES`.
        gated: multiply the activated gate by the up projection.
        up_bias: (E, f), gated (E, 2 f), or None.
        down_bias: (E, h), or None.
        kept: (T, k) bool, False for dropped assignments, which are neither computed nor added; None keeps all.
        capacity: rows computed per expert, for `padded` only; assignments beyond it are dropped.
        dropout: dropout probability after the nonlinearity; 0 outside training.
        dropout_rows: what the masks of the assignments are functions of, int64 (T, k); None draws it.
        assignments: `sorted_assignments` of these experts, if they have been sorted; None sorts them.
        implementation: `triton`, our grouped matmuls, `grouped_mm`, torch's (bf16, sm_90 or later; ours where there is
            a bias, which torch's do not add), and `padded`, batched matmuls of `capacity` rows, do not synchronize with
            the host; `sequential`, the reference, loops over the experts and reads counts on the host. `auto`:
            `grouped_mm` where it runs on CUDA, the fastest there, else `triton` where supported, else `sequential`.
        residual: tensor that the result is added to, (T, h), of a dtype no narrower than `hidden`, or None. The fused
            implementation adds it before rounding.

    Returns:
        (T, h) in the dtype of `hidden`, with `residual` in the wider of both; accumulated over the k experts in fp32
        (fp64 with fp64). Differentiable once with respect to `hidden`, `gates`, `residual`, weights and biases; unused
        experts get zero gradients.

    Raises:
        ValueError: shapes or dtypes do not match, or an argument is invalid.
    """
    hidden, up, down, up_bias, down_bias = autocast(hidden, up, down, up_bias, down_bias)
    weights = ExpertWeights(up, down, up_bias, down_bias, nonlinearity, gated)
    _check_shapes(hidden, experts, gates, weights, kept)
    _check_choices(nonlinearity, capacity, dropout, implementation)
    if implementation == "auto" and not triton_runs_on(hidden):
        implementation = "sequential"
    dropout_mask = None
    if dropout:
        rows = draw_assignment_rows(experts) if dropout_rows is None else dropout_rows
        ones = hidden.new_ones(*experts.shape, down.shape[-1])
        dropout_mask = apply_dropout(ones, dropout, rows.new_zeros(2), rows.flatten())
    if capacity is not None:
        output = padded_experts(
            hidden, experts, gates, weights, kept=kept, dropout_mask=dropout_mask, capacity=capacity
        )
    # reading counts would break the graph under torch.compile, where the loop runs inside a custom op instead
    elif implementation == "sequential" and not torch.compiler.is_compiling():
        output = sequential_experts(hidden, experts, gates, weights, kept=kept, dropout_mask=dropout_mask)
    else:
        backend = _BACKENDS[implementation]
        reason = unsupported_reason(backend, hidden, *up.shape[1:], down.shape[2])
        if reason:
            raise ValueError(f"`implementation` ({implementation}) {reason}; `sequential` runs everywhere.")
        assignments = assignments or sorted_assignments(experts, len(up), kept)
        if runs_fused(hidden, nonlinearity, dropout, implementation):
            return fused_experts(hidden, experts, gates, weights, assignments, backend=backend, residual=residual)
        output = eager_experts(hidden, gates, weights, assignments, dropout_mask=dropout_mask, backend=backend)
    return output if residual is None else residual + output


def runs_fused(hidden: Tensor, nonlinearity: str, dropout: float, implementation: Implementation) -> bool:
    """Return True if `expert_mlp` of tokens like these is `fused_experts`; the arguments are as there."""
    if implementation in ("sequential", "padded") or dropout or nonlinearity not in FUSED_ACTIVATIONS:
        return False
    return triton_runs_on(hidden) if implementation == "auto" else use_triton(hidden)


def _check_shapes(hidden: Tensor, experts: Tensor, gates: Tensor, weights: ExpertWeights, kept: Tensor | None) -> None:
    """Raise ValueError naming the argument whose shape or dtype does not match."""
    up, down, up_bias, down_bias, _, gated = weights
    if hidden.ndim != 2 or not hidden.shape[1] or not hidden.is_floating_point():
        raise ValueError(f"`hidden` {tuple(hidden.shape)} of {hidden.dtype} must be (tokens, width), floating point.")
    tokens, width = hidden.shape
    if experts.ndim != 2 or len(experts) != tokens or experts.dtype != torch.int64:
        raise ValueError(f"`experts` {tuple(experts.shape)} of {experts.dtype} must be ({tokens}, k) of int64.")
    if gates.shape != experts.shape or not gates.is_floating_point():
        raise ValueError(
            f"`gates` {tuple(gates.shape)} of {gates.dtype} must be floating point, {tuple(experts.shape)}."
        )
    if kept is not None and (kept.shape != experts.shape or kept.dtype != torch.bool):
        raise ValueError(f"`kept` {tuple(kept.shape)} of {kept.dtype} must be bool, {tuple(experts.shape)}.")
    if down.ndim != 3 or down.shape[1] != width or not len(down):
        raise ValueError(f"`down` {tuple(down.shape)} must be (experts, {width}, ffn width) with at least one expert.")
    count, _, inner = down.shape
    rows = 2 * inner if gated else inner
    for name, tensor, shape in (
        ("up", up, (count, rows, width)),
        ("up_bias", up_bias, (count, rows)),
        ("down_bias", down_bias, (count, width)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"`{name}` {tuple(tensor.shape)} must be {shape}, to match `down` {tuple(down.shape)}.")
    for name, tensor in (("up", up), ("down", down), ("up_bias", up_bias), ("down_bias", down_bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(f"`{name}` ({tensor.dtype}) must have the dtype of `hidden` ({hidden.dtype}).")
    if kept is None and experts.shape[1] > count:
        raise ValueError(f"`experts` has {experts.shape[1]} experts per token, but there are only {count}.")


def _check_choices(nonlinearity: str, capacity: int | None, dropout: float, implementation: Implementation) -> None:
    """Raise ValueError naming the argument that is unknown or conflicts with another."""
    if nonlinearity not in NONLINEARITIES:
        raise ValueError(f"`nonlinearity` ({nonlinearity}) must be one of {', '.join(NONLINEARITIES)}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` ({dropout}) must be at least 0 and less than 1.")
    if implementation not in get_args(Implementation):
        raise ValueError(f"`implementation` ({implementation}) must be one of {', '.join(get_args(Implementation))}.")
    if (capacity is None) == (implementation == "padded"):
        raise ValueError(f"`capacity` ({capacity}) must be set if and only if `implementation` is 'padded'.")
    if capacity is not None and capacity < 1:
        raise ValueError(f"`capacity` ({capacity}) must be at least 1 row.")
