"""Differentiable collectives of tensor and sequence parallelism (Megatron-LM, arXiv 1909.08053 and 2205.05198).

Functional collectives, which torch.compile traces: an operation starts the communication, `wait_tensor` ends it.
Activations are (batch, tokens, channels); sharded over tokens they are (1, batch * tokens / ranks, channels), the
rank's share of the flattened tokens, so that no collective needs a transposed copy.

| function | forward | backward |
|---|---|---|
| `reduce_partial` | all-reduce | identity |
| `reduce_scatter_tokens` | reduce-scatter | all-gather |
| `shard_tokens` | the rank's share | all-gather |
| `unshard_tokens` | all-gather | the rank's share |
| `column_linear`, `lora_column_linear` | (all-gather,) product | product, (reduce-scatter or) all-reduce |
| `row_linear` | product, (reduce-scatter or) all-reduce | (all-gather,) product |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.autocast import autocast
from ...kernels.custom_op import custom_op
from ...kernels.lora.lora_linear import fused_lora_linear, fused_lora_linear_backward
from .overlap import gather_and_multiply, multiply_and_scatter
from .partition import Partition, RankPart

_ops: Any = torch.ops._c10d_functional


@dataclass(slots=True)
class TensorParallel:
    """The tensor-parallel ranks of this process.

    Attributes:
        rank: rank in the group.
        size: ranks of the group.
        group: name of the process group.
        sequence: the residual stream is sharded over tokens in training and evaluation (`sequence_parallel`).
        overlap_gather: all-gathers run in parts beside the products that need them (`parallel.overlap`).
        overlap_scatter: reduce-scatters run beside the products that they sum.
        shards_tokens: it is sharded in the current forward; generation has too few tokens.
        data_rank: index of this rank among those that hold the same part of the model.
        data_ranks: number of those.
    """

    rank: int
    size: int
    group: str
    sequence: bool = False
    overlap_gather: bool = False
    overlap_scatter: bool = False
    shards_tokens: bool = False
    data_rank: int = 0
    data_ranks: int = 1

    def part(self, partition: Partition | None) -> RankPart:
        """Return this rank's part of a parameter that the ranks split so; None for a replicated one."""
        return RankPart(partition, self.rank, self.size, self.data_rank, self.data_ranks)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, of which autograd sees nothing."""
        return _wait(_ops.all_reduce(tensor, "sum", self.group))

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, (ranks, *shape), of which autograd sees nothing."""
        gathered = _wait(_ops.all_gather_into_tensor(tensor.contiguous().view(-1), self.size, self.group))
        return gathered.view(self.size, *tensor.shape)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        return _wait(_ops.all_reduce(tensor, "max", self.group))


def _wait(tensor: Tensor) -> Tensor:
    return _ops.wait_tensor(tensor)


def gather_tokens(tokens: Tensor, size: int, group: str) -> Tensor:
    """Start an all-gather of (1, tokens, channels) along the tokens."""
    return _ops.all_gather_into_tensor(tokens[0].contiguous(), size, group)


def gather_again(tokens: Tensor, gradient: Tensor, size: int, group: str) -> Tensor:
    """Start an all-gather of a backward pass that repeats one of the forward pass.

    The compiler would merge the two and save what is gathered; one that depends on the gradient stays where it is.
    """
    if torch.compiler.is_compiling():
        return _gather_in_backward(tokens[0].contiguous(), gradient, size, group)
    return gather_tokens(tokens, size, group)


@custom_op("stoker::all_gather_in_backward")
def _gather_in_backward(tokens: Tensor, gradient: Tensor, size: int, group: str) -> Tensor:
    return _ops.all_gather_into_tensor(tokens, size, group)


@torch.library.register_fake("stoker::all_gather_in_backward")
def _(tokens: Tensor, gradient: Tensor, size: int, group: str) -> Tensor:
    return tokens.new_empty((size * tokens.shape[0], *tokens.shape[1:]))


def scatter_tokens(tokens: Tensor, size: int, group: str) -> Tensor:
    """Start a reduce-scatter of (..., channels) along the flattened tokens."""
    return _ops.reduce_scatter_tensor(tokens.flatten(0, -2).contiguous(), "sum", size, group)


def _share(tokens: Tensor, rank: int, size: int) -> Tensor:
    """Return the rank's share of the flattened tokens of (..., channels), as (1, tokens, channels)."""
    flat = tokens.flatten(0, -2)
    count = flat.shape[0] // size
    return flat[None, rank * count : (rank + 1) * count]


SharedRows = tuple[int, int, int]
"""First local row, number of rows, and ranks with the same ones."""


class _ReducePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: str) -> Tensor:
        return _wait(_ops.all_reduce(partial, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, size: int, group: str) -> Tensor:
        ctx.shape, ctx.size, ctx.group = partial.shape, size, group
        return _wait(scatter_tokens(partial, size, group))[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _wait(gather_tokens(gradient, ctx.size, ctx.group)).view(ctx.shape), None, None


class _ShardTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rank: int, size: int, group: str) -> Tensor:
        ctx.shape, ctx.size, ctx.group = tokens.shape, size, group
        return _share(tokens, rank, size).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return _wait(gather_tokens(gradient, ctx.size, ctx.group)).view(ctx.shape), None, None, None


class _UnshardTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rank: int, size: int, group: str) -> Tensor:
        ctx.rank, ctx.size = rank, size
        return _wait(gather_tokens(tokens, size, group))[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return _share(gradient, ctx.rank, ctx.size), None, None, None


class _ColumnLinear(torch.autograd.Function):
    """A product whose input gradient is a partial sum; communication runs beside the products of the backward pass.

    Sharded over tokens, the input is gathered in both passes, so that only the rank's share of it is saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rank: int,
        size: int,
        group: str,
        gathers: bool,
        overlap: bool,
        shared: Sequence[SharedRows],
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rank, ctx.size, ctx.group, ctx.gathers, ctx.shared = rank, size, group, gathers, shared
        if gathers and overlap:
            _, output = gather_and_multiply(hidden[0], weight.t(), group)
            return output[None] if bias is None else output[None] + bias
        whole = _wait(gather_tokens(hidden, size, group))[None] if gathers else hidden
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        whole = gather_again(hidden, gradient, ctx.size, ctx.group) if ctx.gathers and needs_weight else None
        hidden_gradient = weight_gradient = bias_gradient = None
        if needs_input:
            partial = gradient @ weight
            if ctx.gathers:
                hidden_gradient = scatter_tokens(partial, ctx.size, ctx.group)
            else:
                hidden_gradient = _ops.all_reduce(partial, "sum", ctx.group)
        if needs_weight:
            inputs = hidden.flatten(0, -2) if whole is None else _wait(whole)
            weight_gradient = gradient.flatten(0, -2).t() @ inputs
            weight_gradient = sum_rows(weight_gradient, ctx.shared, ctx.rank, ctx.size, ctx.group)
        if needs_bias:
            bias_gradient = gradient.flatten(0, -2).sum(dim=0)
            bias_gradient = sum_rows(bias_gradient, ctx.shared, ctx.rank, ctx.size, ctx.group)
        if hidden_gradient is not None:
            hidden_gradient = _wait(hidden_gradient).view(hidden.shape)
        return hidden_gradient, weight_gradient, bias_gradient, *(None,) * 6


def sum_rows(gradient: Tensor, shared: Sequence[SharedRows], rank: int, size: int, group: str) -> Tensor:
    """Sum the rows that several ranks share: each writes its own into its place among all, and these are summed."""
    for start, count, copies in shared:
        rows = gradient[start : start + count]
        places = rows.new_zeros((size // copies, *rows.shape))
        places[rank // copies] = rows
        total = _wait(_ops.all_reduce(places, "sum", group))[rank // copies]
        gradient = torch.cat([gradient[:start], total, gradient[start + count :]])
    return gradient


class _SumSharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor, rank: int, size: int, group: str, shared: Sequence[SharedRows]) -> Tensor:
        ctx.rank, ctx.size, ctx.group, ctx.shared = rank, size, group, shared
        return vector.view_as(vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        return sum_rows(gradient, ctx.shared, ctx.rank, ctx.size, ctx.group), None, None, None, None


def sum_shared_gradient(vector: Tensor, shared: Sequence[SharedRows], ranks: TensorParallel) -> Tensor:
    """Return a parameter (rows, ...) whose gradient is summed over the ranks that share some of its rows."""
    if not shared:
        return vector
    return _SumSharedGradient.apply(vector, ranks.rank, ranks.size, ranks.group, shared)


def reduce_partial(partial: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of the ranks' partial results."""
    return _ReducePartial.apply(partial, ranks.group)


def reduce_scatter_tokens(partial: Tensor, ranks: TensorParallel) -> Tensor:
    """Return this rank's share (1, batch * tokens / ranks, channels) of the sum of (batch, tokens, channels)."""
    return _ReduceScatterTokens.apply(partial, ranks.size, ranks.group)


def shard_tokens(tokens: Tensor, ranks: TensorParallel) -> Tensor:
    """Return this rank's share of tokens (batch, tokens, channels) that all ranks have.

    Raises:
        ValueError: they do not split evenly.
    """
    batch, length = tokens.shape[:2]
    if batch * length % ranks.size:
        raise ValueError(
            f"`tokens` ({batch} x {length}, with those of a prompt) must be a multiple of the {ranks.size} ranks of "
            "sequence parallelism; pad the samples."
        )
    return _ShardTokens.apply(tokens, ranks.rank, ranks.size, ranks.group)


def unshard_tokens(tokens: Tensor, ranks: TensorParallel, batch: int) -> Tensor:
    """Return (batch, tokens, channels) from the ranks' shares; all ranks must then have the same gradient."""
    whole: Any = _UnshardTokens.apply(tokens, ranks.rank, ranks.size, ranks.group)
    return whole.view(batch, -1, whole.shape[-1])


def column_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ranks: TensorParallel,
    *,
    gathers: bool,
    shared: Sequence[SharedRows] = (),
) -> Tensor:
    """Return the product of a weight whose rows are split over the ranks.

    Args:
        hidden: (batch, tokens, in), the same on all ranks, or with `gathers` the rank's share of the tokens.
        weight: (out / ranks, in).
        bias: (out / ranks,), or None.
        gathers: all-gather the tokens first.
        shared: rows that several ranks hold: each computes with them, and the gradient of all is summed.

    Returns:
        (batch, tokens, out / ranks), with `gathers` (1, batch * tokens, out / ranks).
    """
    tensors = autocast(hidden, weight, bias)
    place = ranks.rank, ranks.size, ranks.group
    return _ColumnLinear.apply(*tensors, *place, gathers, ranks.overlap_gather, shared)


class _OverlappedRowLinear(torch.autograd.Function):
    """A product and the reduce-scatter of its result, at least one of whose collectives overlaps with its product."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, size: int, group: str, overlap_gather: bool, overlap_scatter: bool
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.size, ctx.group, ctx.overlap_gather = size, group, overlap_gather
        if overlap_scatter:
            return multiply_and_scatter(hidden.flatten(0, -2), weight.t(), group)[None]
        return _wait(scatter_tokens(F.linear(hidden, weight), size, group))[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight = ctx.saved_tensors
        if ctx.overlap_gather:
            whole, hidden_gradient = gather_and_multiply(gradient[0], weight, ctx.group)
        else:
            whole = _wait(gather_tokens(gradient, ctx.size, ctx.group))
            hidden_gradient = whole @ weight
        weight_gradient = whole.t() @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return hidden_gradient.view(hidden.shape), weight_gradient, *(None,) * 4


def row_linear(hidden: Tensor, weight: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum over the ranks of the products of a weight whose columns are split over them.

    Args:
        hidden: (batch, tokens, in / ranks).
        weight: (out, in / ranks).
        ranks: the tensor-parallel ranks.

    Returns:
        (batch, tokens, out), or the rank's share of the tokens where the residual stream is sharded.
    """
    if ranks.shards_tokens and (ranks.overlap_gather or ranks.overlap_scatter):
        tensors = autocast(hidden, weight)
        overlap = ranks.overlap_gather, ranks.overlap_scatter
        return _OverlappedRowLinear.apply(*tensors, ranks.size, ranks.group, *overlap)
    return sum_partial(F.linear(hidden, weight), ranks)


def sum_partial(partial: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of the ranks' partial results, or of the rank's share of the tokens where these are sharded."""
    return (reduce_scatter_tokens if ranks.shards_tokens else reduce_partial)(partial, ranks)


# ---------------------------------------------------------------- LoRA


class _LoRAColumnLinear(torch.autograd.Function):
    """`_ColumnLinear` of a frozen weight with a LoRA update, whose share of the input gradient joins the same sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
        parts: Sequence[int],
        rank: int,
        size: int,
        group: str,
        gathers: bool,
        shared: Sequence[SharedRows],
    ) -> Tensor:
        whole = _wait(gather_tokens(hidden, size, group)) if gathers else hidden.flatten(0, -2).contiguous()
        output, low = fused_lora_linear(whole, None, None, None, weight, bias, lora_a, lora_b, scale, list(parts))
        ctx.save_for_backward(hidden, weight, lora_a, lora_b, low)
        ctx.scale, ctx.parts, ctx.shared = scale, parts, shared
        ctx.rank, ctx.size, ctx.group, ctx.gathers = rank, size, group, gathers
        return output[None] if gathers else output.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, lora_a, lora_b, low = ctx.saved_tensors
        whole = hidden.flatten(0, -2)
        if ctx.gathers:
            whole = _wait(gather_again(hidden, gradient, ctx.size, ctx.group))
        gradient = gradient.flatten(0, -2).contiguous()
        needs_input = ctx.needs_input_grad[0]
        partial, a_gradient, b_gradient = fused_lora_linear_backward(
            gradient, whole, None, None, weight, lora_a, lora_b, low, ctx.scale, list(ctx.parts), needs_input
        )
        hidden_gradient = None
        if needs_input and ctx.gathers:
            hidden_gradient = _wait(scatter_tokens(partial, ctx.size, ctx.group)).view(hidden.shape)
        elif needs_input:
            hidden_gradient = _wait(_ops.all_reduce(partial, "sum", ctx.group)).view(hidden.shape)
        b_gradient = sum_rows(b_gradient, ctx.shared, ctx.rank, ctx.size, ctx.group)
        return hidden_gradient, None, None, a_gradient, b_gradient, *(None,) * 7


def lora_column_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    ranks: TensorParallel,
    *,
    scale: float,
    parts: Sequence[int],
    gathers: bool,
    shared: Sequence[SharedRows] = (),
) -> Tensor:
    """Return `column_linear` with a LoRA update (`kernels.lora.lora_linear`); the weight and the bias are frozen.

    Args:
        hidden, weight, bias, ranks, gathers, shared: as in `column_linear`; `shared` are rows of `lora_b` too.
        lora_a: (parts * r, in), the same on all ranks; its gradient is this rank's share of a sum.
        lora_b: (out / ranks, r).
        scale: factor of the update.
        parts: this rank's rows of each projection of the weight.

    Returns:
        As `column_linear`.
    """
    tensors = autocast(hidden, weight, bias, lora_a, lora_b)
    place = ranks.rank, ranks.size, ranks.group
    return _LoRAColumnLinear.apply(*tensors, scale, tuple(parts), *place, gathers, shared)
