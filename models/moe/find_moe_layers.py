"""Where the experts of a model are."""

from __future__ import annotations

from torch import nn

from .moe_layer import MoE


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The layers with experts by name (`decoder.layers.3.mlp`), in the order data goes through them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
