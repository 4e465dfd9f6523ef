"""One transformer layer, and a stack of them with its final norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.packed import PackedSequences
from .attention import SelfAttention
from .attention_calls import CallKind
from .mlp import MLP
from .norms import LayerNorm, RMSNorm
from .positions import RotaryEmbedding

MOST_COMPILATIONS = 256
"""Of one layer in one process: a few per model (training, validation), each for one shape."""


class Layer(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)) (arXiv 2002.04745).

    Args:
        attention_norm: norm before the attention.
        attention: self-attention.
        mlp_norm: norm before the MLP.
        mlp: feed-forward part.
        dropout: dropout of what each part adds to the stream, in training.
    """

    def __init__(
        self,
        *,
        attention_norm: LayerNorm | RMSNorm,
        attention: SelfAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: MLP,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.dropout = dropout

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        kind: CallKind,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """(batch, tokens, hidden_size) to the same shape; other arguments as in `SelfAttention.forward`."""
        hidden = self._add(hidden, self.attention(self.attention_norm(hidden), rotary, kind, packed))
        return self._add(hidden, self.mlp(self.mlp_norm(hidden)))

    def _add(self, hidden: Tensor, update: Tensor) -> Tensor:
        if self.training and self.dropout:
            update = F.dropout(update, self.dropout)
        return hidden + update


class Stack(nn.Module):
    """Layers in a row, one table of rotary angles for all of them, and the norm after the last.

    Args:
        layers: the layers, first to last.
        final_norm: norm of the last layer's output.
        rotary: the shared rotary embedding, if there is one.
    """

    def __init__(
        self, layers: Iterable[Layer], *, final_norm: LayerNorm | RMSNorm, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.rotary = rotary

    def forward(
        self,
        hidden: Tensor,
        kind: CallKind,
        *,
        positions: Tensor | None = None,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            hidden: (batch, tokens, hidden_size).
            kind: the kind of call, which selects the attention backend.
            positions: of the tokens, int64 (batch, tokens); None counts each row from 0.
            packed: the documents of the rows, where they must not see each other.

        Returns:
            (batch, tokens, hidden_size), normed.
        """
        rotary = None if self.rotary is None else self.rotary(hidden.shape[1] if positions is None else positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, kind, packed)
        return self.final_norm(hidden)

    def compile_parts(self, *, hooked: bool = False, whole: bool = True) -> None:
        """Compile each layer and the final norm; equal layers share one compilation.

        Args:
            hooked: the parts will have hooks around their forward (FSDP2's, which gather and give back the weights):
                leave those outside.
            whole: each part is one graph; otherwise its attention, which cannot be traced, stays outside.
        """
        from torch._dynamo import config  # seconds of import, only where it is needed

        # A limit of 8 counts the layers of all models of a process together, since they are one piece of code; the
        # third configuration trained in one notebook would end in an error.
        config.recompile_limit = max(config.recompile_limit, MOST_COMPILATIONS)
        for part in (*self.layers, self.final_norm):
            if hooked:
                part.forward = torch.compile(part.forward, fullgraph=whole, dynamic=False)
            else:
                part.compile(fullgraph=whole, dynamic=False)
