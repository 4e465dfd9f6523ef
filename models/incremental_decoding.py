"""Texts that a model goes on with, token by token, over a cache of keys and values."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from .gpt import GPT
from .kv_cache import CachedMemory, KVCache, slots_of
from .layers.attention_bias import RelativeBias, ScoreTerms
from .layers.compiling import layers_as_written
from .lm_head import add_places, add_positions, dtype_of_products, token_logits
from .stack import Layer, Stack
from .t5 import T5


class Decoder(Protocol):
    """A batch of texts that grow together. Shapes never change, so that a step can be recorded as a CUDA graph.

    Attributes:
        rows: texts of the batch.
        slots: tokens that a text can have; what is beyond them is computed as if it were the last.
    """

    rows: int
    slots: int

    def begin(self, tokens: Tensor, lengths: Tensor) -> Tensor | None:
        """Read the beginnings of texts, and forget those before.

        Args:
            tokens: int64 (rows, tokens), real ones first.
            lengths: int64 (rows,), how many are real, at least one.

        Returns:
            Logits of the token that follows each, (rows, padded_vocab_size); None where `step` reads the first.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Go on by one token of each text, int64 (rows,); returns as `begin`."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Let row r go on as row `rows[r]`; int64 (rows,)."""
        ...


class GPTDecoder:
    """Texts that a GPT goes on with.

    Args:
        model: in evaluation mode.
        rows: texts at once.
        slots: tokens of the longest text, those that are read included.

    Raises:
        ValueError: the model has fewer positions than `slots`.
    """

    def __init__(self, model: GPT, rows: int, slots: int) -> None:
        _check_slots("slots", slots, longest_read(model))
        self.rows = rows
        self.slots = slots
        self._model = model
        self._first = _in_front(model)
        self._cache = _cache_of(model.decoder, model.token_embedding.weight, rows, slots + self._first)
        self._terms = _terms_of(model.decoder, slots + self._first)

    @torch.no_grad()
    def begin(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """As `Decoder.begin`."""
        model = self._model
        lengths = lengths + self._first
        self._cache.begin(lengths)
        embedded = model.token_embedding(tokens)
        embedded = embedded if model.prompt is None else model.prompt(embedded)
        hidden = _scaled(add_positions(embedded, model.position_embedding, None), model)
        terms = model.decoder.score_positions
        with layers_as_written(model.compiled):
            hidden = model.decoder.go_on(
                hidden,
                self._cache.layers,
                positions=self._cache.positions[:, None] if hidden.shape[1] == 1 else None,
                terms=None if terms is None else terms(hidden.shape[1], hidden.shape[1]),
            )
        return self._logits(hidden[torch.arange(self.rows, device=tokens.device), lengths - 1])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As `Decoder.step`."""
        model, places = self._model, self._cache.advance()
        hidden = _scaled(add_places(model.token_embedding(tokens[:, None]), model.position_embedding, places), model)
        hidden = model.decoder.go_on(hidden, self._cache.layers, positions=places, terms=self._terms)
        return self._logits(hidden[:, 0])

    def reorder(self, rows: Tensor) -> None:
        """As `Decoder.reorder`."""
        self._cache.reorder(rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        model = self._model
        return token_logits(hidden, model.output_weight, vocab_size=model.vocab_size, softcap=model.logits_softcap)


class T5Decoder:
    """Texts that a T5 writes about texts that it has read.

    Args:
        model: in evaluation mode.
        rows: texts that are written at once.
        slots: tokens of the longest of them.
        memory_slots: tokens of the longest text that is read.
        per_memory: so many rows, one after the other, are about one text that was read.

    Raises:
        ValueError: the model has fewer positions than that.
    """

    def __init__(self, model: T5, rows: int, slots: int, memory_slots: int, per_memory: int = 1) -> None:
        if rows % per_memory:
            raise ValueError(f"`rows` ({rows}) must be a multiple of `per_memory` ({per_memory}).")
        _check_slots("memory_slots", memory_slots, longest_read(model))
        _check_slots("slots", slots, model.max_positions[1])
        self.rows = rows
        self.slots = slots
        self._model = model
        self._first = _in_front(model)
        weight = model.decoder_embedding.weight
        self._cache = _cache_of(model.decoder, weight, rows, slots)
        self._terms = _terms_of(model.decoder, slots)
        self._memory_lengths = torch.zeros(rows // per_memory, dtype=torch.int64, device=weight.device)
        bias = None if model.cross_positions is None else RelativeBias.forward(model.cross_positions, 1, 1)
        self._cross_bias = None if bias is None else bias.distance_bias
        self._memories: list[tuple[Tensor, Tensor]] = []
        for layer in model.decoder.layers:
            cross = cast(Layer, layer).cross_attention
            assert cross is not None
            shape = (rows // per_memory, cross.groups, memory_slots + self._first, cross.head_dim)
            key, value = (weight.new_zeros(shape, dtype=dtype_of_products(weight)) for _ in range(2))
            self._memories.append((key, value))

    @torch.no_grad()
    def begin(self, tokens: Tensor, lengths: Tensor) -> None:
        """Read texts, int64 (rows / per_memory, tokens), of so many `lengths`; the first `step` takes a start token."""
        model, count = self._model, tokens.shape[1] + self._first
        self._cache.begin(torch.zeros_like(self._cache.lengths))
        self._memory_lengths.copy_(lengths + self._first)
        padding = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        hidden = model.encode(tokens, padding).hidden[:, :count]
        for layer, cached in zip(model.decoder.layers, self._memories, strict=True):
            cross = cast(Layer, layer).cross_attention
            assert cross is not None
            for memory, given in zip(cached, cross.keys_and_values(hidden), strict=True):
                memory[:, :, :count] = given.transpose(1, 2)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As `Decoder.step`."""
        model, places = self._model, self._cache.advance()
        memories = [
            CachedMemory(*cached, self._memory_lengths, places[:, 0], self._cross_bias) for cached in self._memories
        ]
        hidden = add_places(model.decoder_embedding(tokens[:, None]), model.decoder_position_embedding, places)
        hidden = model.decoder.go_on(
            hidden, self._cache.layers, positions=places, terms=self._terms, memories=memories
        )[:, 0]
        return model.logits_of(hidden if model.output_scale == 1.0 else hidden * model.output_scale)

    def reorder(self, rows: Tensor) -> None:
        """As `Decoder.reorder`; rows go on as rows of the same memory."""
        self._cache.reorder(rows)


def longest_read(model: GPT | T5) -> int | None:
    """Tokens of the longest text that a model reads, None for any: learned vectors in front take positions too."""
    positions = model.max_positions[0] if isinstance(model, T5) else model.max_positions
    return None if positions is None else positions - _in_front(model)


def cache_bytes(model: GPT | T5, rows: int, slots: int, memory_slots: int = 0, per_memory: int = 1) -> int:
    """What keys and values of a decoder take; arguments as of `GPTDecoder` and `T5Decoder`."""
    numbers = 0
    for layer in map(_layer, model.decoder.layers):
        window = -1 if layer.attention.window is None else layer.attention.window[0]
        kept = slots_of(slots + (0 if isinstance(model, T5) else _in_front(model)), window)
        numbers += 2 * rows * kept * layer.attention.groups * layer.attention.head_dim
        if (cross := layer.cross_attention) is not None:
            numbers += 2 * rows // per_memory * (memory_slots + _in_front(model)) * cross.groups * cross.head_dim
    return numbers * dtype_of_products(model.token_embedding.weight).itemsize


def _layer(module: nn.Module) -> Layer:
    return cast(Layer, module)


def _in_front(model: GPT | T5) -> int:
    """How many learned vectors stand in front of every text that is read."""
    return 0 if model.prompt is None else len(model.prompt)


def _check_slots(name: str, slots: int, longest: int | None) -> None:
    if slots < 1 or (longest is not None and slots > longest):
        raise ValueError(f"`{name}` ({slots}) must be from 1 to {longest or 'any number'}, the positions of the model.")


def _cache_of(stack: Stack, weight: Tensor, rows: int, slots: int) -> KVCache:
    attention = cast(Layer, stack.layers[0]).attention
    return KVCache(
        len(stack.layers),
        rows=rows,
        groups=attention.groups,
        slots=slots,
        head_dim=attention.head_dim,
        window=-1 if attention.window is None else attention.window[0],
        dtype=dtype_of_products(weight),
        device=weight.device,
    )


def _terms_of(stack: Stack, slots: int) -> ScoreTerms | None:
    """What positions add to the scores of one token over so many slots; the same for every step."""
    return None if stack.score_positions is None else stack.score_positions(1, slots)


def _scaled(hidden: Tensor, model: GPT) -> Tensor:
    return hidden if model.embedding_scale == 1.0 else hidden * model.embedding_scale
