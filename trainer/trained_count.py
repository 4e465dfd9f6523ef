"""How many parameters of a model are trained: all of them, or what `model.peft` says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..kernels.attention.flags import AttentionFlags
from ..models.build import build_model, parameter_count
from ..models.config.counting import count_parameters
from ..models.config.memory import MemoryKeys
from ..models.config.model import Family
from ..models.config.peft_slice import peft_slice
from ..models.config.samples import SampleForm
from ..models.peft.adapt import trained_parameters
from .config.schema import MODEL_BLOCKS, AnyModelBlock

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
    """

    all: int
    trained: int


def count_trained(keys: AnyModelBlock, vocab_size: int, form: SampleForm) -> Counts:
    """Parameters of a model and those that are trained; nothing is allocated.

    Args:
        keys: the configuration of the model.
        vocab_size: tokens of the tokenizer.
        form: the samples.
    """
    if not keys.peft.is_on:
        number = count_parameters(keys, vocab_size, form)
        return Counts(number, number)
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
    return Counts(parameter_count(model), sum(each.numel() for each in trained_parameters(model).values()))
