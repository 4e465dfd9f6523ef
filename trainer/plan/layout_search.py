"""Search for the layout of a number of GPUs in which a run is fastest: `stoker plan --fit --gpus N`.

Layouts are values of keys, as all changes of `search`; recomputation, offloading and the micro batch of each are chosen
by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from ...kernels.attention.dispatch import NoBackendError
from ...models.config.stack import divisors
from ..config.parameter_layout import DISTRIBUTED_OPTIMIZERS
from ..config.resolved_run import resolve_run
from ..config.schema.optim import optimizer_kind
from ..config.schema.root import RootBlock
from ..utils.errors import UserError
from .run_inputs import Target
from .run_plan import Plan, make_plan
from .search import (
    Change,
    PlannedRun,
    Values,
    cost,
    full_recompute,
    recompute_modes,
    rule_errors,
    search,
    with_largest_batch,
)

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
_LARGEST_MICRO_BATCH = 64
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
    for layout in _layouts(root):
        run = _planned(root, target, vocab_size, layout)
        if run is None:
            continue
        modes: list[Values] = [{}, run.in_stacks({"activations_checkpoint_granularity": None})]
        modes += [*recompute_modes(run)[-2:], run.in_stacks(full_recompute("uniform", 1))]
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
    candidates: Mapping[str, list[int]] = {
        "tensor_model_parallel_size": divisors(trainer.devices),
        "context_parallel_size": [size for size in divisors(world) if size <= trainer.devices],
        "expert_model_parallel_size": divisors(world),
    }
    shardings: list[dict[str, Any]] = [{"fsdp": False}, {"fsdp": True}]
    if optimizer_kind(model.optim.name) == "adamw" and model.optim.name not in DISTRIBUTED_OPTIMIZERS:
        shardings.append({"fsdp": False, "optim.name": DISTRIBUTED_OPTIMIZERS[0]})
    sizes: list[dict[str, Any]] = [{}]
    for key in keys:
        sizes = [{**each, key: size} for each in sizes for size in candidates[key]]
    for each in sizes:
        ranks = each["tensor_model_parallel_size"] * each.get("context_parallel_size", 1)
        if world % ranks == 0:
            split = {**each, "sequence_parallel": each["tensor_model_parallel_size"] > 1}
            yield from ({**split, **sharding} for sharding in shardings if world > ranks or sharding == shardings[0])


def _planned(root: RootBlock, target: Target, vocab_size: int | None, layout: Values) -> PlannedRun | None:
    """Return the run in a layout with the largest micro batch; None if it is not valid."""
    trainer, model = root.trainer, root.model
    assert isinstance(trainer.devices, int)
    world = trainer.devices * trainer.num_nodes
    data = world // layout["tensor_model_parallel_size"] // layout.get("context_parallel_size", 1)
    if model.global_batch_size % data:
        return None
    sizes = [size for size in divisors(model.global_batch_size // data) if size <= _LARGEST_MICRO_BATCH]
    own = {key: value for key, value in layout.items() if "." not in key} | {"micro_batch_size": sizes[-1]}
    if "optim.name" in layout:
        own["optim"] = model.optim.model_copy(update={"name": layout["optim.name"]})
    changed = root.model_copy(update={"model": model.model_copy(update=own)})
    if rule_errors(changed):
        return None
    try:
        plan = _plan(changed, target, world, vocab_size)
    except (NoBackendError, UserError, ValueError):
        return None
    return PlannedRun(changed, target, plan)


def _plan(root: RootBlock, target: Target, world: int, vocab_size: int | None) -> Plan:
    run = resolve_run(root, world_size=world, capability=target.capability)
    return make_plan(run, target, vocab_size=vocab_size)


def _differing(root: RootBlock, run: PlannedRun, change: Change) -> Values:
    """Return the values of a change of a layout that differ from the original configuration."""
    keys = [key for key in (*_SIZES, "sequence_parallel", "fsdp") if key in type(root.model).model_fields]
    own = {key: attrgetter(key)(run.root.model) for key in (*keys, "optim.name", "micro_batch_size")}
    values = {**own, **change.values}
    return {key: value for key, value in values.items() if attrgetter(key)(root.model) != value}
