"""Agreement of a configuration with the arguments of a `pl.Trainer`: contradictions are refused.

An argument that is left at Lightning's default gives way to the configuration; a key that the user has not set gives
way to the argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..config.load import config_from_document
from ..config.resolved_run import ResolvedRun, resolve_run
from ..config.run_config import RunConfig
from ..device.choose_device import compute_capability
from ..lightning.lightning_imports import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    pl,
    rank_zero_warn,
)
from ..utils.errors import UserError

_PRECISIONS = {"32-true": "32", "64-true": "64"} | {
    name: name for name in ("bf16-mixed", "bf16-true", "16-mixed", "16-true")
}
"""`trainer.precision` for each supported `Trainer(precision=)`."""
_ACTING = ("devices", "num_nodes", "precision", "max_steps", "gradient_clip_val", "limit_val_batches")
"""Keys of `trainer` that act with a `pl.Trainer`."""


def resolve_for_trainer(config: RunConfig, trainer: pl.Trainer) -> ResolvedRun:
    """Resolve a configuration for the devices, the precision and the length of a `pl.Trainer`.

    Raises:
        UserError: key and argument contradict each other, or the trainer cannot do what the configuration asks for;
            lists every reason.
    """
    keys, problems = config.root.trainer, []
    changes: dict[str, Any] = {"devices": trainer.num_devices, "num_nodes": trainer.num_nodes}
    given = {
        "gradient_clip_val": (trainer.gradient_clip_val, None),
        "max_steps": (trainer.max_steps, -1),
        "devices": (trainer.num_devices, None),
        "num_nodes": (trainer.num_nodes, None),
    }
    for name, (argument, default) in given.items():
        value = getattr(keys, name)
        if argument in (default, value):
            continue
        if config.is_set(f"trainer.{name}"):
            problems.append(
                f"`trainer.{name}` ({value}) and Trainer({name}={argument}) must be equal; set "
                f"trainer.{name}={argument}"
            )
        changes[name] = argument
    changes["precision"] = _precision(config, trainer, problems)
    changes["deterministic"] = keys.deterministic or torch.are_deterministic_algorithms_enabled()
    problems += _unsupported(config, trainer)
    if problems:
        raise UserError(problems)
    document = {**config.document, "trainer": {**config.document["trainer"], **changes}}
    device = trainer.strategy.root_device
    root = config_from_document(document, trusted=True, origin="the arguments of Trainer").root
    return resolve_run(root, world_size=trainer.world_size, capability=compute_capability(device))


def set_accumulation(run: ResolvedRun, trainer: pl.Trainer) -> int:
    """Let the trainer accumulate the micro batches of a global batch; return their number on each data-parallel rank.

    Raises:
        UserError: `Trainer(accumulate_grad_batches=)` gives another number.
    """
    needed, given = run.micro_batches, trainer.accumulate_grad_batches
    if given not in (1, needed):
        size = run.model.micro_batch_size * run.mesh.data
        raise UserError(
            f"`model.global_batch_size` ({run.model.global_batch_size}) is {needed} micro batches on each of "
            f"{run.mesh.data} data-parallel ranks, but Trainer(accumulate_grad_batches={given}); leave the argument "
            f"out, or set model.global_batch_size={size * given}"
        )
    trainer.accumulate_grad_batches = needed
    return needed


def schedule_length(config: RunConfig, run: ResolvedRun, trainer: pl.Trainer) -> int:
    """Return the optimizer steps of the run: those of the user's `trainer.max_steps`, or else of the trainer."""
    if trainer.max_steps == -1 and (run.trainer.max_steps == -1 or not config.is_set("trainer.max_steps")):
        steps = trainer.estimated_stepping_batches
        if math.isfinite(steps):
            return int(steps)
    return run.trainer.max_steps


def warn_of_unused_keys(config: RunConfig, trainer: pl.Trainer) -> None:
    """Warn once of keys the user has set for which a `pl.Trainer` has arguments or callbacks of its own."""
    acting = {
        f"trainer.{name}"
        for name in type(config.root.trainer).model_fields
        if name in _ACTING or getattr(trainer, name, None) == getattr(config.root.trainer, name)
    }
    unused = [path for path in sorted(config.origins) if path.startswith(("trainer.", "exp_manager."))]
    unused = [path for path in unused if config.is_set(path) and path not in acting]
    if unused:
        rank_zero_warn(
            f"these keys act in `stoker train` only; a pl.Trainer has arguments and callbacks instead: "
            f"{', '.join(unused)}"
        )


def _precision(config: RunConfig, trainer: pl.Trainer, problems: list[str]) -> Any:
    """Return `trainer.precision` for a trainer."""
    value, argument = config.root.trainer.precision, str(trainer.precision)
    if argument not in _PRECISIONS:
        problems.append(f"Trainer(precision={argument!r}) is not supported; use {', '.join(_PRECISIONS)}")
        return value
    if value is None and argument == "32-true" and trainer.strategy.root_device.type == "cuda":
        rank_zero_warn(
            "training in fp32, as a pl.Trainer does by default; trainer.precision=bf16 is what stoker train does"
        )
    if value is None or (argument != "32-true" and not config.is_set("trainer.precision")):
        return _PRECISIONS[argument]
    # `32-true`, the default, leaves the dtypes of the module alone: they are those of the configuration.
    if argument != "32-true" and str(value) not in (argument, _PRECISIONS[argument]):
        problems.append(
            f"`trainer.precision` ({value}) and Trainer(precision={argument!r}) must be equal; set trainer.precision="
            f"{_PRECISIONS[argument]}, or leave the argument out"
        )
    return value


def _unsupported(config: RunConfig, trainer: pl.Trainer) -> Iterator[str]:
    """Yield what this trainer cannot do."""
    model, strategy = config.root.model, trainer.strategy
    command = "train with stoker train, or"
    if model.rampup_batch_size:
        yield (
            f"`model.rampup_batch_size` ({model.rampup_batch_size}) needs a varying number of micro batches in a step, "
            f"which a pl.Trainer does not have; {command} ~model.rampup_batch_size"
        )
    if model.enable_cuda_graph:
        yield f"`model.enable_cuda_graph` (True) needs the loop of stoker; {command} model.enable_cuda_graph=null"
    slices = [stack.fp8 for stack in config.resolved.family.stacks if stack.fp8 is not None]
    for name, value, used in (
        ("fp8_recipe", "tensorwise", any(fp8.recipe.scaling == "delayed" for fp8 in slices)),
        ("fp8_dot_product_attention", "false", any(fp8.attention for fp8 in slices)),
    ):
        if used:
            given = "delayed" if name == "fp8_recipe" else "True"
            yield (
                f"`model.{name}` ({given}) needs the loop of stoker, which updates and saves its scales; "
                f"{command} model.{name}={value}"
            )
    if model.fp8 and model.fp8_params:
        yield f"`model.fp8_params` (True) needs the loop of stoker; {command} model.fp8_params=False"
    if config.root.exp_manager.ema.enable:
        yield (
            "`exp_manager.ema.enable` (True) needs the loop of stoker; "
            f"{command} exp_manager.ema.enable=False and Lightning's WeightAveraging callback"
        )
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        yield f"Trainer(gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}) is not supported; use 'norm'"
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(model, name)) > 1:
            yield f"`model.{name}` ({size}) needs the strategy of stoker; {command} model.{name}=1"
    if isinstance(strategy, ModelParallelStrategy):
        tensor = strategy.device_mesh["tensor_parallel"].size()
        if tensor != model.tensor_model_parallel_size:
            yield (
                f"`model.tensor_model_parallel_size` ({model.tensor_model_parallel_size}) and "
                f"ModelParallelStrategy(tensor_parallel_size={tensor}) must be equal; set "
                f"model.tensor_model_parallel_size={tensor}"
            )
        return
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        yield (
            f"Trainer(strategy={type(strategy).__name__}) is not supported; use a single device, 'ddp', or "
            "ModelParallelStrategy for sharded parameters (FSDP2) and tensor parallelism"
        )
        return
    sharded = {
        "fsdp": model.fsdp,
        "tensor_model_parallel_size": model.tensor_model_parallel_size > 1 and model.tensor_model_parallel_size,
        "expert_model_parallel_size": model.expert_model_parallel_size > 1 and model.expert_model_parallel_size,
    }
    for name, value in sharded.items():
        if value and trainer.world_size > 1:
            yield f"`model.{name}` ({value}) shards the model, but the strategy does not; use ModelParallelStrategy"
