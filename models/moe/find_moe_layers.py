"""Find the MoE layers of a model."""

from __future__ import annotations

from torch import nn

from .moe_layer import MoE


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the MoE modules by name (`decoder.layers.3.mlp`), in forward order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
