"""Rules of model parallelism: which models, samples and processes can be split over which ranks. Without torch.

Findings name keys with their full paths, and every cure is accepted when it is obeyed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..config.bert import BertKeys
from ..config.dense_stack import is_own_block
from ..config.families import FamilyKeys, keys_by_stack
from ..config.key_block import Finding
from ..config.model import resolve_vocab_sizes
from ..config.moe import has_experts
from ..config.stack import StackKeys, divisors
from .layout import ParallelLayout

TENSOR = "model.tensor_model_parallel_size"
CONTEXT = "model.context_parallel_size"
PIPELINE = "model.pipeline_model_parallel_size"
EXPERT = "model.expert_model_parallel_size"
SEQUENCE = "model.sequence_parallel"
COMM_TYPE = "model.cp_comm_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model, its micro batches, and the ranks that it is split over.

    Attributes:
        keys: `model`.
        mesh: the ranks; `sequence` as configured, also with one tensor-parallel rank.
        lengths: tokens of a sample in each stack, by the path of the key that sets them.
        micro_batch: samples of a micro batch.
        comm_type: `model.cp_comm_type`.
    """

    keys: FamilyKeys
    mesh: ParallelLayout
    lengths: Mapping[str, int]
    micro_batch: int
    comm_type: str = "p2p"

    @property
    def stacks(self) -> dict[str, StackKeys]:
        """Keys of each stack by path prefix: `model.`, or `model.encoder.` and `model.decoder.`."""
        return {f"model.{prefix}": keys for prefix, keys in keys_by_stack(self.keys).items()}

    @property
    def moe_stacks(self) -> dict[str, StackKeys]:
        """Those of the stacks with experts."""
        return {prefix: keys for prefix, keys in self.stacks.items() if has_experts(keys)}


Rule = Callable[[SplitModel], Iterator[Finding]]


def parallel_rules(model: SplitModel) -> Iterator[Finding]:
    """All checks of a model that is split over several ranks, or has keys that would split it."""
    for rule in (*TENSOR_RULES, *OTHER_RULES):
        yield from rule(model)


def world_rules(mesh: ParallelLayout, devices: int, nodes: int) -> Iterator[Finding]:
    """Check that the processes make up whole replicas, and that tensor-parallel ranks share a node.

    Args:
        mesh: sizes of the axes; the data axis is ignored.
        devices: processes on each node.
        nodes: number of nodes.
    """
    world, ranks = devices * nodes, mesh.model_ranks
    axes = {TENSOR: mesh.tensor, CONTEXT: mesh.context, PIPELINE: mesh.pipeline}
    split = {key: size for key, size in axes.items() if size > 1}
    if world % ranks:
        product = " * ".join(f"`{key.removeprefix('model.')}` ({size})" for key, size in split.items())
        per_node = ranks // math.gcd(ranks, nodes)
        enough = -(-devices // per_node) * per_node
        yield Finding.error(
            (*split, "trainer.devices", "trainer.num_nodes"),
            f"the {world} processes must be a multiple of {product}, the ranks that share a model",
            f"trainer.devices={math.lcm(enough, mesh.tensor) if nodes > 1 else enough}, or "
            + " ".join(f"{key}=1" for key in split),
        )
    elif nodes > 1 and devices % mesh.tensor:
        fitting = max(size for size in divisors(math.gcd(devices, mesh.tensor)))
        yield Finding.error(
            (TENSOR, "trainer.devices"),
            f"`tensor_model_parallel_size` ({mesh.tensor}) must divide the `devices` ({devices}) of a node: "
            "tensor-parallel ranks communicate in every layer, over the links inside a node",
            f"{TENSOR}={fitting}",
        )


# ---------------------------------------------------------------- tensor parallelism


def heads_divide_by_ranks(model: SplitModel) -> Iterator[Finding]:
    """Every tensor-parallel rank has as many attention heads."""
    for prefix, keys in model.stacks.items():
        yield from _divides(model, f"{prefix}num_attention_heads", keys.num_attention_heads)


def groups_and_ranks_divide(model: SplitModel) -> Iterator[Finding]:
    """Every rank has as many key and value heads, or as many ranks share each of them."""
    ranks = model.mesh.tensor
    for prefix, keys in model.stacks.items():
        groups = keys.num_query_groups
        if groups is not None and groups % ranks and ranks % groups:
            yield Finding.error(
                (TENSOR, f"{prefix}num_query_groups"),
                f"`tensor_model_parallel_size` ({ranks}) must divide `num_query_groups` ({groups}) or be a multiple "
                "of it",
                _fitting_tensor(model),
            )


def channels_divide_by_ranks(model: SplitModel) -> Iterator[Finding]:
    """Every rank has as many channels of the MLP."""
    for prefix, keys in model.stacks.items():
        yield from _divides(model, f"{prefix}ffn_hidden_size", keys.ffn_hidden_size)


def vocabulary_divides_by_ranks(model: SplitModel) -> Iterator[Finding]:
    """Every rank has as many rows of the vocabulary, whose padding is the same in all layouts, unlike Megatron's."""
    keys, ranks = model.keys, model.mesh.tensor
    if keys.override_vocab_size is None:  # known from the tokenizer only
        return
    _, padded = resolve_vocab_sizes(keys, keys.override_vocab_size)
    if padded % ranks:
        divisor = keys.make_vocab_size_divisible_by
        yield Finding.error(
            (TENSOR, "model.make_vocab_size_divisible_by", "model.override_vocab_size"),
            f"`tensor_model_parallel_size` ({ranks}) must divide the vocabulary of {padded}, padded to "
            f"`make_vocab_size_divisible_by` ({divisor})",
            f"model.make_vocab_size_divisible_by={math.lcm(divisor, ranks)}, or {_fitting_tensor(model)}",
        )


def _divides(model: SplitModel, key: str, value: int) -> Iterator[Finding]:
    ranks = model.mesh.tensor
    if value % ranks:
        yield Finding.error(
            (TENSOR, key),
            f"`tensor_model_parallel_size` ({ranks}) must divide `{key.rpartition('.')[2]}` ({value})",
            _fitting_tensor(model),
        )


def _fitting_tensor(model: SplitModel) -> str:
    """Return the override with the largest divisor of the tensor-parallel ranks that the model can be split over."""

    def fits(ranks: int) -> bool:
        split = replace(model, mesh=replace(model.mesh, tensor=ranks))
        keys, (_, padded) = model.stacks.values(), resolve_vocab_sizes(model.keys, model.keys.override_vocab_size or 1)
        groups = (each.num_query_groups or each.num_attention_heads for each in keys)
        sizes = [size for each in keys for size in (each.num_attention_heads, each.ffn_hidden_size)]
        sizes += [padded] if model.keys.override_vocab_size else []
        whole = all(size % ranks == 0 for size in sizes) and all(g % ranks == 0 or ranks % g == 0 for g in groups)
        return whole and not any(sequence_parallel_tokens_divide(split))

    return f"{TENSOR}={max(ranks for ranks in divisors(model.mesh.tensor) if ranks == 1 or fits(ranks))}"


def sequence_parallel_needs_ranks(model: SplitModel) -> Iterator[Finding]:
    """`sequence_parallel` shards the residual stream over the tensor-parallel ranks."""
    if model.mesh.sequence and model.mesh.tensor == 1:
        yield Finding.warning(
            (SEQUENCE, TENSOR),
            "`sequence_parallel` (True) has no effect with `tensor_model_parallel_size` (1)",
            f"{SEQUENCE}=False",
        )


def sequence_parallel_tokens_divide(model: SplitModel) -> Iterator[Finding]:
    """With `sequence_parallel`, every rank has as many tokens of a micro batch."""
    mesh = model.mesh
    if not mesh.sequence or mesh.tensor == 1:
        return
    for key, length in model.lengths.items():
        tokens = model.micro_batch * length // mesh.context
        if tokens % mesh.tensor:
            micro = mesh.tensor // math.gcd(mesh.tensor, length // mesh.context)
            shared = f" shared by {mesh.context} context-parallel ranks" if mesh.context > 1 else ""
            yield Finding.error(
                (SEQUENCE, TENSOR, "model.micro_batch_size", key),
                f"`tensor_model_parallel_size` ({mesh.tensor}) must divide the {tokens} tokens of a micro batch: "
                f"`micro_batch_size` ({model.micro_batch}) of `{key.rpartition('.')[2]}` ({length}){shared}",
                f"model.micro_batch_size={-(-model.micro_batch // micro) * micro}, or {SEQUENCE}=False",
            )


def own_blocks_are_not_split(model: SplitModel) -> Iterator[Finding]:
    """How the ranks share what a user's own block does between its parts is not known."""
    for prefix, keys in model.stacks.items():
        if model.mesh.tensor > 1 and is_own_block(keys.transformer_block_type):
            yield Finding.error(
                (TENSOR, f"{prefix}transformer_block_type"),
                f"`tensor_model_parallel_size` ({model.mesh.tensor}) is not supported with a `transformer_block_type` "
                f"of your own ({keys.transformer_block_type})",
                f"{TENSOR}=1",
            )


TENSOR_RULES: tuple[Rule, ...] = (
    own_blocks_are_not_split,
    heads_divide_by_ranks,
    groups_and_ranks_divide,
    channels_divide_by_ranks,
    vocabulary_divides_by_ranks,
    sequence_parallel_needs_ranks,
    sequence_parallel_tokens_divide,
)


# ---------------------------------------------------------------- context and expert parallelism


def sequences_divide_by_ranks(model: SplitModel) -> Iterator[Finding]:
    """Every context-parallel rank has as many tokens; of a causal sequence two parts, one early and one late."""
    ranks = model.mesh.context
    if ranks == 1:
        return
    bidirectional = {"model.seq_length"} if len(model.stacks) > 1 else set()
    bidirectional |= set(model.lengths) if isinstance(model.keys, BertKeys) else set()
    for key, length in model.lengths.items():
        parts = ranks if key in bidirectional else 2 * ranks
        if length % parts:
            causal = "" if key in bidirectional else "twice "
            fitting = max(size for size in divisors(ranks) if size == 1 or length % (size * parts // ranks) == 0)
            yield Finding.error(
                (CONTEXT, key),
                f"{causal}`context_parallel_size` ({ranks}) must divide `{key.rpartition('.')[2]}` ({length})",
                f"{CONTEXT}={fitting}, or {key}={-(-length // parts) * parts}",
            )


def comm_type_needs_ranks(model: SplitModel) -> Iterator[Finding]:
    """`cp_comm_type` says how context-parallel ranks communicate."""
    if model.comm_type != "p2p" and model.mesh.context == 1:
        yield Finding.warning(
            (COMM_TYPE, CONTEXT),
            f"`cp_comm_type` ({model.comm_type}) has no effect with `context_parallel_size` (1)",
            f"{COMM_TYPE}=p2p",
        )


def exchanged_heads_divide(model: SplitModel) -> Iterator[Finding]:
    """With `a2a` a context-parallel rank attends with its share of the heads of a tensor-parallel rank."""
    mesh = model.mesh
    if model.comm_type != "a2a" or mesh.context == 1:
        return
    for prefix, keys in model.stacks.items():
        groups = keys.num_query_groups or keys.num_attention_heads
        for name, heads in (("num_attention_heads", keys.num_attention_heads), ("num_query_groups", groups)):
            local = max(1, heads // mesh.tensor)
            if local % mesh.context:
                split = f", the share of a tensor-parallel rank of {heads}" if mesh.tensor > 1 else ""
                yield Finding.error(
                    (COMM_TYPE, CONTEXT, f"{prefix}{name}"),
                    f"`cp_comm_type` (a2a) exchanges heads: `context_parallel_size` ({mesh.context}) must divide "
                    f"`{name}` ({local}{split})",
                    f"{COMM_TYPE}=p2p, or {CONTEXT}={math.gcd(local, mesh.context)}",
                )
                break


def experts_divide_by_ranks(model: SplitModel) -> Iterator[Finding]:
    """Every expert-parallel rank has as many experts, of the ranks of a pipeline stage."""
    mesh = model.mesh
    if mesh.expert == 1:
        return
    stage = mesh.data * mesh.context * mesh.tensor
    if not model.moe_stacks:
        prefix = next(reversed(model.stacks))
        yield Finding.error(
            (EXPERT, f"{prefix}num_moe_experts"),
            f"`expert_model_parallel_size` ({mesh.expert}) needs a model with experts",
            f"{EXPERT}=1, or {prefix}num_moe_experts={max(2, mesh.expert)}",
        )
    fitting = max(
        size
        for size in divisors(stage)
        if size <= mesh.expert and all((keys.num_moe_experts or 1) % size == 0 for keys in model.moe_stacks.values())
    )
    for prefix, keys in model.moe_stacks.items():
        if (keys.num_moe_experts or 1) % mesh.expert:
            yield Finding.error(
                (EXPERT, f"{prefix}num_moe_experts"),
                f"`expert_model_parallel_size` ({mesh.expert}) must divide `num_moe_experts` ({keys.num_moe_experts})",
                f"{EXPERT}={fitting}",
            )
    if stage % mesh.expert:
        yield Finding.error(
            (EXPERT, "trainer.devices"),
            f"`expert_model_parallel_size` ({mesh.expert}) must divide the {stage} ranks with different data, context "
            "or tensor-parallel parts",
            f"{EXPERT}={fitting}",
        )


def experts_need_sequence_parallel(model: SplitModel) -> Iterator[Finding]:
    """With tensor parallelism, experts compute the tokens of their own rank, so that these must differ (Megatron)."""
    mesh = model.mesh
    if model.moe_stacks and mesh.tensor > 1 and not mesh.sequence:
        prefix = next(iter(model.moe_stacks))
        yield Finding.error(
            (SEQUENCE, TENSOR, f"{prefix}num_moe_experts"),
            f"`num_moe_experts` ({model.moe_stacks[prefix].num_moe_experts}) with `tensor_model_parallel_size` "
            f"({mesh.tensor}) needs `sequence_parallel`: otherwise every rank would compute the same tokens",
            f"{SEQUENCE}=True",
        )


OTHER_RULES: tuple[Rule, ...] = (
    sequences_divide_by_ranks,
    comm_type_needs_ranks,
    exchanged_heads_divide,
    experts_divide_by_ranks,
    experts_need_sequence_parallel,
)
