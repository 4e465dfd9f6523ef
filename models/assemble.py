"""Build the modules of a model from its slice, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..kernels.attention.dispatch import BackendSelection
from .bert import BERT
from .config.batch_shape import BatchSpec
from .config.bert import BertSlice
from .config.families import FamilySlice
from .config.t5 import T5Slice
from .gpt import GPT
from .layers.attention import Backends
from .t5 import T5

LanguageModel = GPT | T5 | BERT


def assemble(
    model: FamilySlice,
    batch_spec: BatchSpec,
    decisions: Mapping[str, BackendSelection],
    backends: Mapping[str, Backends],
) -> LanguageModel:
    """Build a model on the meta device, without allocating memory.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: attention backends by label (`PlannedAttention.label`).
        backends: attention function for each kind of call, by name of the attention (`PlannedAttention.name`).
    """
    with torch.device("meta"):
        match model:
            case T5Slice():
                return T5(model, batch_spec, decisions, backends)
            case BertSlice():
                return BERT(model, batch_spec, decisions, backends.get("", {}))
            case _:
                return GPT(model, batch_spec, decisions, backends.get("", {}))
