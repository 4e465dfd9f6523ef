"""Running a part of a model again in the backward pass instead of keeping what it calculated (arXiv 1604.06174).

Checkpoints are torch's non-reentrant ones: they take parts of which no input has a gradient, give the same bits, and
nest with other hooks on saved tensors. Inside a compiled layer they are marks for the compiler, which fuses the second
run into the backward and leaves out what that does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def recomputes(module: nn.Module) -> bool:
    """Whether there will be a backward pass worth saving memory for: in training, and with gradients."""
    return module.training and torch.is_grad_enabled()


def draws(module: nn.Module) -> bool:
    """Whether a module, or a part of it, draws random numbers in training: those that do have a true `draws`."""
    return any(getattr(part, "draws", False) for part in module.modules())


def run_again(
    run: Callable[Inputs, Output], run_draws: bool, /, *inputs: Inputs.args, **options: Inputs.kwargs
) -> Output:
    """`run(*inputs, **options)`, of which only the inputs are kept, and which the backward runs again.

    Args:
        run: may use parameters and other tensors besides; it has no other effects, for they would happen twice.
        run_draws: it draws random numbers, the same ones again in the second run. Generators are asked for their state
            only then, for a CUDA graph cannot record that.
        inputs: of `run`; tensors among them are seen by hooks on saved tensors.
        options: of `run`.
    """
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=run_draws, **options)


def product_of(
    part: Callable[[Tensor], Tensor], product: Callable[[Tensor], Tensor], part_draws: bool, /, inputs: Tensor
) -> Tensor:
    """`product(part(inputs))`, of which the backward runs the part again, but not the product.

    Args:
        part: what is cheap to run twice: a norm, an activation.
        product: a matrix product, which keeps its argument (and its weight) for the backward. Where it keeps more, as
            one with a low-rank update does, it runs again as far as it takes to have that too.
        part_draws: `part` draws random numbers.
        inputs: kept.
    """
    if torch.compiler.is_compiling():  # a marked product would be run again for whoever keeps its result
        return product(run_again(part, part_draws, inputs))
    # the second run ends where the product, before it begins, has kept its argument
    product_draws = isinstance(product, nn.Module) and draws(product)
    return run_again(lambda given: product(part(given)), part_draws or product_draws, inputs)
