"""Incremental decoding of GPT and T5 with a KV cache."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from .fused_decoding import can_fuse_decode_step
from .gpt import GPT
from .kv_cache import CrossAttentionCache, KVCache, num_slots
from .layer import Layer
from .layers.attention_bias import RelativeBias, ScoreBias
from .layers.compiling import eager_layers
from .lm_head import add_decode_position_embeddings, add_position_embeddings
from .stack import Stack
from .t5 import T5


class Decoder(Protocol):
    """Incremental decoder of a batch of sequences. Shapes never change, so a step can be captured as a CUDA graph.

    Attributes:
        batch_size: batch size.
        max_length: maximal sequence length; further tokens overwrite the last one.
    """

    batch_size: int
    max_length: int

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor | None:
        """Prefill a new batch of prompts.

        Args:
            tokens: int64 (rows, tokens), padded on the right.
            lengths: int64 (rows,), number of real tokens, at least one.

        Returns:
            Logits of the next token of each row, (rows, padded_vocab_size); None if `step` takes a start token first.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token per sequence, int64 (rows,); return the next logits, (rows, padded_vocab_size)."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`, int64 (rows,), as beam search does."""
        ...


class GPTDecoder:
    """Incremental decoder of a GPT.

    Args:
        model: in evaluation mode.
        batch_size: batch size.
        max_length: maximal sequence length, prompt included.

    Raises:
        ValueError: the model has fewer positions than `max_length`.
    """

    def __init__(self, model: GPT, batch_size: int, max_length: int) -> None:
        _check_length("max_length", max_length, max_input_length(model))
        self.batch_size = batch_size
        self.max_length = max_length
        self._model = model
        self._virtual_tokens = _num_virtual_tokens(model)
        max_length += self._virtual_tokens
        self._cache = _build_cache(model.decoder, model.token_embedding.weight, batch_size, max_length)
        self._terms = _step_terms(model.decoder, max_length)
        weight, layers = model.token_embedding.weight, model.decoder.layers
        self._fused = not model.decoder.fp32_residual and can_fuse_decode_step(layers, batch_size, weight)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """See `Decoder.prefill`."""
        model = self._model
        lengths = lengths + self._virtual_tokens
        self._cache.reset(lengths)
        embedded = model.token_embedding(tokens)
        embedded = embedded if model.prompt is None else model.prompt(embedded)
        hidden = _scaled(add_position_embeddings(embedded, model.position_embedding, None), model)
        terms = model.decoder.score_positions
        with eager_layers(model.compiled):
            hidden = model.decoder.forward_cached(
                hidden,
                self._cache.layers,
                positions=self._cache.positions[:, None] if hidden.shape[1] == 1 else None,
                terms=None if terms is None else terms(hidden.shape[1], hidden.shape[1]),
            )
        return model.compute_logits(hidden[torch.arange(self.batch_size, device=tokens.device), lengths - 1])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        model, positions = self._model, self._cache.advance()
        embedded = add_decode_position_embeddings(
            model.token_embedding(tokens[:, None]), model.position_embedding, positions
        )
        hidden = _scaled(embedded, model)
        hidden = model.decoder.forward_cached(
            hidden, self._cache.layers, positions=positions, terms=self._terms, fused=self._fused
        )
        return model.compute_logits(hidden[:, 0])

    def reorder(self, rows: Tensor) -> None:
        """See `Decoder.reorder`."""
        self._cache.reorder(rows)


class T5Decoder:
    """Incremental decoder of a T5.

    Args:
        model: in evaluation mode.
        batch_size: batch size of the decoder.
        max_length: maximal length of a decoder sequence.
        max_encoder_length: maximal length of an encoder sequence.
        rows_per_encoding: number of consecutive decoder rows per encoder sequence, as of beams.

    Raises:
        ValueError: `batch_size` is not a multiple of `rows_per_encoding`, or the model has too few positions.
    """

    def __init__(
        self, model: T5, batch_size: int, max_length: int, max_encoder_length: int, rows_per_encoding: int = 1
    ) -> None:
        if batch_size % rows_per_encoding:
            raise ValueError(
                f"`batch_size` ({batch_size}) must be a multiple of `rows_per_encoding` ({rows_per_encoding})."
            )
        _check_length("max_encoder_length", max_encoder_length, max_input_length(model))
        _check_length("max_length", max_length, model.max_positions[1])
        self.batch_size = batch_size
        self.max_length = max_length
        self._model = model
        self._virtual_tokens = _num_virtual_tokens(model)
        weight = model.output_embedding.weight
        self._cache = _build_cache(model.decoder, weight, batch_size, max_length)
        self._terms = _step_terms(model.decoder, max_length)
        self._memory_lengths = torch.zeros(batch_size // rows_per_encoding, dtype=torch.int64, device=weight.device)
        bias = None if model.cross_positions is None else RelativeBias.forward(model.cross_positions, 1, 1)
        self._cross_bias = None if bias is None else bias.distance_bias
        self._memories: list[tuple[Tensor, Tensor]] = []
        for layer in model.decoder.layers:
            cross = cast(Layer, layer).cross_attention
            assert cross is not None
            shape = (
                batch_size // rows_per_encoding,
                cross.groups,
                max_encoder_length + self._virtual_tokens,
                cross.head_dim,
            )
            key, value = (weight.new_zeros(shape, dtype=autocast_dtype(weight)) for _ in range(2))
            self._memories.append((key, value))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Encode sequences, int64 (batch_size / rows_per_encoding, tokens), with `lengths`; the first `step` takes a
        start token.
        """
        model, count = self._model, tokens.shape[1] + self._virtual_tokens
        self._cache.reset(torch.zeros_like(self._cache.lengths))
        self._memory_lengths.copy_(lengths + self._virtual_tokens)
        padding = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        hidden = model.encode(tokens, padding).hidden[:, :count]
        for layer, cached in zip(model.decoder.layers, self._memories, strict=True):
            cross = cast(Layer, layer).cross_attention
            assert cross is not None
            for memory, projected in zip(cached, cross.keys_and_values(hidden), strict=True):
                memory[:, :, :count] = projected.transpose(1, 2)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        model, positions = self._model, self._cache.advance()
        memories = [
            CrossAttentionCache(*cached, self._memory_lengths, positions[:, 0], self._cross_bias)
            for cached in self._memories
        ]
        hidden = add_decode_position_embeddings(
            model.output_embedding(tokens[:, None]), model.decoder_position_embedding, positions
        )
        hidden = model.decoder.forward_cached(
            hidden, self._cache.layers, positions=positions, terms=self._terms, memories=memories
        )[:, 0]
        return model.compute_logits(hidden if model.output_scale == 1.0 else hidden * model.output_scale)

    def reorder(self, rows: Tensor) -> None:
        """See `Decoder.reorder`; a row must be replaced by one of the same encoder sequence."""
        self._cache.reorder(rows)


def max_input_length(model: GPT | T5) -> int | None:
    """Return the maximal input length of a model, None for no limit; virtual tokens take positions too."""
    positions = model.max_positions[0] if isinstance(model, T5) else model.max_positions
    return None if positions is None else positions - _num_virtual_tokens(model)


def kv_cache_bytes(
    model: GPT | T5, batch_size: int, max_length: int, max_encoder_length: int = 0, rows_per_encoding: int = 1
) -> int:
    """Return the bytes of a decoder's KV cache; arguments as of `GPTDecoder` and `T5Decoder`."""
    virtual_tokens = _num_virtual_tokens(model)
    elements = 0
    for module in model.decoder.layers:
        layer = cast(Layer, module)
        window = -1 if layer.attention.window is None else layer.attention.window[0]
        layer_slots = num_slots(max_length + (0 if isinstance(model, T5) else virtual_tokens), window)
        elements += 2 * batch_size * layer_slots * layer.attention.groups * layer.attention.head_dim
        if (cross := layer.cross_attention) is not None:
            elements += (
                2
                * batch_size
                // rows_per_encoding
                * (max_encoder_length + virtual_tokens)
                * cross.groups
                * cross.head_dim
            )
    return elements * autocast_dtype(model.token_embedding.weight).itemsize


def _num_virtual_tokens(model: GPT | T5) -> int:
    """Return the number of virtual tokens (p-tuning) in front of every input."""
    return 0 if model.prompt is None else len(model.prompt)


def _check_length(name: str, length: int, longest: int | None) -> None:
    if length < 1 or (longest is not None and length > longest):
        raise ValueError(
            f"`{name}` ({length}) must be from 1 to {longest or 'any number'}, the positions of the model."
        )


def _build_cache(stack: Stack, weight: Tensor, rows: int, slots: int) -> KVCache:
    attention = cast(Layer, next(iter(stack.layers))).attention
    return KVCache(
        len(stack.layers),
        batch_size=rows,
        groups=attention.groups,
        slots=slots,
        head_dim=attention.head_dim,
        window=-1 if attention.window is None else attention.window[0],
        dtype=autocast_dtype(weight),
        device=weight.device,
    )


def _step_terms(stack: Stack, slots: int) -> ScoreBias | None:
    """Return the position-dependent score terms of a decode step over `slots` keys; the same for every step."""
    return None if stack.score_positions is None else stack.score_positions(1, slots)


def _scaled(hidden: Tensor, model: GPT) -> Tensor:
    return hidden if model.embedding_scale == 1.0 else hidden * model.embedding_scale
