"""Recompute (activation checkpointing): run part of a model again in the backward instead of saving its activations.

Source: arXiv 1604.06174. Built on torch's non-reentrant `checkpoint`, which supports functions none of whose inputs
require a gradient, gives bit-identical results, and nests with other saved-tensor hooks. Inside a compiled layer it is
only an annotation: the compiler fuses the recomputation into the backward and drops what the backward does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def should_recompute(module: nn.Module) -> bool:
    """Return True if a backward will follow (training mode and gradients enabled), so that recompute saves memory."""
    return module.training and torch.is_grad_enabled()


def uses_rng(module: nn.Module) -> bool:
    """Return True if the module or a submodule uses the RNG in training, marked by an attribute `uses_rng`."""
    return any(getattr(part, "uses_rng", False) for part in module.modules())


class RecomputableModule(nn.Module):
    """Module that can recompute its activations, or some of them, in the backward of training.

    Attributes:
        recompute: recompute in training; the class says which activations.
        preserve_rng_state: restore the RNG state for the recomputation, since the module uses the RNG.
    """

    recompute: bool = False
    preserve_rng_state: bool = False

    def enable_recompute(self) -> None:
        """Recompute from now on; call it before the first forward, when all submodules are in place."""
        self.recompute, self.preserve_rng_state = True, uses_rng(self)

    @property
    def is_recomputed(self) -> bool:
        """True if the current forward saves no activations that it would recompute."""
        return self.recompute and should_recompute(self)


def run_with_recompute(
    run: Callable[Inputs, Output], preserve_rng_state: bool, /, *inputs: Inputs.args, **options: Inputs.kwargs
) -> Output:
    """Return `run(*inputs, **options)`, saving only the inputs; the backward recomputes the rest.

    Args:
        run: may use parameters and other tensors besides its inputs; must have no side effects, since it runs twice.
        preserve_rng_state: `run` uses the RNG; restore its state for the recomputation. Only set it if needed: reading
            the generator state cannot be captured in a CUDA graph.
        inputs: of `run`; tensors among them pass through saved-tensor hooks.
        options: of `run`.
    """
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state, **options)  # pyrefly: ignore[bad-argument-type]


def run_with_recomputed_input(
    part: Callable[[Tensor], Tensor], product: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """Return `product(part(inputs))`, saving `inputs`; the backward recomputes `part` but not `product`.

    Args:
        part: cheap to recompute: a norm, an activation. Neither it nor `product` uses the RNG.
        product: a matmul, which saves its argument (and its weight) for the backward. If it saves more, as a linear
            layer with LoRA does, it is recomputed up to the last tensor that it saves.
        inputs: saved for the backward.
    """
    if torch.compiler.is_compiling():  # a checkpointed matmul would be recomputed for every user of its output
        return product(run_with_recompute(part, False, inputs))
    # Early stop: the recomputation ends as soon as the matmul has saved its argument, before the matmul itself runs.
    return run_with_recompute(lambda given: product(part(given)), False, inputs)
