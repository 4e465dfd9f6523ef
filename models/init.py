"""Initial weights, a function of (seed, parameter name) and nothing else: not of device, dtype, order or layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .layers.attention_bias import alibi_slopes, inverse_softplus

OUTPUT_PROJECTIONS = (
    *(".attention.output.weight", ".cross_attention.output.weight", ".mlp.down.weight"),
    *(".mlp.experts.down", ".mlp.shared.down.weight"),
)
Added = Callable[[str, torch.Size, torch.Generator], Tensor]
"""From name, shape and generator to the initial value of a parameter, fp32 on the CPU."""
TOKEN_EMBEDDINGS = ("token_embedding.weight", "decoder_token_embedding.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRules:
    """How a model starts.

    Attributes:
        seed: of the whole initialisation.
        std: deviation of matrices and tables.
        output_std: deviation of the projections that write to the residual stream.
        norm_weight: the value that means a gain of one, 0 where norms store it minus one.
        embedding_std: deviation of the token embeddings; None is `std`.
        parts: rules of their own for the parameters whose names begin so (`encoder.`).
        added: by name, what gives the parameters that fine-tuning has added their values.
    """

    seed: int
    std: float
    output_std: float
    norm_weight: float
    embedding_std: float | None = None
    parts: Mapping[str, InitRules] = field(default_factory=dict)
    added: Mapping[str, Added] = field(default_factory=dict)

    def of(self, name: str) -> InitRules:
        """The rules for a parameter."""
        return next((rules for prefix, rules in self.parts.items() if name.startswith(prefix)), self)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by the SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_value(name: str, shape: torch.Size, rules: InitRules) -> Tensor:
    """The whole parameter `name` in fp32 on the CPU: biases 0, norm weights a gain of one, matrices normal.

    Kerple's parameters begin with a = p = 1 and b the slopes of ALiBi.
    """
    if name in rules.added:
        generator = generator_for(rules.seed, name)
        return rules.added[name](name, shape, generator)
    rules = rules.of(name)
    if name.endswith(".head_scale"):
        return torch.ones(shape)
    if name.endswith(".score_positions.raw_p"):
        return torch.full(shape, inverse_softplus(1.0))
    if name.endswith(".score_positions.raw_b"):
        return torch.tensor([inverse_softplus(slope) for slope in alibi_slopes(shape[0])])
    if name.endswith((".bias", "_bias", ".score_positions.log_a")):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, rules.norm_weight)
    std = rules.output_std if name.endswith(OUTPUT_PROJECTIONS) else rules.std
    if name in TOKEN_EMBEDDINGS and rules.embedding_std is not None:
        std = rules.embedding_std
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
