"""Scales of delayed scaling, which follow from the amaxes of former steps, and their state.

The recipe is TransformerEngine's. A cast uses the scale of its tensor and records its amax; once a step, after all
micro batches, new scales follow from the largest (or most recent) amax of the last steps. A repeated forward pass
therefore casts as the first one did, and its amaxes count once. TransformerEngine's `autocast` updates after each
forward and each backward pass instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .recipe import MAX_VALUE, Fp8Recipe

Pass = Literal["forward", "backward"]

INPUT, WEIGHT, GRADIENT = range(3)
"""Operands of a linear layer that have a scale: its input, its weight, the gradient of its output."""
LINEAR: tuple[Pass, ...] = ("forward", "forward", "backward")
"""The pass in which each of them is cast, which decides on its format."""


class DelayedScales(NamedTuple):
    """Views of the state of one module, indexed by operand.

    Attributes:
        scale: (operands,) fp32, what values are multiplied by when they are cast.
        amax: (operands,) fp32, largest magnitude of each operand in this step so far.
    """

    scale: Tensor
    amax: Tensor


class DelayedScaling:
    """State of all linear layers and attentions of a rank.

    Args:
        operands: for each module by name, the passes in which its operands are cast.
        recipe: recipe of all of them.
        device: device of the state.
        reduce: maximum over the ranks that hold parts of the same tensors, in place; None for one.

    Attributes:
        scale: (operands of all modules,) fp32; 1 before the first step, as in TransformerEngine.
        history: (`amax_history_len`, operands) fp32: amaxes of the step at hand in the first row, of the last step in
            the last one.
    """

    def __init__(
        self,
        operands: Mapping[str, tuple[Pass, ...]],
        recipe: Fp8Recipe,
        device: torch.device,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.recipe = recipe
        passes: list[Pass] = []
        self._places: dict[str, slice] = {}
        for name, own in operands.items():
            self._places[name] = slice(len(passes), len(passes) + len(own))
            passes += own
        self.scale = torch.ones(len(passes), device=device)
        self.history = torch.zeros(recipe.amax_history_len, len(passes), device=device)
        limits = [MAX_VALUE[recipe.forward if each == "forward" else recipe.backward] for each in passes]
        self._limits = torch.tensor(limits, device=device) * 2.0**-recipe.margin
        self._reduce = reduce

    def scales(self, name: str) -> DelayedScales:
        """Return the views of a module."""
        return DelayedScales(self.scale[self._places[name]], self.history[0, self._places[name]])

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as views, by name: `.scale` (operands,) and `.amax_history` (operands, `amax_history_len`)
        of each module.
        """
        found: dict[str, Tensor] = {}
        for name, own in self._places.items():
            found |= {f"{name}.scale": self.scale[own], f"{name}.amax_history": self.history[:, own].t()}
        return found

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Let scales follow from the amaxes, after the last backward pass of a step.

        Amaxes that are not finite on any rank count as none, so that a step that is skipped leaves these scales alone.

        Args:
            step: completed steps before this one.
        """
        if (step + 1) % self.recipe.interval:
            return
        newest = self.history[0]
        newest.nan_to_num_(math.inf, posinf=math.inf)  # a maximum over ranks may lose NaN
        if self._reduce is not None:
            self._reduce(newest)
        newest.masked_fill_(newest.isinf(), 0.0)
        amax = newest if self.recipe.amax_compute_algo == "most_recent" else self.history.amax(0)
        largest = torch.finfo(torch.float32).max
        self.scale.copy_(torch.where(amax > 0, (self._limits / amax).clamp(max=largest), self.scale))
        self.history.copy_(self.history.roll(-1, 0))
        self.history[0].zero_()
