"""Replicated parameters: data parallel (DDP), the distributed optimizer (ZeRO-1) with sharded optimizer state, and with
sharded gradients too (ZeRO-2).

No flat buffers: during backward the gradients of a layer are all-reduced as soon as all are ready, in place unless the
reduction dtype differs from theirs. With a distributed optimizer they are reduce-scattered, each rank updates its own
rows, and the other rows are all-gathered directly into the weights. With sharded gradients this is done in every micro
batch, so that a rank keeps the gradients of its own rows only. FSDP2 does the same with copies into and out of
communication buffers.

Weights may be gathered while the next forward pass runs: each layer waits for its own (`overlap_param_sync`).

Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5 (ZeRO-1 and ZeRO-2 communicate as much as data parallel).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.build import LanguageModel
from ...models.fp8 import weights_in_fp8
from ...models.parallel.partition import RankPart, partitions_of
from ..config.parameter_layout import DataParallelLayout
from ..optim.base_optimizer import Optimizer
from ..utils.local_shard import LocalShard, chunk_bounds, row_shard
from .copy_engine import CopyEngineCollectives
from .data_parallel import HELD, DataParallel, backward_passes, communication_buckets, gather_rows
from .process_group import DistributedContext, all_gather_single, reduce_scatter_single


class _Unit(NamedTuple):
    """Parameters whose gradients are communicated together.

    Attributes:
        parameters: the parameters.
        ranks: ranks that hold the same ones.
        passes: backward passes of a micro batch that have a gradient for them.
    """

    parameters: list[nn.Parameter]
    ranks: DistributedContext
    passes: int


class ReplicatedDataParallel(DataParallel):
    """Data parallelism with replicated parameters; gradients are communicated per bucket (see `units`).

    Args:
        reduce_dtype: dtype of gradient reductions; None for the dtype of the gradients.
        replicas: the data-parallel ranks.
        expert_replicas: those of experts that ranks share; None without.
        copy_engines: collectives of the replicas by their copy engines; None: NCCL or gloo.
        overlaps_gather: gather updated weights beside what runs after the update. On a CPU they are gathered when they
            are waited for.
    """

    accumulates_gradients = True

    def __init__(
        self,
        layout: DataParallelLayout,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        replicas: DistributedContext,
        expert_replicas: DistributedContext | None = None,
        copy_engines: CopyEngineCollectives | None = None,
        *,
        overlaps_gather: bool = False,
    ) -> None:
        self._copy_engines = copy_engines
        self._overlaps_gather = overlaps_gather and layout.shards > 1
        self._replicas = replicas
        self._expert_replicas = expert_replicas
        super().__init__(layout, replicas.group, None if expert_replicas is None else expert_replicas.group)
        self._device = device
        self._reduce_dtype = reduce_dtype
        self._units: list[_Unit] = []
        self._pending: list[int] = []
        self._optimizer: Optimizer | None = None
        self._in_fp8: dict[Tensor, Tensor] = {}
        self._micro_batches = 1
        self._passed: list[int] = []
        self._sent: deque[tuple[Any, list[Tensor]]] = deque()
        self._in_layers: set[int] = set()
        self._awaited: dict[int, Callable[[], None]] = {}
        self._gathers: list[list[Callable[[], None]]] = []
        # Side stream, so that communication overlaps with backward.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def local_shard(self, tensor: Tensor, part: RankPart | None = None) -> LocalShard:
        """Return the full tensor, or with a distributed optimizer the local rows."""
        if self.layout.shards == 1:
            return super().local_shard(tensor, part)
        local, rows, ranks = self.local_rows(tensor.detach(), part), tensor.shape[0], self._ranks_of(part)
        return row_shard(local, chunk_bounds(rows, ranks.world_size, ranks.rank)[0], rows, part)

    def local_rows(self, gradient: Tensor, part: RankPart | None = None) -> Tensor:
        """Return the whole gradient, or with a distributed optimizer the rows that this rank updates."""
        return gradient if self.layout.shards == 1 else _chunk(gradient, self._ranks_of(part))

    def attach(self, model: LanguageModel, optimizer: Optimizer) -> None:
        """Register gradient hooks; the optimizer accumulates the gradients."""
        self._optimizer = optimizer
        self._in_fp8 = {
            weight: product.cast.rows.data.view(torch.uint8).view(weight.shape)
            for weight, product in weights_in_fp8(model).items()
            if product.cast is not None
        }
        parts = partitions_of(model)
        part_of = {parameter: parts.get(name) for name, parameter in model.named_parameters()}
        passes = backward_passes(model)
        self._units = [
            _Unit(bucket, self._ranks_of(part_of[bucket[0]]), passes.get(bucket[0], 1))
            for bucket in communication_buckets(model)
        ]
        self._gathers = [self._gathers_of(unit) for unit in self._units]
        self._passed = [0] * len(self._units)
        self._pending = [len(unit.parameters) for unit in self._units]
        for number, unit in enumerate(self._units):
            on_gradient = self._hook(partial(ReplicatedDataParallel._on_gradient, unit=number))
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(on_gradient)
        if self._overlaps_gather:
            number_of = {parameter: number for number, unit in enumerate(self._units) for parameter in unit.parameters}
            for layer in (layer for stack in model.stacks for layer in stack.layers):
                own = sorted({number_of[parameter] for parameter in layer.parameters() if parameter in number_of})
                layer.register_forward_pre_hook(self._hook(partial(ReplicatedDataParallel._wait_for, units=own)))
                self._in_layers.update(own)

    def before_step(self, micro_batches: int) -> None:
        """Start a step; unless they are sharded, gradients are reduced over ranks in the last backward pass only."""
        self._micro_batches = micro_batches
        self._passed = [0] * len(self._units)
        self._wait_for(number for number in list(self._awaited) if number not in self._in_layers)

    def before_forward(self) -> None:
        """Wait for gradients that are summed into shards; others are summed in the last backward pass only."""
        if self._sent:
            self._current_stream.wait_event(self._sent[-1][0])
            self._sent.clear()

    def before_update(self) -> None:
        """Make the current stream wait for the gradient reductions, and for weights that no layer has used."""
        self.wait_for_weights()
        if self._stream is not None:
            self._current_stream.wait_stream(self._stream)
        self._sent.clear()

    @torch.no_grad()
    def after_update(self) -> None:
        """All-gather the rows updated by other ranks."""
        if self.layout.shards == 1:
            return
        if not self._overlaps_gather:
            for number in range(len(self._units)):
                self._gather(number)
            return
        with self._communication_stream():
            # what is not in a layer first: a step begins with embeddings, and waits for all of these
            for number in sorted(range(len(self._units)), key=lambda number: number in self._in_layers):
                wait = partial(self._gather, number)
                if self._stream is not None:
                    wait()
                    wait = partial(self._wait_for_event, self._stream.record_event())
                self._awaited[number] = wait

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """Make the current stream wait for the rows updated by other ranks."""
        self._wait_for(list(self._awaited))

    def _wait_for(self, units: Iterable[int]) -> None:
        for number in units:
            if (wait := self._awaited.pop(number, None)) is not None:
                wait()

    def _wait_for_event(self, event: Any) -> None:
        self._current_stream.wait_event(event)

    @torch.no_grad()
    def _gather(self, number: int) -> None:
        """All-gather the weights of a bucket on the current stream; of those that are kept in fp8 the casts."""
        for gather in self._gathers[number]:
            gather()

    def _gathers_of(self, unit: _Unit) -> list[Callable[[], None]]:
        """Return functions that together gather the weights of a bucket, which stay where they are."""
        if self.layout.shards == 1 or unit.ranks.world_size == 1:
            return []
        weights = [self._in_fp8.get(parameter, parameter.detach()) for parameter in unit.parameters]
        dtypes = dict.fromkeys(weight.dtype for weight in weights)
        alike = ([weight for weight in weights if weight.dtype == dtype] for dtype in dtypes)
        return [self._gather_of(each, unit.ranks) for each in alike]

    def _gather_of(self, weights: Sequence[Tensor], ranks: DistributedContext) -> Callable[[], None]:
        """Return a function that all-gathers rows of weights of one dtype."""
        even = [(weight, _chunk(weight, ranks)) for weight in weights if _is_even(weight, ranks)]
        uneven = [(weight, _chunk(weight, ranks)) for weight in weights if not _is_even(weight, ranks)]
        by_copy_engines: Callable[[], None] | None = None
        if even and self._copy_engines is not None and ranks is self._replicas:
            by_copy_engines = self._copy_engines.gather_of([rows for _, rows in even], [weight for weight, _ in even])

        def gather() -> None:
            if by_copy_engines is not None:
                by_copy_engines()
            elif even:
                with self._coalesced(ranks):
                    for weight, rows in even:
                        all_gather_single(weight, rows, group=ranks.group)
            for weight, rows in uneven:
                weight.copy_(gather_rows(rows, weight.shape[0], ranks.group))

        return gather

    def _hook(self, call: Callable[[ReplicatedDataParallel], None]) -> Callable[..., None]:
        owner = weakref.ref(self)  # a hook that held this object, which holds the parameter, would never be freed

        def hook(*_: Any) -> None:
            strategy = owner()
            if strategy is not None:
                call(strategy)

        return hook

    def _on_gradient(self, unit: int) -> None:
        self._pending[unit] -= 1
        if self._pending[unit] == 0:
            self._pending[unit] = len(self._units[unit].parameters)
            self._passed[unit] += 1
            last = self._passed[unit] == self._micro_batches * self._units[unit].passes
            self._on_unit_ready(self._units[unit], first=self._passed[unit] == 1, last=last)

    @torch.no_grad()
    def _on_unit_ready(self, unit: _Unit, *, first: bool, last: bool) -> None:
        """Accumulate and reduce the gradients of a bucket, once all are ready."""
        assert self._optimizer is not None
        shards, same_dtype = self.layout.shards_gradients, self._reduce_dtype in (None, unit.parameters[0].dtype)
        copy_engines = self._copy_engines if (last or shards) and unit.ranks is self._replicas else None
        if shards:
            gradients = [self._optimizer.take_gradient(parameter) for parameter in unit.parameters]
        elif first and last and (same_dtype or copy_engines is not None):  # copy engines send bf16 and sum in fp32
            wide = [] if same_dtype else [each for each in unit.parameters if not _is_even(each, unit.ranks)]
            widened = dict(zip(wide, self._optimizer.accumulate(wide), strict=True))
            found = [widened.get(parameter, parameter.grad) for parameter in unit.parameters]
            gradients = [gradient for gradient in found if gradient is not None]
        else:
            gradients = self._optimizer.accumulate(unit.parameters)
        if not shards and (not last or unit.ranks.world_size == 1):
            return
        with self._communication_stream():
            others = unit.parameters, gradients
            if copy_engines is not None:
                others = self._sum_by_copy_engines(unit, gradients, copy_engines)
            if not shards:
                self._sum(others[1], unit.ranks)
                return
            self._sum_into_shards(*others, unit.ranks)
            if self._stream is not None:
                self._sent.append((self._stream.record_event(), gradients))
        if len(self._sent) > HELD:  # what is computed next may use their memory
            self._current_stream.wait_event(self._sent.popleft()[0])

    def _sum_by_copy_engines(
        self, unit: _Unit, gradients: Sequence[Tensor], copy_engines: CopyEngineCollectives
    ) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Reduce gradients over ranks: sent in the reduction dtype or a narrower one that they have, summed in fp32.

        The sums are in the dtype that the optimizer expects: what it would have accumulated.

        Returns:
            The parameters whose rows the ranks do not divide, and their gradients, which are not reduced.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        reduce_dtype = self._reduce_dtype or gradients[0].dtype
        pairs = list(zip(unit.parameters, gradients, strict=True))
        even = [pair for pair in pairs if _is_even(pair[1], unit.ranks)]
        sent = [gradient for _, gradient in even]
        if sent and reduce_dtype.itemsize < sent[0].dtype.itemsize:
            sent = [gradient.to(reduce_dtype) for gradient in sent]
        dtype = reduce_dtype if optimizer.main_weights else gradients[0].dtype
        if sent and self.layout.shards == 1:
            sums = [each if each.dtype == dtype else torch.empty_like(each, dtype=dtype) for each in sent]
            copy_engines.all_reduce(sent, sums)
        else:
            sums = copy_engines.reduce_scatter(sent, dtype) if sent else []
        optimizer.add_gradients([parameter for parameter, _ in even], sums)
        others = [pair for pair in pairs if not _is_even(pair[1], unit.ranks)]
        return [parameter for parameter, _ in others], [gradient for _, gradient in others]

    def _sum_into_shards(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], ranks: DistributedContext
    ) -> None:
        """Reduce gradients over ranks, and add copies of the rows that this rank updates to those of the step."""
        if not gradients:
            return
        assert self._optimizer is not None
        dtype = reduce_dtype = self._reduce_dtype or gradients[0].dtype
        if not self._optimizer.main_weights:
            dtype = gradients[0].dtype
        sums = [gradient.to(reduce_dtype) for gradient in gradients]
        if ranks.world_size > 1:
            self._sum(sums, ranks)
        self._optimizer.add_gradients(parameters, [_chunk(total, ranks).to(dtype, copy=True) for total in sums])

    def _sum(self, gradients: Sequence[Tensor], ranks: DistributedContext) -> None:
        """Reduce gradients over ranks in place; with a distributed optimizer only the local rows are then valid."""
        if not gradients:
            return
        sharded = [self.layout.shards > 1 and _is_even(gradient, ranks) for gradient in gradients]
        sums = [gradient.to(self._reduce_dtype or gradient.dtype) for gradient in gradients]
        if any(sharded):
            with self._coalesced(ranks):
                for total, is_sharded in zip(sums, sharded, strict=True):
                    if is_sharded:
                        # in place: the output is a slice of the input
                        reduce_scatter_single(_chunk(total, ranks), total, group=ranks.group)
        if not all(sharded):
            with self._coalesced(ranks):
                for total, is_sharded in zip(sums, sharded, strict=True):
                    if not is_sharded:
                        dist.all_reduce(total, group=ranks.group)
        for gradient, total, is_sharded in zip(gradients, sums, sharded, strict=True):
            if total is not gradient:
                destination, source = (_chunk(each, ranks) if is_sharded else each for each in (gradient, total))
                destination.copy_(source)

    def _ranks_of(self, part: RankPart | None) -> DistributedContext:
        """Return the ranks that hold the same part of a parameter."""
        is_expert = part is not None and part.axis == "expert"
        return self._expert_replicas if is_expert and self._expert_replicas is not None else self._replicas

    def _coalesced(self, ranks: DistributedContext) -> AbstractContextManager[Any]:
        """Context in which NCCL coalesces collectives into one launch; gloo runs them one by one."""
        if self._stream is None:
            return nullcontext()
        return dist._coalescing_manager(ranks.group, self._device)

    @property
    def _current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.index)  # of a device itself it takes the host 20 us longer

    @contextmanager
    def _communication_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._current_stream)
        with self._stream:
            yield


def _chunk(tensor: Tensor, ranks: DistributedContext) -> Tensor:
    """Return the rows that this rank updates with a distributed optimizer, a view."""
    start, count = chunk_bounds(tensor.shape[0], ranks.world_size, ranks.rank)
    return tensor[start : start + count]


def _is_even(tensor: Tensor, ranks: DistributedContext) -> bool:
    return tensor.shape[0] % ranks.world_size == 0
