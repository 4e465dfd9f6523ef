"""Gradients of a step: `.grad`, fp32 sums of several micro batches, or rows that data-parallel ranks have reduced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..utils.local_shard import local_tensor


class GradientSums:
    """Accumulates the gradients of micro batches until an update takes them.

    Args:
        names: name of each parameter.
        in_fp32: gradients of parameters narrower than fp32 are summed in fp32, and dropped from `.grad`; those of
            others accumulate in `.grad`.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], *, in_fp32: bool) -> None:
        self._names = names
        self._in_fp32 = in_fp32
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._in_use: set[nn.Parameter] = set()
        self._given: dict[nn.Parameter, Tensor] = {}

    def is_in_fp32(self, parameter: Tensor) -> bool:
        """Return True if the gradients of a parameter are summed in fp32."""
        return self._in_fp32 and parameter.element_size() < 4

    @torch.no_grad()
    def accumulate(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Add the gradients of one micro batch; return the accumulated gradient of each parameter."""
        parameters = list(parameters)
        narrow = [parameter for parameter in parameters if self.is_in_fp32(parameter)]
        if narrow:
            gradients = [self.take(parameter) for parameter in narrow]
            for parameter, gradient in zip(narrow, gradients, strict=True):
                if parameter not in self.sums:
                    self.sums[parameter] = torch.empty_like(gradient, dtype=torch.float32)
            for is_first in (True, False):
                chosen = [i for i, p in enumerate(narrow) if (p not in self._in_use) == is_first]
                if chosen:
                    write = torch._foreach_copy_ if is_first else torch._foreach_add_
                    write([self.sums[narrow[i]] for i in chosen], [gradients[i] for i in chosen])
            self._in_use.update(narrow)
        return [self.sums[p] if self.is_in_fp32(p) else local_tensor(self._gradient(p)) for p in parameters]

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Add the rows of gradients that this rank updates; see `Optimizer.add_gradients`."""
        again = [parameter in self._given for parameter in parameters]
        for parameter, gradient, has_sum in zip(parameters, gradients, again, strict=True):
            if not has_sum:
                self._given[parameter] = gradient
            elif self.is_in_fp32(parameter):
                self._given[parameter] = self._given[parameter].float()
        if any(again):
            sums = [self._given[parameter] for parameter, has_sum in zip(parameters, again, strict=True) if has_sum]
            added = [gradient for gradient, has_sum in zip(gradients, again, strict=True) if has_sum]
            torch._foreach_add_(sums, added)

    def take_given(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what `add` has added up for a parameter, and drop it and `.grad`; None if nothing."""
        given = self._given.pop(parameter, None)
        if given is not None:
            parameter.grad = None
        return given

    def accumulated(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient that `accumulate` has added up, or `.grad`, which is dropped."""
        return self.sums[parameter] if parameter in self._in_use else self.take(parameter)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """Return the local gradient of a parameter, and drop `.grad`.

        Raises:
            ValueError: it has none.
        """
        gradient = self._gradient(parameter)
        parameter.grad = None
        return local_tensor(gradient)

    def start_anew(self) -> None:
        """Let the next gradients overwrite the sums."""
        self._in_use.clear()

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            name = self._names[parameter]
            raise ValueError(f"`{name}` has no gradient; every trainable parameter must contribute to the loss")
        return parameter.grad
