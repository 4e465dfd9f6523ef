"""Count the parameters of a model: all, and those trained with `model.peft`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...kernels.attention.flags import AttentionFlags
from ...models.build import LanguageModel, build_model, num_parameters
from ...models.config.batch_shape import BatchSpec
from ...models.config.families import FamilySlice, keys_by_stack
from ...models.config.memory import MemoryKeys
from ...models.config.model import Family
from ...models.config.peft import SelectiveSlice, peft_slice
from ...models.model_cost import count_parameters, count_slice_parameters
from ...models.parallel.layout import ParallelLayout
from ...models.peft.apply import trainable_parameters
from ...models.pipeline_parallel import module_holders
from ..config.parameter_layout import pipeline_split
from ..config.schema.root import MODEL_BLOCKS, AnyModelBlock
from ..utils.errors import UserError

_MEMORY_KEYS = dict.fromkeys(MemoryKeys.own_keys(), True)
_IRRELEVANT_KEYS: Any = {
    **_MEMORY_KEYS,
    "encoder": _MEMORY_KEYS,
    "decoder": _MEMORY_KEYS,
    **dict.fromkeys(("data", "optim", "tokenizer", "memory_profile", "micro_batch_size", "global_batch_size"), True),
}
"""Keys without effect on the counts, left out of the cache key, so that a search over them counts only once."""


class ParameterCounts(NamedTuple):
    """Parameter counts of a model.

    Attributes:
        total: all parameters, including those that PEFT adds.
        trainable: trainable parameters.
        trainable_tensors: (number of elements, number of dimensions) of each trainable tensor; empty without PEFT.
        first_backward_layers: for each stack, index of the first layer whose backward pass runs; earlier layers need
            no gradients.
    """

    total: int
    trainable: int
    trainable_tensors: tuple[tuple[int, int], ...]
    first_backward_layers: tuple[int, ...]


def count_trainable(keys: AnyModelBlock, vocab_size: int, form: BatchSpec) -> ParameterCounts:
    """Count the parameters of a model for samples of this `form`, and those trained; nothing is allocated.

    Raises:
        UserError: `peft` selects layers or parameters that do not exist, or none of a rank of the pipeline.
    """
    if not keys.peft.is_on:
        number = count_parameters(keys, vocab_size, form)
        return ParameterCounts(number, number, (), (0,) * len(keys_by_stack(keys)))
    return _count_on_meta(keys.family, keys.model_dump_json(exclude=_IRRELEVANT_KEYS), vocab_size, form)


def count_rank(counts: ParameterCounts, whole: FamilySlice, part: FamilySlice, mesh: ParallelLayout) -> ParameterCounts:
    """Return the counts of a rank's part of a model, of which PEFT trains the same fraction as of the whole model."""
    if mesh.tensor == mesh.expert == 1:
        return counts
    removed = count_slice_parameters(whole) - count_slice_parameters(part, expert_ranks=mesh.expert)
    total = counts.total - removed
    trainable = round(counts.trainable * total / counts.total)
    return counts._replace(total=total, trainable=trainable)


def count_stages(
    counts: ParameterCounts, whole: FamilySlice, part: FamilySlice, mesh: ParallelLayout
) -> ParameterCounts:
    """Return the counts of the part of a model in some pipeline stages, of which PEFT adds and trains the same fraction
    as of the whole model.
    """
    numbers = [count_slice_parameters(model, expert_ranks=mesh.expert) for model in (part, whole)]
    total, trainable = (round(each * numbers[0] / numbers[1]) for each in (counts.total, counts.trainable))
    return counts._replace(total=total, trainable=trainable)


@lru_cache(maxsize=16)
def _count_on_meta(family: Family, keys: str, vocab_size: int, form: BatchSpec) -> ParameterCounts:
    block = MODEL_BLOCKS[family].model_validate_json(keys)
    peft = peft_slice(block.peft)
    try:
        model = build_model(
            block,
            vocab_size=vocab_size,
            device="meta",
            dtype=torch.float32,
            flags=AttentionFlags(),
            micro_batch_size=1,
            batch_spec=form,
            peft=peft,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    trained = trainable_parameters(model)
    if isinstance(peft, SelectiveSlice):
        _check_pipeline(model, block, trained)
    return ParameterCounts(
        total=num_parameters(model),
        trainable=sum(parameter.numel() for parameter in trained.values()),
        trainable_tensors=tuple((parameter.numel(), parameter.ndim) for parameter in trained.values()),
        first_backward_layers=_first_backward_layers(model),
    )


def _check_pipeline(model: LanguageModel, keys: AnyModelBlock, trained: Iterable[str]) -> None:
    """Check that each rank of a pipeline trains parameters, by their names, which only a model has; configuration rules
    check schemes that add parameters to layers.

    Raises:
        UserError: a rank trains none.
    """
    split, path = pipeline_split(keys), "model.pipeline_model_parallel_size"
    if split is None:
        return
    holders = module_holders(model, split.stages(*(stack.num_layers for stack in model.stacks)), split)
    for rank in range(split.ranks):
        elsewhere = tuple(f"{module}." for module, ranks in holders.items() if rank not in ranks)
        if all(f"{name}.".startswith(elsewhere) for name in trained):
            names = ", ".join(keys.peft.selective_tuning.tunable_base_param_names or ())
            raise UserError(
                f"`model.peft.selective_tuning.tunable_base_param_names` ({names}) leaves rank {rank} of `{path}` "
                f"({split.ranks}) nothing to train; add parameters of its layers, or set {path}=1"
            )


def _first_backward_layers(model: LanguageModel) -> tuple[int, ...]:
    """Return for each stack the index of the first layer with trainable parameters at or before it."""
    stacks = model.stacks
    modules = [model.head, *(module for stack in stacks for module in (*stack.layers, stack.final_norm))]
    in_layers = {parameter for module in modules if module is not None for parameter in module.parameters()}
    if any(parameter.requires_grad and parameter not in in_layers for parameter in model.parameters()):
        return (0,) * len(stacks)  # embeddings, soft prompts, position tables
    first: list[int] = []
    for stack in stacks:
        trainable = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in stack.layers]
        first.append(trainable.index(True) if any(trainable) else len(trainable))
    if len(stacks) > 1 and any(parameter.requires_grad for parameter in stacks[0].parameters()):
        first[1] = 0  # every decoder layer attends to the encoder output
    return tuple(first)
