"""Registration of users' own components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import get_args

from ...models.config.dense_stack import Activation, BlockType
from ...models.config.extensions import ComponentT, Kind
from ...models.config.extensions import register as register_component
from ...models.config.hf_names import HF_ARCHITECTURES
from ...models.config.positions import PositionEmbedding
from ..config.component_keys import COMPONENT_KEYS

_BUILT_IN: Mapping[Kind, Collection[str]] = {
    "activation": get_args(Activation),
    "attention_bias": get_args(PositionEmbedding),
    "block": get_args(BlockType),
    "metric": ("loss",),  # `val_loss` is the cross-entropy
    "weight_map": HF_ARCHITECTURES,
    **{key.kind: key.built_in for key in COMPONENT_KEYS if key.built_in},
}
"""Names of stoker's own components, and names that no component may have."""


def register(kind: Kind, name: str) -> Callable[[ComponentT], ComponentT]:
    """Register a component of your own, for configurations to select by name; to be used as a decorator.

    For modules given with `--import` and for Python scripts; an installed package declares an entry point of the group
    `stoker.KINDs` instead. docs/extend.md says what a component of each kind is called with, and the key that selects
    it.

    Args:
        kind: `activation`, `attention_bias`, `block`, `callback`, `dataset`, `logger`, `loss`, `metric`, `optimizer`,
            `resolver`, `schedule`, `tokenizer` or `weight_map`.
        name: value of that key.

    Returns:
        A decorator, which returns the function or class unchanged.

    Raises:
        ValueError: the kind is unknown, or (some from the decorator) the name is that of another component.
    """
    if name in _BUILT_IN.get(kind, ()):
        raise ValueError(f"the {kind} {name!r} is already provided by stoker; use another name.")
    return register_component(kind, name)
