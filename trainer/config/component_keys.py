"""The keys that name components, built in or the user's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from ...models.config.extension_keys import GLU_SUFFIX
from ...models.config.extensions import Kind, extension_names, extension_source
from ...models.config.families import keys_by_stack
from .dataset_names import BUILT_IN_DATASETS
from .lr_schedule import SCHEDULES
from .schema.optim import OPTIMIZERS
from .schema.root import RootBlock
from .schema.trainer_and_data import TOKENIZERS


class ComponentKey(NamedTuple):
    """A key whose value is the name of a component.

    Attributes:
        path: dotted path; its value is a name, a list of names, or null.
        kind: kind of component.
        built_in: names of stoker's own components, and names that no other may have.
    """

    path: str
    kind: Kind
    built_in: Collection[str] = ()

    def own_names(self, root: RootBlock) -> Iterator[str]:
        """Yield the names in a configuration that are not built in."""
        value = attrgetter(self.path)(root)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in self.built_in:
                yield name


COMPONENT_KEYS = (
    ComponentKey("model.data.data_impl", "dataset", BUILT_IN_DATASETS),
    ComponentKey("model.tokenizer.library", "tokenizer", TOKENIZERS),
    ComponentKey("model.loss", "loss"),
    ComponentKey("trainer.validation_metrics", "metric"),
    ComponentKey("trainer.callbacks", "callback"),
    ComponentKey("exp_manager.loggers", "logger"),
    ComponentKey("model.optim.name", "optimizer", OPTIMIZERS),
    ComponentKey("model.optim.sched.name", "schedule", tuple(SCHEDULES)),
)


_LAYER_KEYS: Mapping[str, Kind] = {
    "activation": "activation",
    "position_embedding_type": "attention_bias",
    "transformer_block_type": "block",
}
"""The keys of a stack that name components of its layers, and their kinds; the types of the keys check the names."""


def component_sources(root: RootBlock) -> dict[str, str]:
    """Return where the user's own components of a configuration come from, by key: for records.

    A key that lists names has a suffix `.NAME`.
    """
    found: dict[str, str] = {}
    for key in COMPONENT_KEYS:
        several = isinstance(attrgetter(key.path)(root), list)
        for name in key.own_names(root):
            if name in extension_names(key.kind):
                found[f"{key.path}.{name}" if several else key.path] = extension_source(key.kind, name)
    for stack, keys in keys_by_stack(root.model).items():
        for key, kind in _LAYER_KEYS.items():
            name = getattr(keys, key).removesuffix(GLU_SUFFIX)
            if name in extension_names(kind):
                found[f"model.{stack}{key}"] = extension_source(kind, name)
    return found
