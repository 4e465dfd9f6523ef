"""Search for the layout of a number of GPUs in which a run is fastest: `stoker plan --fit --gpus N`.

Layouts are values of keys, as all changes of `search`; recomputation, offloading and the micro batch of each are chosen
by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

from ...models.config.families import keys_by_stack
from ...models.config.moe import has_experts
from ...models.config.stack import divisors
from ..config.parameter_layout import DISTRIBUTED_OPTIMIZERS
from ..config.schema.optim import optimizer_kind
from ..config.schema.root import RootBlock
from ..utils.progress import Progress
from .search import (
    Change,
    PlannedRun,
    Values,
    cost,
    differing,
    full_recompute,
    plan_if_valid,
    recompute_modes,
    rule_errors,
    search,
    with_largest_batch,
    with_values,
)
from .target import Target

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
_PIPELINE_KEYS = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
_MOST_STAGES = 16
"""Most ranks of a pipeline that are tried."""
_LARGEST_MICRO_BATCH = 64
_MICRO_BATCHES_OF_A_STAGE = 4
"""Micro batches for each rank of a pipeline with which it is tried, if there are so many: then a fifth is bubble."""
_REFINED = 3
"""Layouts for which all modes of recomputation and offloading are tried."""


def on_machines(root: RootBlock, devices: int, nodes: int) -> RootBlock:
    """Return a configuration for other machines."""
    return root.model_copy(update={"trainer": root.trainer.model_copy(update={"devices": devices, "num_nodes": nodes})})


def search_layouts(root: RootBlock, target: Target, vocab_size: int | None) -> list[Change]:
    """Return the best change for each layout of the run's devices that fits, fastest first.

    Args:
        root: configuration with a number of `devices`.
        target: the GPU.
        vocab_size: of the tokenizer; None: `override_vocab_size`.
    """
    found: list[tuple[Change, PlannedRun]] = []
    layouts = list(_layouts(root))
    with Progress("searching layouts", len(layouts), "layouts") as progress:
        for layout in progress.over(layouts):
            run = _planned(root, target, vocab_size, layout)
            if run is None:
                continue
            modes: list[Values] = [{}, run.in_stacks({"activations_checkpoint_granularity": None})]
            if layout["pipeline_model_parallel_size"] == 1:
                modes += recompute_modes(run)[-2:]
            modes.append(run.in_stacks(full_recompute("uniform", 1)))
            changes = filter(None, (with_largest_batch(run, mode) for mode in modes))
            fitting = [change for change in changes if change.plan.fits is not False]
            if fitting:
                found.append((min(fitting, key=cost), run))
    found.sort(key=lambda each: cost(each[0]))
    best: dict[object, Change] = {}
    for number, (change, run) in enumerate(found):
        if number < _REFINED:
            refined, _ = search(run.root, target, run.plan)
            change = min(change, refined or change, key=cost)
        change = Change(_differing(root, run, change), change.plan)
        layout = change.plan.inputs.layout
        key = change.plan.inputs.mesh, layout and layout.name
        best[key] = min(change, best.get(key, change), key=cost)
    return sorted(best.values(), key=cost)


def _layouts(root: RootBlock) -> Iterator[Values]:
    """Yield values of the keys that split the model, and of those that shard its parameters."""
    model, trainer = root.model, root.trainer
    assert isinstance(trainer.devices, int)
    world = trainer.devices * trainer.num_nodes
    keys = [key for key in _SIZES if key in type(model).model_fields]
    stacks = keys_by_stack(model).values()
    candidates: Mapping[str, list[int]] = {
        "tensor_model_parallel_size": divisors(trainer.devices),
        "context_parallel_size": [size for size in divisors(world) if size <= trainer.devices],
        "expert_model_parallel_size": divisors(world) if any(map(has_experts, stacks)) else [1],
    }
    shardings: list[dict[str, Any]] = [{"fsdp": False}, {"fsdp": True}]
    if optimizer_kind(model.optim.name) == "adamw" and model.optim.name not in DISTRIBUTED_OPTIMIZERS:
        shardings.append({"fsdp": False, "optim.name": DISTRIBUTED_OPTIMIZERS[0]})
    sizes: list[dict[str, Any]] = [{}]
    for key in keys:
        sizes = [{**each, key: size} for each in sizes for size in candidates[key]]
    pipelines = list(_pipelines(root))
    for each in sizes:
        for pipeline in pipelines:
            ranks, stages = _model_ranks({**each, **pipeline}), pipeline["pipeline_model_parallel_size"]
            context = each.get("context_parallel_size", 1)
            if world % ranks or (stages > 1 and context not in (1, model.context_parallel_size)):
                continue
            split = {**each, **pipeline, "sequence_parallel": each["tensor_model_parallel_size"] > 1}
            for sharding in shardings:
                # weights would be gathered for every micro batch of a stage
                gathers = sharding["fsdp"] and model.fsdp_sharding_strategy != "grad" and stages > 1
                if sharding == shardings[0] or (world > ranks and not gathers):
                    yield {**split, **sharding}


def _pipelines(root: RootBlock) -> Iterator[Values]:
    """Yield values of the keys of pipelines whose stages have as many layers each; one rank first.

    A T5's encoder has the share of the ranks that is nearest to its share of the layers. Pipelines of one stage on each
    rank, and of two, are tried where there are enough micro batches to fill them.
    """
    model, trainer = root.model, root.trainer
    assert isinstance(trainer.devices, int)
    world = trainer.devices * trainer.num_nodes
    off = cast("dict[str, Any]", dict.fromkeys(_PIPELINE_KEYS))
    off |= {"pipeline_model_parallel_size": 1, "pipeline_model_parallel_split_rank": 0}
    off |= {key: False for key in _PIPELINE_KEYS if key.startswith("account_for")}
    yield off
    layers = [stack.num_layers for stack in keys_by_stack(model).values()]
    for ranks in divisors(world)[1:]:
        on = {**off, "pipeline_model_parallel_size": ranks}
        if ranks > min(_MOST_STAGES, sum(layers)) or ranks > model.global_batch_size:
            continue
        if len(layers) > 1:
            splits = [n for n in range(1, ranks) if layers[0] % n == 0 and layers[1] % (ranks - n) == 0]
            if splits:
                split = min(splits, key=lambda n: abs(layers[0] / n - layers[1] / (ranks - n)))
                yield {**on, "pipeline_model_parallel_split_rank": split}
        elif layers[0] % ranks == 0:
            yield on
            if layers[0] % (2 * ranks) == 0:
                yield {**on, "virtual_pipeline_model_parallel_size": 2}


def _model_ranks(layout: Values) -> int:
    """Return the ranks that share a model in a layout."""
    return (
        layout["tensor_model_parallel_size"]
        * layout.get("context_parallel_size", 1)
        * layout["pipeline_model_parallel_size"]
    )


def _planned(root: RootBlock, target: Target, vocab_size: int | None, layout: Values) -> PlannedRun | None:
    """Return the run in a layout with the largest micro batch; None if it is not valid."""
    trainer, model = root.trainer, root.model
    assert isinstance(trainer.devices, int)
    world = trainer.devices * trainer.num_nodes
    data = world // _model_ranks(layout)
    if model.global_batch_size % data:
        return None
    sizes = [size for size in divisors(model.global_batch_size // data) if size <= _LARGEST_MICRO_BATCH]
    if layout["pipeline_model_parallel_size"] > 1:  # larger micro batches would leave the stages waiting
        least = _MICRO_BATCHES_OF_A_STAGE * layout["pipeline_model_parallel_size"]
        sizes = [size for size in sizes if model.global_batch_size // data // size >= least] or sizes[:1]
    changed = with_values(root, {**layout, "micro_batch_size": sizes[-1]})
    plan = None if rule_errors(changed) else plan_if_valid(changed, target, world, vocab_size)
    return None if plan is None else PlannedRun(changed, target, plan)


def _differing(root: RootBlock, run: PlannedRun, change: Change) -> Values:
    """Return the values of a change of a layout that differ from the original configuration."""
    known = type(root.model).model_fields
    keys = [key for key in (*_SIZES, *_PIPELINE_KEYS, "sequence_parallel", "fsdp") if key in known]
    own = {key: attrgetter(key)(run.root.model) for key in (*keys, "optim.name", "micro_batch_size")}
    return differing(root, {**own, **change.values})
