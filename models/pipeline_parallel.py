"""Pipeline parallelism: the plans that leave a rank the layers, embeddings and head of its stages.

The whole model is built on the meta device first, so that parameters keep their names and a stack knows all its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .language_model import BaseLanguageModel
from .parallel.partition import RankPart, partitions_of, set_partitions
from .parallel.pipeline import PipelineParallel, RankStages
from .parallel.relay import Relay
from .parallel.stages import PipelineSplit, Stage
from .stack import Stack
from .t5 import T5


class OnOtherStage(nn.Module):
    """Stands for a module that other stages have."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Raise an error.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this pipeline stage does not have the module that was called")


def apply_pipeline_parallel(model: BaseLanguageModel, ranks: PipelineParallel) -> None:
    """Remove from a model what the stages of this rank do not have, in place; after all other plans.

    Args:
        model: model on the meta device, which gets `pipeline` and `partitions` (`partitions_of`).
        ranks: the pipeline ranks.

    Raises:
        ValueError: the layers cannot be distributed so.
    """
    stages = ranks.split.stages(*(stack.num_layers for stack in model.stacks))
    holders = module_holders(model, stages, ranks.split)
    for stack in model.stacks:
        _ = stack.draws_dropout  # of all layers
    _remove(model, (path for path, found in holders.items() if ranks.rank not in found))
    if getattr(model, "default_partition", None) is None:
        set_partitions(model, {}, default=RankPart(None, 0, 1, ranks.replica, ranks.num_replicas))
    several = {path: found for path, found in holders.items() if len(found) > 1}
    shared: dict[str, tuple[int, ...]] = {}
    for path, found in several.items():
        if ranks.rank in found:
            shared |= _share(model, path, found, ranks.rank)
    own = tuple(stage for stage in stages if ranks.split.rank_of(stage) == ranks.rank)
    groups = tuple(sorted(set(several.values())))
    model.pipeline = RankStages(own, shared, groups)


def distribute_layers(model: BaseLanguageModel, relay: Relay) -> None:
    """Remove the layers of other pipeline ranks from a model for inference on the meta device, in place.

    Args:
        model: model on the meta device, of which each stack has at least as many layers as there are ranks.
        relay: the pipeline ranks.
    """
    for stack in model.stacks:
        stack.relay = relay
    _remove(
        model,
        (
            f"{name}.layers.{number}"
            for name, stack in model.named_children()
            if isinstance(stack, Stack)
            for number in set(range(stack.num_layers)).difference(relay.layers(stack.num_layers))
        ),
    )


def module_holders(
    model: BaseLanguageModel, stages: Sequence[Stage], split: PipelineSplit
) -> Mapping[str, tuple[int, ...]]:
    """Return the pipeline ranks that have a module or parameter of a whole model, by its path, in forward order."""

    def of(chosen: Sequence[Stage]) -> tuple[int, ...]:
        return tuple(sorted({split.rank_of(stage) for stage in chosen}))

    found: dict[str, tuple[int, ...]] = {}
    names = {stack: name for name, stack in model.named_children() if isinstance(stack, Stack)}
    for name in (
        *(name for name, _ in model.named_children()),
        *(name for name, _ in model.named_parameters(recurse=False)),
    ):
        if name not in names.values():
            found[name] = of([stage for stage in stages if _has(model, name, stage)])
    for index, stack in enumerate(model.stacks):
        own = [stage for stage in stages if stage.stack == index]
        found |= {
            f"{names[stack]}.layers.{number}": of([s for s in own if number in s.layers])
            for number in range(stack.num_layers)
        }
        if stack.final_norm is not None:
            found[f"{names[stack]}.final_norm"] = of([stage for stage in own if stage.ends])
        if stack.score_positions is not None:
            found[f"{names[stack]}.score_positions"] = of([stage for stage in own if stage.layers])
    return found


def _has(model: BaseLanguageModel, name: str, stage: Stage) -> bool:
    """Return True if a stage has a module or parameter of the model beside the stacks."""
    if name in ("head", "head_bias", "transform", "transform_norm"):
        return stage.last
    of_decoder = name.startswith("decoder_")
    if name == "cross_positions":
        return stage.stack == 1 and len(stage.layers) > 0
    separate = isinstance(model, T5) and model.decoder_token_embedding is not None
    if name == ("decoder_token_embedding" if separate else "token_embedding") and stage.last and model.head is None:
        return True
    if name == "token_embedding" and not separate:
        return stage.begins
    return stage.begins and stage.stack == of_decoder


def _remove(model: nn.Module, paths: Iterable[str]) -> None:
    """Remove modules and parameters that other ranks have (`names_elsewhere`)."""
    names = _tensor_names(model)
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, nn.ModuleList):  # other layers keep their numbers
            delattr(owner, name)
        elif name in dict(owner.named_children()):
            setattr(owner, name, None if isinstance(owner, Stack) else OnOtherStage())
        else:
            setattr(owner, name, None)
            partitions: Any = getattr(owner, "partitions", {})
            partitions.pop(name, None)
    model.__dict__["elsewhere"] = names - _tensor_names(model)


def _tensor_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))


def _share(model: nn.Module, path: str, holders: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """State which ranks hold the parameters of a module too; return these ranks by the names of its parameters."""
    parts, found = partitions_of(model), dict[str, tuple[int, ...]]()
    for prefix, module in model.get_submodule(path).named_modules(prefix=path):
        own: dict[str, RankPart] = {}
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            own[name] = replace(parts[full], holder=holders.index(rank), holders=len(holders))
            if parameter.requires_grad:
                found[full] = holders
        if own:
            before: Any = getattr(module, "partitions", {})
            set_partitions(module, {**before, **own})
    return found
