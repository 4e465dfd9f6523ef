"""Weights that are trained and exist in fp8 alone, beside the optimizer's fp32 main weights (`model.fp8_params`).

After an update main weights are rounded to the dtype of the parameters and cast, to the same bits as weights in that
dtype beside their casts. With a distributed optimizer the ranks agree on the amax of each weight, each casts its rows,
and the casts are all-gathered, half the bytes of bf16.

Source: Megatron-LM's `fp8_param_gather` (core/fp8_utils.py, `quantize_param_shard`), which casts fp32 without rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.fp8.quantize import Reduce, amaxes, reduce_amax
from ...models.fp8 import weights_in_fp8
from ...models.parallel.fp8 import Fp8Product
from ...models.parallel.partition import PartAxis
from ..utils.local_shard import LocalShard
from .base_optimizer import Optimizer


class _Weight(NamedTuple):
    """A weight that is kept in fp8."""

    name: str
    weight: nn.Parameter
    product: Fp8Product

    def rounded(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return its values in the dtype, and on the device, of the parameter."""
        return values[self.name].to(self.weight.device, self.weight.dtype)


class Fp8Weights:
    """Casts main weights into the weights of a model that are kept in fp8 (`models.fp8.keep_fp8_weights`).

    Args:
        model: the model.
        optimizer: has main weights of them, and from here on updates those only.
        reduce: as in `quantize.amaxes`, over the ranks that each update some rows of a weight, by what its parts are,
            in tensorwise scaling; None: each rank updates all rows.

    Attributes:
        main_weights: local shards of the main weights by name.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, reduce: Mapping[PartAxis, Reduce] | None = None) -> None:
        products, states = weights_in_fp8(model), optimizer.local_shards()
        kept = {name: weight for name, weight in model.named_parameters() if weight in products}
        self.main_weights: dict[str, LocalShard] = {name: states[f"{name}.main"] for name in kept}
        self._weights = [_Weight(name, weight, products[weight]) for name, weight in kept.items()]
        self._sharding = optimizer.sharding
        self._by_axis: dict[PartAxis, list[_Weight]] = {}
        for each in self._weights:
            self._by_axis.setdefault(self._sharding.axis_of(each.name), []).append(each)
        self._reduce = reduce
        optimizer.main_alone = frozenset(kept.values())

    @torch.no_grad()
    def cast(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Cast the main weights, or other values of their shards by name; of the rows that this rank updates."""
        if values is None:
            values = {name: shard.local for name, shard in self.main_weights.items()}
        if self._reduce is None:
            for each in self._weights:
                each.product.cast_weight(each.rounded(values))
            return
        for axis, weights in self._by_axis.items():
            for each, amax in zip(weights, _amaxes(weights, values, self._reduce[axis]), strict=True):
                assert each.product.cast is not None
                data = each.product.cast.rows.data.view(each.weight.shape)
                rows = self._sharding.local_rows(data, self._sharding.parts.get(each.name))
                each.product.cast_rows(_some_rows(each.rounded(values)), amax, rows.flatten(0, -2))

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the weights in the dtype of the parameters, by name, for checkpoints."""
        values = {name: shard.local for name, shard in self.main_weights.items()}
        return {each.name: self.main_weights[each.name].with_local(each.rounded(values)) for each in self._weights}


def _amaxes(weights: Sequence[_Weight], values: Mapping[str, Tensor], reduce: Reduce) -> Tensor:
    """Return the amax of each weight, (weights, 1), over all ranks that have parts of it."""
    found = [
        amaxes(_some_rows(values[each.name].to(each.weight.device)), "tensor")[0].to(each.weight.dtype)
        for each in weights
    ]
    # Rounding keeps the order: these are the amaxes of the rounded values. Ranks that split some of the weights have
    # equal copies of the others, so that one message is for all.
    parts = next(filter(None, (each.product.weight_reduce for each in weights)), None)
    return reduce_amax(reduce_amax(torch.stack(found).float(), reduce), parts)


def _some_rows(values: Tensor) -> Tensor:
    """Return the rows of a shard as a matrix; one of zeros of a shard without rows."""
    rows = values.flatten(0, -2)
    return rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1])
