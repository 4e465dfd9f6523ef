"""Weights that every rank keeps whole: data parallel (DDP), and the distributed optimizer (ZeRO-1) that cuts its state.

No flat buffers: while the backward pass runs, the gradients of a layer are summed as soon as all are there, in place
unless they shall be summed in another dtype than the one they are kept in; with a distributed optimizer each rank
receives the sums of its own rows only, updates those, and the rows of the other ranks are gathered into the weights
themselves. FSDP2 does the same with a copy into and out of every message.

Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5 (ZeRO-1 communicates as much as data parallel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.build import LanguageModel
from ..config.parameter_layout import DataLayout
from ..optim.base_optimizer import Optimizer
from ..utils.local_shard import Piece, chunk
from .data_parallel import DataParallel, units


class Replicated(DataParallel):
    """Sums gradients; a unit (the embeddings, a layer, what comes after) is one message.

    Args:
        layout: of the run.
        device: of this rank.
        reduce_dtype: in which gradients are summed; None: as they are.
    """

    takes_gradients = True

    def __init__(self, layout: DataLayout, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
        super().__init__(layout, dist.group.WORLD)
        self._device = device
        self._reduce_dtype = reduce_dtype
        self._units: list[list[nn.Parameter]] = []
        self._missing: list[int] = []
        self._optimizer: Optimizer | None = None
        self._first = self._last = True
        # Messages go out in the order of the gradients, beside the backward pass.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def cut(self, model: LanguageModel) -> None:
        """The weights stay whole."""

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy a whole parameter."""
        parameter.detach().copy_(whole)

    def piece_of(self, tensor: Tensor) -> Piece:
        """All of a tensor, or with a distributed optimizer this rank's part of its rows."""
        if self.layout.shards == 1:
            return super().piece_of(tensor)
        local, rows = tensor.detach(), tensor.shape[0]
        start, count = chunk(rows, self.layout.shards, dist.get_rank())
        return Piece(local[start : start + count], start, rows)

    def attach(self, model: LanguageModel, optimizer: Optimizer) -> None:
        """Watch the gradients, which the optimizer adds up."""
        self._optimizer = optimizer
        self._units = units(model)
        self._missing = [len(unit) for unit in self._units]
        for number, unit in enumerate(self._units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_there(number))

    def before_micro_batch(self, *, first: bool, last: bool) -> None:
        """Gradients are summed over ranks in the last micro batch of a step only."""
        self._first, self._last = first, last

    def before_update(self) -> None:
        """The update waits for the sums."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.no_grad()
    def after_update(self) -> None:
        """Gather the rows that other ranks have updated."""
        if self.layout.shards == 1:
            return
        for unit in self._units:
            weights = [parameter.detach() for parameter in unit]
            even = [weight for weight in weights if self._is_even(weight)]
            if even:
                with self._one_message():
                    for weight in even:
                        dist.all_gather_into_tensor(weight, self.piece_of(weight).local)
            for weight in weights:
                if not self._is_even(weight):
                    weight.copy_(self.gather_rows(self.piece_of(weight).local, weight.shape[0]))

    def _gradient_is_there(self, unit: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._missing[unit] = len(self._units[unit])
                self._unit_is_there(self._units[unit])

        return hook

    @torch.no_grad()
    def _unit_is_there(self, unit: list[nn.Parameter]) -> None:
        """All gradients of a micro batch for one unit."""
        assert self._optimizer is not None
        narrow = self._reduce_dtype in (None, unit[0].dtype)
        if self._first and self._last and narrow:
            gradients = [parameter.grad for parameter in unit if parameter.grad is not None]
        else:
            gradients = self._optimizer.accumulate(unit)
        if self._last:
            with self._beside_the_backward():
                self._sum(gradients)

    def _sum(self, gradients: Sequence[Tensor]) -> None:
        """Over the ranks; with a distributed optimizer the rows of other ranks may stay unsummed."""
        cut = [self.layout.shards > 1 and self._is_even(gradient) for gradient in gradients]
        sums = [gradient.to(self._reduce_dtype or gradient.dtype) for gradient in gradients]
        if any(cut):
            with self._one_message():
                for total, is_cut in zip(sums, cut, strict=True):
                    if is_cut:
                        dist.reduce_scatter_tensor(self.piece_of(total).local, total)
        if not all(cut):
            with self._one_message():
                for total, is_cut in zip(sums, cut, strict=True):
                    if not is_cut:
                        dist.all_reduce(total)
        for gradient, total, is_cut in zip(gradients, sums, cut, strict=True):
            if total is not gradient:
                into, of = (self.piece_of(each).local if is_cut else each for each in (gradient, total))
                into.copy_(of)

    def _is_even(self, tensor: Tensor) -> bool:
        return tensor.shape[0] % self.layout.shards == 0

    def _one_message(self) -> AbstractContextManager[Any]:
        """Within it NCCL collects what it is asked for; gloo does one after the other."""
        if self._stream is None:
            return nullcontext()
        return dist._coalescing_manager(device=self._device)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    @contextmanager
    def _beside_the_backward(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
