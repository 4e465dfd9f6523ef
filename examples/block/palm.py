"""Two transformer layers: attention and MLP in parallel on one norm (GPT-J, PaLM), and norms of both ends (Gemma 2)."""

from typing import Any

from torch import Tensor

import stoker


@stoker.register("block", "palm")
class PaLM(stoker.Block):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm (arXiv 2204.02311)."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.mlp_norm = None

    def run(self, hidden: Tensor, branches: stoker.Branches) -> Tensor:
        """Return the new residual stream, (batch, tokens, hidden_size)."""
        normed = self.attention_norm(hidden)
        return branches.mlp(normed, add_to=branches.attention(normed, add_to=hidden))


@stoker.register("block", "sandwich")
class Sandwich(stoker.Block):
    """x + norm(f(norm(x))) for each branch f."""

    has_cross_attention = True

    def __init__(self, *, norm: Any, **parts: Any) -> None:
        super().__init__(norm=norm, **parts)
        self.attention_output_norm, self.mlp_output_norm = norm(), norm()
        self.cross_attention_output_norm = None if self.cross_attention is None else norm()

    def run(self, hidden: Tensor, branches: stoker.Branches) -> Tensor:
        """Return the new residual stream, (batch, tokens, hidden_size)."""
        hidden = branches.attention(self.attention_norm(hidden), hidden, self.attention_output_norm)
        if self.cross_attention_norm is not None:
            normed = self.cross_attention_norm(hidden)
            hidden = branches.cross_attention(normed, hidden, self.cross_attention_output_norm)
        return branches.mlp(self.mlp_norm(hidden), hidden, self.mlp_output_norm)
