"""Muon: orthogonalized momentum for hidden matrices, AdamW for all other parameters.

Sources: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) and Liu et al. 2025 (arXiv 2502.16982), with the
constants of torch.optim.Muon. Embeddings, output head, norms and biases use AdamW, as both papers advise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...models.parallel.partition import RankPart
from .adamw import AdamW
from .base_optimizer import ShardUpdate
from .update_arithmetic import arithmetic_dtype, copy_unless_skipped, write_weight, zero_state

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- a X + (b A + c A A) X with A = X X^T: steepest at 0 (Jordan et al. 2024)."""
EPS = 1e-7


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for parameters updated by Muon: matrices except embeddings, relative position biases and the head.

    Includes the stacked matrices of experts, but not their stacked biases.
    """
    parts = name.split(".")
    tables = any(part in ("head", "score_positions", "cross_positions") or part.endswith("embedding") for part in parts)
    return len(shape) in (2, 3) and not tables and not name.endswith("bias")


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalize a matrix approximately by Newton-Schulz iteration: singular values end between about 0.7 and 1.2.

    Args:
        matrix: (rows, columns) or batched (matrices, rows, columns); computed in its dtype.
        steps: number of iterations.
    """
    a, b, c = COEFFICIENTS
    is_stack, is_tall = matrix.ndim == 3, matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    norm = wide.flatten(1).norm(dim=1)[:, None, None] if is_stack else wide.norm()
    wide = wide / norm.clamp(min=EPS)
    add_product = torch.baddbmm if is_stack else torch.addmm
    for _ in range(steps):
        gram = wide @ wide.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, polynomial, wide, beta=a)
    return wide.mT if is_tall else wide


def rate_factor(rule: str, rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix.

    Args:
        rule: `match_rms_adamw`: match the RMS of AdamW's update, so that AdamW's learning rates can be used;
            `original`: sqrt(max(1, rows / columns)).
        rows, columns: shape of the matrix.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(AdamW):
    """Muon for the hidden matrices of a model, AdamW for the rest, with one learning rate.

    Each projection of a fused weight (`fused`) is orthogonalized separately, as if it were a weight of its own:
    otherwise a projection with large gradients would suppress the singular values of the others.

    With sharded parameters, and under tensor parallelism, each matrix is gathered, orthogonalized on every rank, and
    each rank updates its local shard; experts are sharded by whole matrices and need no gathering. The iteration is in
    bf16, as in torch, and in fp64 for fp64 weights.

    Args:
        lr: learning rate until `set_lr` is called.
        momentum: decay of the running mean of gradients.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: see `rate_factor`.
        fused: rows of each projection of a fused weight, by suffix of the parameter name.
        adamw: arguments of `AdamW`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        fused: Mapping[str, tuple[int, ...]] | None = None,
        **adamw: Any,
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.ns_steps = ns_steps
        self.adjust_lr_fn = adjust_lr_fn
        super().__init__(named_parameters, lr=lr, fused=fused, **adamw)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the momentum buffer of a hidden matrix, or AdamW's moments; zero."""
        if is_hidden_matrix(name, shape):
            return {"momentum_buffer": zero_state(main)}
        return super().initial_state(name, main, shape)

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return False for hidden matrices, else as in AdamW."""
        return not is_hidden_matrix(name, shape) and super().is_elementwise(name, shape)

    def supports_part(self, name: str, shape: tuple[int, ...], part: RankPart) -> bool:
        """Return True, except for split matrices of experts, which are not gathered."""
        return part.partition is None or part.partition.dim == 0 or len(shape) < 3

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update matrices one after the other, then the rest with AdamW; see `Optimizer.update`."""
        rest: list[ShardUpdate] = []
        for shard in shards:
            if "momentum_buffer" in shard.state:
                self._update_matrix(group, shard, scale)
            else:
                rest.append(shard)
        super().update(group, rest, scale)

    def _update_matrix(self, group: dict[str, Any], shard: ShardUpdate, scale: Tensor) -> None:
        live = scale >= 0
        parameter, state, main = shard.parameter, shard.state, shard.state["main"]
        dtype = arithmetic_dtype(main)
        gradient = shard.gradient.to(dtype) * scale.to(dtype)
        mean = torch.lerp(state["momentum_buffer"].to(dtype), gradient, 1 - self.momentum)
        copy_unless_skipped(state["momentum_buffer"], mean, live)
        direction = torch.lerp(gradient, mean, self.momentum) if self.nesterov else mean
        narrow = direction.to(torch.float64 if dtype == torch.float64 else torch.bfloat16)

        is_stack = parameter.ndim == 3
        full = narrow if is_stack else self._gather(narrow, shard)
        steps = [
            orthogonalize(part, self.ns_steps).to(dtype) * rate_factor(self.adjust_lr_fn, *part.shape[-2:])
            for part in full.split(self._parts(shard.name, full.shape[-2]), dim=-2)
        ]
        step = torch.cat(steps, dim=-2)
        if not is_stack:
            place = self.sharding.placed_shard(shard.name, parameter).with_local(torch.empty_like(main, dtype=dtype))
            place.copy_from_full(step)
            step = place.local
        lr, weight_decay = group["lr"], group["weight_decay"]
        write_weight(shard.weight, main, main.to(dtype) * (1 - lr * weight_decay) - lr * step, live)

    def _gather(self, local: Tensor, shard: ShardUpdate) -> Tensor:
        """Return the full matrix: the rows of all shards, then all parts, which are summed with zeros elsewhere."""
        rows = self.sharding.gather_rows(local, shard.parameter.shape[-2])
        part = self.sharding.parts.get(shard.name)
        if part is None or part.partition is None:
            return rows
        dim, start = part.partition.dim, 0
        full = rows.new_zeros(part.full_shape(rows.shape))
        for held in part.ranges():
            if held.replica == 0:
                full.narrow(dim, held.start, held.size).copy_(rows.narrow(dim, start, held.size))
            start += held.size
        return self.sharding.sum_over_parts(full)
