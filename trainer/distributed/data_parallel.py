"""The data axes of a run: what every layout offers to the trainer, and which class a layout is.

Gradients are summed over ranks, never averaged: every rank divides its losses by the number of target tokens of the
whole global batch, so the sum is the gradient of one process, however the targets are spread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.build import LanguageModel, stacks_of
from ..config.parameter_layout import DataLayout
from ..optim.base_optimizer import Optimizer
from ..utils.local_shard import Piece, piece_of


class DataParallel:
    """A model on the ranks of a run.

    Args:
        layout: what to cut and when to communicate.
        shard_group: the ranks that hold different rows.

    Attributes:
        takes_gradients: gradients are added up and summed over ranks while the backward pass runs, so that the caller
            has nothing to accumulate.
    """

    takes_gradients = False

    def __init__(self, layout: DataLayout, shard_group: dist.ProcessGroup | None) -> None:
        self.layout = layout
        self._shard_group = shard_group

    def cut(self, model: LanguageModel) -> None:
        """Prepare a model, on the meta device or with all its weights, before its optimizer is made."""
        raise NotImplementedError

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy what this rank holds of a whole parameter."""
        raise NotImplementedError

    def piece_of(self, tensor: Tensor) -> Piece:
        """The rows of a parameter, or of its gradient, that this rank updates."""
        return piece_of(tensor)

    def attach(self, model: LanguageModel, optimizer: Optimizer) -> None:
        """Get to know the model, now with its weights, and its optimizer; once, before the first step."""

    def before_micro_batch(self, *, first: bool, last: bool) -> None:
        """Say which micro batch of the step comes."""

    def before_update(self) -> None:
        """Make sure that the gradients are summed."""

    def after_update(self) -> None:
        """Bring weights that other ranks have updated here, where this layout keeps them."""

    def give_back(self) -> None:
        """Drop whole weights that this layout does not keep; after an evaluation."""

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """How an optimizer learns of the rows it does not hold: arguments of `optim.base.Optimizer`."""
        if self.layout.shards == 1:
            return {}
        return {
            "sum_over_shards": self.sum_over_shards,
            "gather_rows": self.gather_rows,
            "piece_of": self.piece_of,
        }

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """Add a tensor up, in place, over the ranks that hold the other rows."""
        dist.all_reduce(tensor, group=self._shard_group)
        return tensor

    def gather_rows(self, local: Tensor, rows: int) -> Tensor:
        """All rows of a tensor of which every shard holds its own, in order.

        Args:
            local: this rank's rows; as `torch.chunk` cuts them, the last ranks may have fewer or none.
            rows: of the whole tensor.
        """
        shards = self.layout.shards
        size = -(-rows // shards)
        padded = local.new_zeros(size, *local.shape[1:])
        padded[: local.shape[0]] = local
        whole = local.new_empty(size * shards, *local.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self._shard_group)
        return whole[:rows]


def units(model: LanguageModel) -> list[list[nn.Parameter]]:
    """The parameters that are trained, in groups that are communicated together: embeddings, each layer, the rest."""
    tables = [module for name, module in model.named_children() if name.endswith("embedding")]
    before = [parameter for table in tables for parameter in table.parameters()]
    layers = [list(layer.parameters()) for stack in stacks_of(model) for layer in stack.layers]
    named = {parameter for unit in (before, *layers) for parameter in unit}
    after = [parameter for parameter in model.parameters() if parameter not in named]
    trained = ([parameter for parameter in unit if parameter.requires_grad] for unit in (before, *layers, after))
    return [unit for unit in trained if unit]


def data_parallel(
    layout: DataLayout, device: torch.device, reduce_dtype: torch.dtype | None, timeout: timedelta | None = None
) -> DataParallel:
    """The data axes of a run.

    Args:
        layout: of the run.
        device: of this rank.
        reduce_dtype: in which gradients are summed; None: as they are.
        timeout: how long a rank waits for another; None: torch's own.
    """
    from .ddp import Replicated
    from .fsdp import Sharded

    if layout.whole_weights:
        return Replicated(layout, device, reduce_dtype)
    return Sharded(layout, device, reduce_dtype, timeout)
