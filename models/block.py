"""Base class of transformer layers of users' own code, which arrange ready-made parts and may add modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from .config.extensions import ExtensionError
from .layer import Layer
from .layers.context import LayerContext
from .layers.norm import BranchInput, LayerNorm, RMSNorm
from .layers.own_module import build_seeded

Norm = LayerNorm | RMSNorm


class Branches:
    """Residual branches of a block in one forward: each is to be called once.

    Args:
        block: the layer.
        context: its inputs besides the hidden states.
    """

    def __init__(self, block: Block, context: LayerContext) -> None:
        self.block, self.context = block, context
        self.calls = [0, 0, 0]
        self.statistics: Tensor | None = None

    def attention(self, hidden: Tensor, add_to: Tensor | None = None, output_norm: nn.Module | None = None) -> Tensor:
        """Return the self-attention of normed hidden states, after `output_norm` and dropout, plus `add_to`.

        Args:
            hidden: (batch, tokens, hidden_size), normed.
            add_to: residual stream, of the same shape; None: the branch alone.
            output_norm: norm of the output; None without.
        """
        self.calls[0] += 1
        return self.block._run_attention(BranchInput(hidden, hidden), add_to, self.context, output_norm)

    def cross_attention(
        self, hidden: Tensor, add_to: Tensor | None = None, output_norm: nn.Module | None = None
    ) -> Tensor:
        """Return the attention over the encoder output, in the decoder of a T5; arguments as in `attention`."""
        self.calls[1] += 1
        return self.block._run_cross_attention(BranchInput(hidden, hidden), add_to, self.context, output_norm)

    def mlp(self, hidden: Tensor, add_to: Tensor | None = None, output_norm: nn.Module | None = None) -> Tensor:
        """Return the output of the MLP, or of the experts; arguments as in `attention`."""
        self.calls[2] += 1
        read = BranchInput(hidden, hidden)
        output, self.statistics = self.block._run_mlp(read, add_to, self.context, output_norm)
        return output


class Block(Layer):
    """Transformer layer of a user's own: a subclass defines `run`.

    `attention_norm`, `mlp_norm` and, in the decoder of a T5, `cross_attention_norm` are ready-made norms. A subclass
    may add modules in its constructor, and remove norms by setting them to None. Parameters that it adds begin as the
    constructor leaves them, except those of norms. Tokens may mix in the branches only: in generation a layer gets one
    token at a time.

    Args:
        norm: returns a new norm of the stack's kind and width.
        parts: arguments of `Layer`.

    Attributes:
        has_cross_attention: `run` calls `Branches.cross_attention` where the layer has one, so that the block can be a
            decoder of T5.
    """

    has_cross_attention: ClassVar[bool] = False

    def __init__(self, *, norm: Callable[[], Norm], **parts: Any) -> None:
        super().__init__(**parts)
        self._arguments = {"norm": norm, **parts}

    def run(self, hidden: Tensor, branches: Branches) -> Tensor:
        """Return the new residual stream.

        Args:
            hidden: residual stream, (batch, tokens, hidden_size).
            branches: attention, cross-attention and MLP, to be called once each.
        """
        raise NotImplementedError

    def _run(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        branches = Branches(self, context)
        output = self.run(hidden, branches)
        if branches.calls != [1, int(self.cross_attention is not None), 1]:
            raise ExtensionError(
                f"`run` of the block {self.block} must call each branch once, but called attention, cross_attention "
                f"and mlp {branches.calls} times."
            )
        return output, branches.statistics

    def initial_tensors(self, seed: int) -> dict[str, Tensor]:
        """See `OwnModule`: what the subclass adds, without norms."""
        parts = [part for part in self._arguments.values() if isinstance(part, nn.Module)]
        given = {module for part in parts for module in part.modules()}
        built = build_seeded(lambda: type(self)(**self._arguments), seed)
        found: dict[str, Tensor] = {}
        for prefix, module in built.named_modules():
            if module in given or isinstance(module, LayerNorm | RMSNorm):
                continue
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                found[f"{prefix}.{name}".removeprefix(".")] = tensor.detach()
        return found
