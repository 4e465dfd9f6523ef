"""Inputs of a layer besides the hidden states."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...kernels.attention.packed_sequences import PackedSequences
from ..dispatch.attention_calls import CallKind
from ..kv_cache import CrossAttentionCache, LayerKVCache
from .attention_bias import ScoreBias
from .dropout import LayerDropout
from .position_embeddings import RotaryTables


class Memory(NamedTuple):
    """Encoder output for the cross-attention of every decoder layer.

    Attributes:
        hidden: encoder output after its final norm, (batch, keys, hidden_size).
        padding: bool (batch, keys), True for real tokens; None: all are real.
        packed: document boundaries of decoder rows (queries) and encoder rows (keys), for packed samples.
        distance_bias: (heads, 2 R + 1), score bias by distance, as in `ScoreBias`; None for none.
        tokens: place of each of its tokens in the micro batch, as in `LayerDropout`; None outside training.
    """

    hidden: Tensor
    padding: Tensor | None = None
    packed: PackedSequences | None = None
    distance_bias: Tensor | None = None
    tokens: Tensor | None = None


class LayerContext(NamedTuple):
    """Inputs of a layer besides the hidden states; shared by all layers of a stack, except caches and
    dropouts.

    A tuple of tensors, which torch.compile, recomputation and FSDP2 hooks support as an argument.

    Attributes:
        kind: kind of call, which selects the attention backend.
        rotary: cos/sin tables for rotary embedding, or None.
        terms: position-dependent terms added to the self-attention scores, or None.
        packed: document boundaries of packed samples, for self-attention within documents.
        padding: bool (batch, tokens), True for real tokens, the only ones attended to; None: all are real. Ignored by
            causal attention: padding is at the end of each row, where no real token attends to it.
        routed: bool (batch, tokens of whole sequences), True for tokens that are routed to experts, possibly fewer than
            are attended to; None: those of `padding`.
        memory: encoder output, or its cached keys and values, for cross-attention; None in a stack without it.
        batch: samples of the hidden states, if these are sharded over tokens (sequence parallelism); None if not.
        cache: KV cache of the layer. Several tokens are a prefill, which fills it; one token is a decode step, which is
            appended and attends to all of it. None without.
        dropout: dropouts of the layer in this forward; None outside training or without dropout.
        recompute: this forward recomputes the layer as a whole, also if others do not.
    """

    kind: CallKind
    rotary: RotaryTables | None = None
    terms: ScoreBias | None = None
    packed: PackedSequences | None = None
    padding: Tensor | None = None
    routed: Tensor | None = None
    memory: Memory | CrossAttentionCache | None = None
    cache: LayerKVCache | None = None
    batch: int | None = None
    dropout: LayerDropout | None = None
    recompute: bool = False
