"""How many parameters of a model are trained: all of them, or what `model.peft` says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...kernels.attention.flags import AttentionFlags
from ...models.build import LanguageModel, build_model, parameter_count, stacks_of
from ...models.config.batch_shape import SampleForm
from ...models.config.family_rules import stacks_of_keys
from ...models.config.memory import MemoryKeys
from ...models.config.model_keys import Family
from ...models.config.parameter_count import count_parameters
from ...models.config.peft_slice import peft_slice
from ...models.peft.apply import trained_parameters
from ..config.schema.root import MODEL_BLOCKS, AnyModelBlock

_MEMORY = dict.fromkeys(MemoryKeys.model_fields, True)
_IDLE: Any = {
    **_MEMORY,
    "encoder": _MEMORY,
    "decoder": _MEMORY,
    **dict.fromkeys(("data", "optim", "tokenizer", "memory_profile", "micro_batch_size", "global_batch_size"), True),
}
"""Keys that change no count: a search among them counts once."""


class Counts(NamedTuple):
    """Parameters of a model.

    Attributes:
        all: what fine-tuning adds included.
        trained: those of them that are not frozen.
        sizes: numbers and dimensions of each tensor that is trained, where not all of the model is.
        begins: for each stack the first layer whose backward pass runs: what is before it needs no gradient.
    """

    all: int
    trained: int
    sizes: tuple[tuple[int, int], ...]
    begins: tuple[int, ...]


def count_trained(keys: AnyModelBlock, vocab_size: int, form: SampleForm) -> Counts:
    """Parameters of a model and those that are trained; nothing is allocated.

    Args:
        keys: the configuration of the model.
        vocab_size: tokens of the tokenizer.
        form: the samples.
    """
    if not keys.peft.is_on:
        number = count_parameters(keys, vocab_size, form)
        return Counts(number, number, (), (0,) * len(stacks_of_keys(keys)))
    return _counted(keys.family, keys.model_dump_json(exclude=_IDLE), vocab_size, form)


@lru_cache(maxsize=16)
def _counted(family: Family, keys: str, vocab_size: int, form: SampleForm) -> Counts:
    block = MODEL_BLOCKS[family].model_validate_json(keys)
    model = build_model(
        block,
        vocab_size=vocab_size,
        device="meta",
        dtype=torch.float32,
        flags=AttentionFlags(),
        micro_batch_size=1,
        form=form,
        peft=peft_slice(block.peft),
    )
    trained = trained_parameters(model)
    return Counts(
        all=parameter_count(model),
        trained=sum(each.numel() for each in trained.values()),
        sizes=tuple((each.numel(), each.ndim) for each in trained.values()),
        begins=_begins(model),
    )


def _begins(model: LanguageModel) -> tuple[int, ...]:
    """The first layer of each stack in front of which, or in which, something is trained."""
    stacks = stacks_of(model)
    late = [model.head, *(part for stack in stacks for part in (*stack.layers, stack.final_norm))]
    behind = {each for part in late if part is not None for each in part.parameters()}
    if any(each.requires_grad and each not in behind for each in model.parameters()):
        return (0,) * len(stacks)  # embeddings, prompts, tables of positions
    found: list[int] = []
    for stack in stacks:
        trains = [any(each.requires_grad for each in layer.parameters()) for layer in stack.layers]
        found.append(trains.index(True) if any(trains) else len(trains))
    if len(stacks) > 1 and any(each.requires_grad for each in stacks[0].parameters()):
        found[1] = 0  # every layer of the decoder reads what the encoder gives
    return tuple(found)
