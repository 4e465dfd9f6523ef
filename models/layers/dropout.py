"""Keys and places from which each dropout of a forward draws its mask, see `kernels.dropout`.

A forward in training draws the keys of all its dropouts at once from the default generator of the device, which all
ranks of a model seed alike; each dropout of each layer has its own. Layers get them as inputs, so that recomputation
draws the same masks, and a rank passes the places of its tokens, channels and heads in the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention.dropout import move_rng
from ...kernels.dropout import draw_keys, dropout, uniform_noise
from ..parallel.context import SequenceShard

# Dropouts of a layer: attention weights, outputs of the branches, inside the MLP or experts, of adapters and of LoRA;
# and the noise of its router.
ATTENTION_WEIGHTS, CROSS_ATTENTION_WEIGHTS = 0, 1
ATTENTION_OUTPUT, CROSS_ATTENTION_OUTPUT, MLP_OUTPUT = 2, 3, 4
ACTIVATION = 5
ATTENTION_ADAPTER, MLP_ADAPTER = 6, 7
LORA_QKV, LORA_OUTPUT, LORA_CROSS_QUERY, LORA_CROSS_KV, LORA_CROSS_OUTPUT, LORA_UP, LORA_DOWN = range(8, 15)
ROUTER_NOISE = 15
_NUM_DROPOUTS = 16


class DropoutMask(NamedTuple):
    """Mask of one dropout, before it is drawn.

    Attributes:
        key: int64 (2,), or (3,) with the place of the first channel.
        rows: int64 (R,), place of each row in the whole tensor.
    """

    key: Tensor
    rows: Tensor

    def apply(self, values: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
        """Return `values` (..., channels), R rows, after dropout, plus `residual`."""
        return dropout(values, p, self.key, self.rows, residual)

    def noise(self, channels: int, dtype: torch.dtype) -> Tensor:
        """Return numbers uniform from -1 to 1, (R, channels)."""
        return uniform_noise(self.key, self.rows, channels, dtype)


class LayerDropout(NamedTuple):
    """Dropouts of a layer in one forward.

    Attributes:
        keys: int64 (dropouts, 2).
        tokens: place of each token in the micro batch, sample * sequence length + position, int64 (batch * tokens,).
        stream_tokens: those of the residual stream: a shard of `tokens` with sequence parallelism.
    """

    keys: Tensor
    tokens: Tensor
    stream_tokens: Tensor

    def of_stream(self, number: int) -> DropoutMask:
        """Return the mask of a tensor like the residual stream; `number` is one of the dropouts above."""
        return DropoutMask(self.keys[number], self.stream_tokens)

    def of_channels(self, number: int, first_channel: int = 0) -> DropoutMask:
        """Return the mask of a tensor of all tokens and of the channels from the first one on."""
        key = self.keys[number]
        return DropoutMask(F.pad(key, (0, 1), value=first_channel) if first_channel else key, self.tokens)

    def of_heads(self, number: int, first_head: int = 0) -> Tensor:
        """Return the `rng` of attention of the heads from the first one on, see `AttentionInputs`."""
        key = self.keys[number]
        return move_rng(key, head=first_head) if first_head else key


class StackDropout(NamedTuple):
    """Dropouts of a stack, and of the embeddings before it, in one forward.

    Attributes:
        keys: int64 (1 + layers, dropouts, 2), those of the embeddings first.
        tokens: as in `LayerDropout`.
    """

    keys: Tensor
    tokens: Tensor

    @classmethod
    def draw(cls, layers: int, tokens: Tensor) -> StackDropout:
        """Draw the keys of a stack of this many layers; `tokens` as in `LayerDropout`."""
        return cls(draw_keys(1 + layers, _NUM_DROPOUTS, device=tokens.device), tokens)

    def of_embeddings(self) -> DropoutMask:
        """Return the mask of the embeddings of all tokens."""
        return DropoutMask(self.keys[0, 0], self.tokens)

    def of_layer(self, number: int, stream_tokens: Tensor) -> LayerDropout:
        """Return the dropouts of a layer, counted from 0."""
        return LayerDropout(self.keys[1 + number], self.tokens, stream_tokens)


def token_places(shape: Sequence[int], shard: SequenceShard | None, device: torch.device) -> Tensor:
    """Return the place of each token of (batch, tokens) in the micro batch, int64 (batch * tokens,).

    `shard` says which tokens of whole sequences these are; None: all.
    """
    batch, tokens = shape
    if shard is None:
        return torch.arange(batch * tokens, device=device)
    samples = torch.arange(batch, device=device)[:, None] * shard.whole_length(tokens)
    return (samples + shard.positions(tokens, device)).flatten()


Drawn = TypeVar("Drawn", LayerDropout, DropoutMask)


def require_dropout(given: Drawn | None) -> Drawn:
    """Return what a module with dropout needs in training.

    Raises:
        ValueError: they are missing.
    """
    if given is None:
        raise ValueError("`dropout` (None) must be given to layers with dropout in training; see `Stack.draw_dropout`.")
    return given
