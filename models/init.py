"""Weight initialization: a function of (seed, parameter name) only, not of device, dtype, order or sharding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from .layers.attention_bias import alibi_slopes, inverse_softplus
from .layers.own_module import OwnModule
from .parallel.partition import RankPart, partitions_of
from .random_tiles import draw_normal

OUTPUT_PROJECTIONS = (
    *(".attention.output.weight", ".cross_attention.output.weight", ".mlp.down.weight"),
    *(".mlp.experts.down", ".mlp.shared.down.weight"),
)
Initializer = Callable[[str, torch.Size, torch.Generator], Tensor]
"""Initializer of a parameter: from name, shape and generator to its value, fp32 on the CPU."""
_ZEROS = (".bias", "_bias", ".score_positions.log_a", ".sinks")
"""Ends of names of parameters that are 0 at the start."""
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
        initializers: initializers by name of the parameters of PEFT and of users' own modules.
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


def key_of(seed: int, name: str) -> int:
    """Return the seed of a parameter, from the SHA-256 of seed and name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def initial_parameter(name: str, shape: torch.Size, rules: InitRules) -> Tensor:
    """Return the full (unsharded) initial value of a parameter, in fp32 on the CPU.

    Biases are 0, norm weights `norm_weight`, matrices normal. Kerple's parameters are a = p = 1 and b the slopes of
    ALiBi.
    """
    return initial_rows(name, shape, rules, None, 0, shape[0] if shape else 1)


def initial_rows(
    name: str, shape: torch.Size, rules: InitRules, part: RankPart | None, first: int, count: int
) -> Tensor:
    """Return some rows of this rank's part of the initial value of a parameter, in fp32 on the CPU.

    Of matrices nothing else is drawn, up to a tile (`random_tiles`).

    Args:
        name: name of the parameter.
        shape: shape of the part.
        rules: initialization of the model.
        part: this rank's part; None for the full parameter.
        first, count: rows of the part.
    """
    full = shape if part is None else torch.Size(part.full_shape(shape))
    ranges = [] if part is None else part.ranges()
    dim = part.partition.dim if part is not None and part.partition is not None else 0
    if name in rules.initializers or len(shape) < 2 or name.endswith(_ZEROS):
        value = _whole_value(name, full, rules)
        if ranges:
            value = torch.cat([value.narrow(dim, each.start, each.size) for each in ranges], dim)
        return value[first : first + count] if value.ndim else value
    rows, columns = [(0, full[0])], None
    if ranges and dim == 0:
        rows = [(each.start, each.size) for each in ranges]
    elif ranges:
        assert len(shape) == 2, "matrices of experts are never split"
        columns = ranges[0].start, ranges[0].size
    inner = full[1:-1].numel()
    held = [(start * inner, size * inner) for start, size in _clip(rows, first, count)]
    drawn = draw_normal(key_of(rules.seed, name), (full[0] * inner, full[-1]), held, columns)
    return drawn.mul_(_std(name, rules)).view(count, *shape[1:])


def _whole_value(name: str, shape: torch.Size, rules: InitRules) -> Tensor:
    """Return the value of a parameter that is not a normal matrix."""
    if name in rules.initializers:
        return rules.initializers[name](name, shape, torch.Generator("cpu").manual_seed(key_of(rules.seed, name)))
    if name.endswith(".head_scale"):
        return torch.ones(shape)
    if name.endswith(".score_positions.raw_p"):
        return torch.full(shape, inverse_softplus(1.0))
    if name.endswith(".score_positions.raw_b"):
        return torch.tensor([inverse_softplus(slope) for slope in alibi_slopes(shape[0])])
    if name.endswith(_ZEROS):
        return torch.zeros(shape)
    return torch.full(shape, rules.for_parameter(name).norm_weight)


def _std(name: str, rules: InitRules) -> float:
    rules = rules.for_parameter(name)
    if name in TOKEN_EMBEDDINGS and rules.embedding_std is not None:
        return rules.embedding_std
    return rules.output_std if name.endswith(OUTPUT_PROJECTIONS) else rules.std


def _clip(ranges: list[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Return the ranges of `count` of the rows in them, from row `first` on."""
    found: list[tuple[int, int]] = []
    for start, size in ranges:
        skipped = min(first, size)
        taken = min(count, size - skipped)
        found.append((start + skipped, taken))
        first, count = first - skipped, count - taken
    return found


def own_initializers(model: nn.Module, seed: int) -> dict[str, Initializer]:
    """Return initializers of the parameters of users' own modules, and set the buffers of these, in at least fp32."""
    found: dict[str, Initializer] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, OwnModule):  # pyrefly: ignore[unsafe-overlap]
            continue
        for name, value in module.initial_tensors(key_of(seed, prefix)).items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            current = getattr(owner, leaf)
            if isinstance(current, nn.Parameter):
                found[f"{prefix}.{name}"] = partial(_given, value)
            elif value.is_floating_point():
                dtype = torch.promote_types(current.dtype, torch.float32)
                setattr(owner, leaf, value.to(current.device, dtype))
            else:
                setattr(owner, leaf, value.to(current.device))
    return found


def _given(value: Tensor, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    return value


def all_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return an unsharded parameter, whose first row is 0."""
    return parameter, 0


def initialize_(
    model: nn.Module, rules: InitRules, local_rows: Callable[[Tensor], tuple[Tensor, int]] = all_rows
) -> None:
    """Initialize every parameter of `model` in place, in parallel threads: sampling dominates the start-up time.

    Args:
        model: its parameters are on a real device.
        rules: initialization of the model.
        local_rows: returns the local rows of a parameter (of this rank's part of it, under tensor or expert
            parallelism), and the first of them.

    Raises:
        ValueError: a parameter is still on the meta device.
    """
    parameters = dict(model.named_parameters())
    parts = partitions_of(model)
    if meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise ValueError(f"`{meta[0]}` must be on a real device to be initialized; call `to_empty` first.")

    def initialise_parameter(name: str) -> None:
        with torch.no_grad():  # grad mode is thread-local
            local, first = local_rows(parameters[name])
            count = len(local) if local.ndim else 1
            local.copy_(initial_rows(name, parameters[name].shape, rules, parts.get(name), first, count))

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(initialise_parameter, parameters))
