"""Projections beside a stream: of its norm, keeping the stream in place of it, and onto it, in one pass."""

from __future__ import annotations

from torch import Tensor, nn

from ..memory.activation_checkpoint import product_of
from .norm import LayerNorm, RMSNorm


class NormedLinear(nn.Linear):
    """A linear layer that may keep the source of a norm in place of the norm, and adds to a stream as it multiplies."""

    def onto(self, stream: Tensor, hidden: Tensor) -> Tensor:
        """The stream (..., out) plus the layer over `hidden` (..., in)."""
        raise NotImplementedError

    def spares(self, norm: LayerNorm | RMSNorm) -> bool:
        """Whether `of_norm` keeps nothing of this norm but factors of its rows."""
        raise NotImplementedError

    def of_norm(self, norm: LayerNorm | RMSNorm, hidden: Tensor) -> Tensor:
        """The layer over `norm(hidden)`, where it `spares` the norm."""
        raise NotImplementedError


def spares(linear: nn.Linear, norm: LayerNorm | RMSNorm) -> bool:
    """Whether the backward of a linear layer can do without the norm before it, for nothing."""
    return isinstance(linear, NormedLinear) and linear.spares(norm)


def added_to(stream: Tensor | None, linear: nn.Linear, hidden: Tensor) -> Tensor:
    """`linear(hidden)`, added to a stream where there is one."""
    if stream is None:
        return linear(hidden)
    return linear.onto(stream, hidden) if isinstance(linear, NormedLinear) else stream + linear(hidden)


def product_of_norm(
    norm: LayerNorm | RMSNorm, linear: nn.Linear, hidden: Tensor, onto: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`linear(norm(hidden))`, of which `hidden` is kept: the norm is spared, or made again in the backward.

    Args:
        norm: of `hidden`.
        linear: a projection of the norm.
        hidden: (..., in).
        onto: the stream that what follows is added to, which may be `hidden`.

    Returns:
        (..., out), and the stream to use from here on.
    """
    if isinstance(linear, NormedLinear) and linear.spares(norm):
        return linear.of_norm(norm, hidden), onto
    if onto is hidden and type(linear) is nn.Linear and isinstance(norm, RMSNorm) and norm.forks_projection(hidden):
        onto, projected = norm.forked_projection(hidden, linear.weight, linear.bias)
        return projected, onto
    return product_of(norm, linear, False, hidden), onto
