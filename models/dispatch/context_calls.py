"""Attention calls of one rank under context parallelism, and what its exchanges cannot compute. Pure: no torch.

| `cp_comm_type` | what the ranks exchange | calls of a rank |
|---|---|---|
| `a2a` | Q, K, V and output, all-to-all (Ulysses, arXiv 2309.14509) | whole sequences, a share of the heads |
| `all_gather` | K and V, all-gather (Llama 3, arXiv 2407.21783) | each run of its queries against all keys |
| `p2p` | K and V, from rank to rank (ring, arXiv 2310.01889) | its queries against one rank's keys at a time |
| `a2a+p2p` | all-to-all among neighbouring ranks, a ring between (arXiv 2405.07719) | both |

In causal attention a rank has two runs of tokens, of 2 * ranks: one from the start and one from the end of the sequence
(zigzag), so that all ranks see as many keys. In bidirectional attention it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ...kernels.attention.call_spec import AttentionCall, Bias
from ..config.batch_shape import BatchSpec
from ..config.dense_stack import AttentionSlice
from ..config.families import FamilySlice
from ..config.t5 import T5Slice

ContextExchange = Literal["a2a", "all_gather", "p2p", "a2a+p2p"]


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """How ranks share the tokens of each sequence (context parallelism).

    Attributes:
        size: the ranks (`context_parallel_size`).
        exchange: what they exchange in attention (`cp_comm_type`).
        neighbours: ranks of an all-to-all in `a2a+p2p` (the first of `hierarchical_context_parallel_sizes`); divides
            `size`. Ignored otherwise.

    Raises:
        ValueError: a value is invalid.
    """

    size: int
    exchange: ContextExchange = "p2p"
    neighbours: int = 1

    def __post_init__(self) -> None:
        if self.exchange not in get_args(ContextExchange):
            raise ValueError(f"`cp_comm_type` ({self.exchange}) must be one of {', '.join(get_args(ContextExchange))}.")
        if self.exchange == "a2a+p2p" and (self.size % self.neighbours or not 1 < self.neighbours < self.size):
            raise ValueError(
                f"`hierarchical_context_parallel_sizes` ({self.neighbours} ranks in an all-to-all) must divide "
                f"`context_parallel_size` ({self.size}) into several rings of several ranks; use cp_comm_type=a2a or "
                "p2p."
            )

    @property
    def head_ranks(self) -> int:
        """Ranks of an all-to-all, of which each has a share of the heads; 1 without."""
        return {"a2a": self.size, "a2a+p2p": self.neighbours}.get(self.exchange, 1)

    @property
    def ring_ranks(self) -> int:
        """Ranks of a ring; 1 without."""
        return self.size // self.head_ranks if self.exchange in ("p2p", "a2a+p2p") else 1


# ---------------------------------------------------------------- calls


def context_call(
    call: AttentionCall, split: ContextSplit, *, bidirectional: bool, keys_in_order: bool | None = None
) -> AttentionCall:
    """Return the longest call that a rank makes for an attention call of whole sequences.

    Args:
        call: the call of one process.
        split: how the ranks share the tokens.
        bidirectional: each rank has one run of queries, not two.
        keys_in_order: each rank has one run of keys; None: as of queries.
    """
    heads, groups = call.heads // split.head_ranks, call.groups // split.head_ranks
    call = replace(call, heads=heads, groups=groups, split=True)
    if split.exchange == "a2a":
        return call
    keys_in_order = bidirectional if keys_in_order is None else keys_in_order
    has_places = call.window is not None or call.bias != "none" or call.dropout > 0
    query_runs = 2 if not bidirectional and has_places else 1
    if split.exchange == "all_gather":
        query_runs = 2 if call.causal else query_runs
        queries, keys, moved = call.queries // (query_runs * split.size), call.keys, not call.causal
    else:
        key_runs = 2 if not keys_in_order and has_places else 1
        queries, keys = call.queries // (query_runs * split.ring_ranks), call.keys // (key_runs * split.ring_ranks)
        moved = True
    if moved and call.bias != "none":  # distances from the end of a block are not those from the end of the sequence
        bias: Bias = "distance_with_gradient" if call.bias_requires_grad else "distance"
        reach = max(call.reach if call.bias_is_distance_table else 1, queries - 1, keys - 1)
        return replace(call, queries=queries, keys=keys, bias=bias, reach=reach)
    return replace(call, queries=queries, keys=keys)


def context_attention_slice(attention: AttentionSlice, split: ContextSplit, device: str) -> AttentionSlice:
    """Return an attention with the backend that its exchange requires.

    Raises:
        ValueError: the keys of the attention exclude it.
    """
    if split.ring_ranks == 1:
        return attention
    allowed = ("auto", "flash", "triton", "reference")
    if attention.backend not in allowed or attention.use_flash_attention is False:
        name, value = ("attention_backend", attention.backend)
        if attention.backend in allowed:
            name, value = "use_flash_attention", False
        raise ValueError(
            f"`{name}` ({value}) cannot be combined with `cp_comm_type` ({split.exchange}), which merges partial "
            "results by their log-sum-exp, for which it runs on this package's flash kernels; use "
            "attention_backend=auto, or cp_comm_type=a2a."
        )
    if attention.backend in ("triton", "reference"):
        return attention
    return replace(attention, backend="triton" if device == "cuda" else "reference")


# ---------------------------------------------------------------- rules


def check_context_parallel(model: FamilySlice, batch_spec: BatchSpec, split: ContextSplit) -> None:
    """Check that a model gives the results of one process with its tokens split over ranks.

    Args:
        model: slice of the model; under tensor parallelism that of a rank.
        batch_spec: shape of whole samples.
        split: how the ranks share the tokens.

    Raises:
        ValueError: it does not; the message names a key and a cure.
    """
    problems = [*_length_problems(model, batch_spec, split)]
    for name, attention in _attentions(model):
        of = f" in `{name}`" if name else ""
        problems += [problem + of + cure for problem, cure in _attention_problems(attention, batch_spec, split, name)]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def _attentions(model: FamilySlice) -> Iterator[tuple[str, AttentionSlice]]:
    if isinstance(model, T5Slice):
        yield "encoder", model.encoder.stack.attention
        yield "decoder", model.decoder.stack.attention
        yield "cross_attention", model.cross_attention
    else:
        yield "", model.stack.attention


def _length_problems(model: FamilySlice, form: BatchSpec, split: ContextSplit) -> Iterator[str]:
    for key, length, stack in zip(
        ("seq_length", "seq_length_dec") if isinstance(model, T5Slice) else ("encoder_seq_length",),
        (form.seq_length, form.decoder_seq_length),
        model.stacks,
        strict=False,
    ):
        runs = split.size * (2 if stack.attention.causal else 1)
        if length % runs:
            twice = "twice " if stack.attention.causal else ""
            yield (
                f"`{key}` ({length}) must be a multiple of {runs}, {twice}`context_parallel_size` ({split.size}); pad "
                f"it to {-(-length // runs) * runs}."
            )


def _attention_problems(
    attention: AttentionSlice, form: BatchSpec, split: ContextSplit, name: str
) -> Iterator[tuple[str, str]]:
    exchange = f"`cp_comm_type` ({split.exchange})"
    for key, heads in (("num_attention_heads", attention.heads), ("num_query_groups", attention.groups)):
        if heads % split.head_ranks:
            cure = "; use cp_comm_type=all_gather, or fewer ranks."
            yield (
                f"`{key}` ({heads} on each rank) must be a multiple of the {split.head_ranks} ranks of {exchange}",
                cure,
            )
    bias = attention.position_bias
    if bias is not None and bias.learned and split.ring_ranks > 1:
        cure = ", whose gradient takes all keys of a query in one call; use cp_comm_type=a2a or all_gather."
        yield f"{exchange} does not support a learned `position_embedding_type` ({bias.key})", cure
    if attention.softmax_type != "vanilla" and split.ring_ranks > 1:
        cure = ", since each block of keys would count the sinks again; use cp_comm_type=a2a or all_gather."
        yield f"{exchange} does not support `softmax_type` ({attention.softmax_type})", cure
    if attention.dropout and form.packed and split.exchange != "a2a":
        cure = ", whose masks are functions of places in them; use cp_comm_type=a2a, or attention_dropout=0."
        yield f"{exchange} does not support `attention_dropout` ({attention.dropout}) of packed documents", cure
    places = [f"`position_embedding_type` ({bias.key})"] if bias is not None else []
    places += [f"`window_size` ({list(attention.window)})"] if attention.window is not None else []
    aligned = split.exchange == "a2a" or (split.exchange == "all_gather" and attention.causal)
    if form.packed and places and not aligned:
        cure = ": a document that a block of keys cuts has no fixed distance from its end; use cp_comm_type=a2a."
        yield f"{exchange} does not support packed samples with {' and '.join(places)}", cure
