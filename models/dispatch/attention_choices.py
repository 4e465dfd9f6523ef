"""All attentions of a model with the kinds of call they make. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from ...kernels.attention.call_spec import AttentionCall, DType
from ..config.batch_shape import BatchSpec
from ..config.bert import BertSlice
from ..config.families import FamilySlice
from ..config.stack import AttentionSlice
from ..config.t5 import T5Slice
from .attention_calls import CallKind, attention_call, attention_calls


class CallContext(TypedDict):
    """Properties common to all attention calls of a run; see `AttentionCall`."""

    device: str
    capability: tuple[int, int] | None
    dtype: DType
    batch: int
    deterministic: bool


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


def plan_attentions(model: FamilySlice, batch_spec: BatchSpec, context: CallContext) -> Iterator[PlannedAttention]:
    """Yield all attentions of a model.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples of training and evaluation. In generation, prompts and outputs are never
            packed.
        context: properties common to all calls.
    """
    match model:
        case T5Slice():
            yield _encoder("encoder", model.encoder.stack.attention, model.encoder.max_positions, batch_spec, context)
            own, longest = model.decoder.stack.attention, model.decoder.max_positions or batch_spec.decoder_seq_length
            calls = attention_calls(
                own, seq_length=batch_spec.decoder_seq_length, max_length=longest, packed=batch_spec.packed, **context
            )
            yield PlannedAttention("decoder", own, calls)
            yield _cross(model, batch_spec, context)
        case BertSlice():
            yield _encoder("", model.stack.attention, model.max_positions, batch_spec, context)
        case _:
            longest = model.max_positions or batch_spec.seq_length
            attention = model.stack.attention
            calls = attention_calls(
                attention, seq_length=batch_spec.seq_length, max_length=longest, packed=batch_spec.packed, **context
            )
            yield PlannedAttention("", attention, calls)


def _encoder(
    name: str, attention: AttentionSlice, max_positions: int | None, form: BatchSpec, facts: CallContext
) -> PlannedAttention:
    def call(length: int, *, training: bool = False, any_length: bool = False) -> AttentionCall:
        packed = form.packed and not any_length
        return attention_call(
            attention,
            queries=length,
            keys=length,
            packed=packed,
            padding=any_length or (form.padded and not packed),
            training=training,
            any_length=any_length,
            **facts,
        )

    calls: dict[CallKind, AttentionCall] = {
        "training": call(form.seq_length, training=True),
        "evaluation": call(form.seq_length),
        "generation": call(max_positions or form.seq_length, any_length=True),
    }
    return PlannedAttention(name, attention, calls, uses_kv_cache=False)


def _cross(model: T5Slice, form: BatchSpec, facts: CallContext) -> PlannedAttention:
    attention = model.cross_attention

    def call(queries: int, keys: int, *, training: bool = False, any_length: bool = False) -> AttentionCall:
        packed = form.packed and not any_length
        described = attention_call(
            attention,
            queries=queries,
            keys=keys,
            packed=packed,
            padding=any_length or (form.padded and not packed),
            training=training,
            any_length=any_length,
            **facts,
        )
        if attention.position_bias is None:
            return described
        # Attention aligns the ends of queries and keys, but their positions are aligned at the start.
        return replace(described, reach=described.reach + abs(keys - queries))

    longest = model.decoder.max_positions or form.decoder_seq_length, model.encoder.max_positions or form.seq_length
    calls: dict[CallKind, AttentionCall] = {
        "training": call(form.decoder_seq_length, form.seq_length, training=True),
        "evaluation": call(form.decoder_seq_length, form.seq_length),
        "generation": call(*longest, any_length=True),
    }
    return PlannedAttention("cross", attention, calls)
