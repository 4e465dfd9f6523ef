"""Initial weights, a function of (seed, parameter name) and nothing else: not of device, dtype, order or layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OUTPUT_PROJECTIONS = (".attention.output.weight", ".mlp.down.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRules:
    """How a model starts.

    Attributes:
        seed: of the whole initialisation.
        std: deviation of matrices and tables.
        output_std: deviation of the projections that write to the residual stream.
        norm_weight: the value that means a gain of one, 0 where norms store it minus one.
    """

    seed: int
    std: float
    output_std: float
    norm_weight: float


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by the SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(name: str, shape: torch.Size, rules: InitRules) -> Tensor:
    """The whole parameter `name` in fp32 on the CPU: biases 0, norm weights a gain of one, the rest normal."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, rules.norm_weight)
    std = rules.output_std if name.endswith(OUTPUT_PROJECTIONS) else rules.std
    return torch.empty(shape).normal_(0.0, std, generator=generator_for(rules.seed, name))


def copy_whole(parameter: Tensor, whole: Tensor) -> None:
    """Fill a parameter that is not cut over processes."""
    parameter.copy_(whole)


def initialise_(model: nn.Module, rules: InitRules, fill: Callable[[Tensor, Tensor], None] = copy_whole) -> None:
    """Fill every parameter of `model` in place, several at a time (drawing normals is the slow part of a start).

    Args:
        model: its parameters lie on a real device.
        rules: what to draw.
        fill: copies (its part of) a whole parameter, fp32 on the CPU, into the parameter.

    Raises:
        ValueError: a parameter still lies on the meta device.
    """
    parameters = dict(model.named_parameters())
    if meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise ValueError(f"`{meta[0]}` must lie on a real device to be initialised; call `to_empty` first.")

    def draw(name: str) -> None:
        with torch.no_grad():  # in the thread it runs in
            fill(parameters[name], initial_value(name, parameters[name].shape, rules))

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, parameters))
