"""Weight initialization: a function of (seed, parameter name) only, not of device, dtype, order or sharding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .layers.attention_bias import alibi_slopes, inverse_softplus
from .parallel.partition import RankPart, partitions_of

OUTPUT_PROJECTIONS = (
    *(".attention.output.weight", ".cross_attention.output.weight", ".mlp.down.weight"),
    *(".mlp.experts.down", ".mlp.shared.down.weight"),
)
Initializer = Callable[[str, torch.Size, torch.Generator], Tensor]
"""Initializer of a parameter: from name, shape and generator to its value, fp32 on the CPU."""
TOKEN_EMBEDDINGS = ("token_embedding.weight", "decoder_token_embedding.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRules:
    """Initialization of a model.

    Attributes:
        seed: seed of all parameters.
        std: standard deviation of matrices and embedding tables.
        output_std: standard deviation of the projections that write to the residual stream.
        norm_weight: initial norm weight; 0 if norms store the weight minus one.
        embedding_std: standard deviation of the token embeddings; None: `std`.
        prefix_rules: separate rules by prefix of the parameter name (`encoder.`).
        initializers: initializers of PEFT parameters by name.
    """

    seed: int
    std: float
    output_std: float
    norm_weight: float
    embedding_std: float | None = None
    prefix_rules: Mapping[str, InitRules] = field(default_factory=dict)
    initializers: Mapping[str, Initializer] = field(default_factory=dict)

    def for_parameter(self, name: str) -> InitRules:
        """Return the rules for a parameter."""
        return next((rules for prefix, rules in self.prefix_rules.items() if name.startswith(prefix)), self)


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded with the SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_parameter(name: str, shape: torch.Size, rules: InitRules) -> Tensor:
    """Return the full (unsharded) initial value of a parameter, in fp32 on the CPU.

    Biases are 0, norm weights `norm_weight`, matrices normal. Kerple's parameters are a = p = 1 and b the slopes of
    ALiBi.
    """
    if name in rules.initializers:
        generator = generator_for(rules.seed, name)
        return rules.initializers[name](name, shape, generator)
    rules = rules.for_parameter(name)
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


def initial_part(name: str, shape: torch.Size, rules: InitRules, part: RankPart | None) -> Tensor:
    """Return this rank's part, of shape `shape`, of the initial value of a parameter; None for all of it."""
    if part is None or part.partition is None:
        return initial_parameter(name, shape, rules)
    full = initial_parameter(name, torch.Size(part.full_shape(shape)), rules)
    dim = part.partition.dim
    return torch.cat([full.narrow(dim, each.start, each.size) for each in part.ranges()], dim)


def copy_full(parameter: Tensor, full: Tensor) -> None:
    """Fill an unsharded parameter."""
    parameter.copy_(full)


def initialize_(model: nn.Module, rules: InitRules, fill: Callable[[Tensor, Tensor], None] = copy_full) -> None:
    """Initialize every parameter of `model` in place, in parallel threads: sampling dominates the start-up time.

    Args:
        model: its parameters are on a real device.
        rules: initialization of the model.
        fill: copies a full parameter (fp32 on the CPU), or the local shard of it, into the parameter. Under tensor or
            expert parallelism it gets this rank's part of the parameter.

    Raises:
        ValueError: a parameter is still on the meta device.
    """
    parameters = dict(model.named_parameters())
    parts = partitions_of(model)
    if meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise ValueError(f"`{meta[0]}` must be on a real device to be initialized; call `to_empty` first.")

    def initialise_parameter(name: str) -> None:
        with torch.no_grad():  # grad mode is thread-local
            fill(parameters[name], initial_part(name, parameters[name].shape, rules, parts.get(name)))

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(initialise_parameter, parameters))
