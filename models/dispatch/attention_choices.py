"""All attentions of a model with the kinds of call they make. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...kernels.attention.call_spec import AttentionCall
from ..config.batch_shape import BatchSpec
from ..config.bert import BertSlice
from ..config.dense_stack import AttentionSlice
from ..config.families import FamilySlice
from ..config.t5 import T5Slice
from .attention_calls import CallContext, CallKind, attention_calls
from .context_calls import ContextSplit, check_context_parallel, context_attention_slice, context_call


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    """One attention of a model.

    Attributes:
        name: `encoder`, `decoder` or `cross` in T5; empty in a model with one attention.
        attention: slice of the attention.
        calls: attention call of each kind.
        uses_kv_cache: generation is incremental, with a KV cache.
    """

    name: str
    attention: AttentionSlice
    calls: Mapping[CallKind, AttentionCall]
    uses_kv_cache: bool = True

    def label(self, kind: CallKind) -> str:
        """Return the label of a kind of call: `encoder training`, or `training` in a model with one attention."""
        return f"{self.name} {kind}".strip()


def plan_attentions(
    model: FamilySlice, batch_spec: BatchSpec, context: CallContext, context_parallel: ContextSplit | None = None
) -> Iterator[PlannedAttention]:
    """Yield all attentions of a model.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples of training and evaluation. In generation, prompts and outputs are never
            packed.
        context: properties common to all calls.
        context_parallel: the calls of a rank of these, without generation; None for one rank.

    Raises:
        ValueError: the model cannot be split over the context-parallel ranks.
    """
    planned = _plan_attentions(model, batch_spec, context)
    if context_parallel is None:
        yield from planned
        return
    check_context_parallel(model, batch_spec, context_parallel)
    for each in planned:
        across = each.name == "cross"  # the decoder's queries, the encoder's keys
        bidirectional = not across and not each.attention.causal
        calls: dict[CallKind, AttentionCall] = {
            kind: context_call(
                call, context_parallel, bidirectional=bidirectional, keys_in_order=True if across else None
            )
            for kind, call in each.calls.items()
            if kind != "generation"
        }
        attention = context_attention_slice(each.attention, context_parallel, context["device"])
        yield PlannedAttention(each.name, attention, calls, each.uses_kv_cache)


def _plan_attentions(model: FamilySlice, batch_spec: BatchSpec, context: CallContext) -> Iterator[PlannedAttention]:
    match model:
        case T5Slice():
            encoder, decoder = model.encoder, model.decoder
            inside = encoder.stack.attention
            yield _self_attention("encoder", inside, encoder.max_positions, batch_spec, context, bidirectional=True)
            written = batch_spec.decoder_seq_length
            yield _self_attention(
                "decoder", decoder.stack.attention, decoder.max_positions, batch_spec, context, seq_length=written
            )
            calls = attention_calls(
                model.cross_attention,
                context,
                samples=(written, batch_spec.seq_length),
                longest=(decoder.max_positions or written, encoder.max_positions or batch_spec.seq_length),
                packed=batch_spec.packed,
                padded=batch_spec.padded,
            )
            yield PlannedAttention("cross", model.cross_attention, calls)
        case BertSlice():
            yield _self_attention(
                "", model.stack.attention, model.max_positions, batch_spec, context, bidirectional=True
            )
        case _:
            yield _self_attention("", model.stack.attention, model.max_positions, batch_spec, context)


def _self_attention(
    name: str,
    attention: AttentionSlice,
    max_positions: int | None,
    batch_spec: BatchSpec,
    context: CallContext,
    *,
    seq_length: int | None = None,
    bidirectional: bool = False,
) -> PlannedAttention:
    """Plan the self-attention of a stack; `seq_length` is that of the samples, None for their own."""
    length = batch_spec.seq_length if seq_length is None else seq_length
    longest = max_positions or length
    calls = attention_calls(
        attention,
        context,
        samples=(length, length),
        longest=(longest, longest),
        packed=batch_spec.packed,
        padded=batch_spec.padded if bidirectional else None,
    )
    return PlannedAttention(name, attention, calls, uses_kv_cache=not bidirectional)
