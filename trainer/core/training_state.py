"""Training state: model, optimizer and EMA, with initial, pretrained or resumed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.fp8.delayed_scaling import DelayedScaling
from ...models.build import TORCH_DTYPES, LanguageModel, ModelPlan
from ...models.build import build_model as build_from_keys
from ...models.fp8 import build_delayed_scaling, fp8_modules, keep_fp8_weights
from ...models.moe.moe_layer import find_moe_layers
from ...models.parallel.partition import PartAxis, names_elsewhere, partitions_of
from ...models.parallel.peer_exchange import open_exchange
from ...models.peft.apply import trainable_parameters
from ...models.tensor_parallel import partial_gradients, reduce_partial_gradients
from ..checkpoint.reader import BaseRecord, Checkpoint, RunState
from ..config.resolved_run import ResolvedRun
from ..config.schema.exp_manager import EmaBlock
from ..conversion.pretrained import PretrainedWeights, find_configured_pretrained
from ..conversion.warm_start import load_pretrained_weights
from ..device.determinism import attention_flags
from ..distributed.copy_engine import build_collectives
from ..distributed.data_parallel import DataParallel, grad_reduce_dtype
from ..distributed.ddp import ReplicatedDataParallel
from ..distributed.fsdp import ShardedDataParallel
from ..distributed.mesh import Mesh, SharedParameters
from ..distributed.process_group import DistributedContext
from ..distributed.symmetric_memory import find_peer_memory
from ..evaluation.own_functions import own_functions
from ..optim import optimizer_factory
from ..optim.base_optimizer import Optimizer
from ..optim.ema import EMA
from ..optim.fp8_weights import Fp8Weights
from ..optim.loss_scale import LossScale
from ..optim.parameter_sharding import ParameterSharding
from ..utils.errors import UserError
from ..utils.local_shard import LocalShard, whole_shard
from ..utils.text import pluralize
from .resume import check_resume_compatibility, initial_run_state, load_resumed_weights
from .run_checks import call_kinds
from .run_context import RunContext


@dataclass(frozen=True)
class TrainingState:
    """Everything that training changes and a checkpoint holds.

    Attributes:
        model: the model, on its device.
        optimizer: optimizer of its trainable parameters.
        ema: exponential moving average of the weights, or None.
        data_parallel: the data-parallel strategy; None for one process.
        start: `state.json` as of the first step of this process.
        fp8_scales: state of delayed scaling; None without.
        fp8_weights: trained weights that are kept in fp8, with `fp8_params`; None without.
    """

    model: LanguageModel
    optimizer: Optimizer
    ema: EMA | None
    data_parallel: DataParallel | None
    start: RunState
    fp8_scales: DelayedScaling | None = None
    fp8_weights: Fp8Weights | None = None


def build_training_state(run: RunContext) -> TrainingState:
    """Build model, optimizer and EMA, and load the weights and the state they start from.

    Raises:
        UserError: the model does not fit in memory, or the checkpoint or the pretrained weights do not fit the model.
    """
    resolved, resumed = run.resolved, run.resumed
    base = find_configured_pretrained(resolved.model.restore_from_path)
    start = initial_run_state(resolved, run.data, _base_record(run, base), run.attention_times)
    data_parallel = build_data_parallel(resolved, run.device, run.mesh)
    model = build_model(resolved, run.data.vocab_size, run.device, run.model_plan, data_parallel, run.mesh)
    open_peer_exchange(model, run.mesh, run.device)
    if resumed is None:
        for line in load_pretrained_weights(resolved, model, run.data.tokenizer, base):
            run.logger.log(line)
    optimizer = build_optimizer(resolved, model, data_parallel, run.mesh, run.ranks)
    if resumed is not None:
        start = _resume(run, resumed, start, model, optimizer, base)
    fp8_weights = _keep_weights_in_fp8(resolved, model, optimizer, run.mesh)
    ema = build_ema(resolved.exp_manager.ema, model, optimizer, data_parallel, fp8_weights)
    if ema is not None and resumed is not None:
        if resumed.has_ema:
            resumed.load_ema(ema.local_shards(), names_elsewhere(model))
        else:
            run.logger.log(f"warning: {resumed.path} holds no EMA weights; the EMA starts from the current weights")
    fp8_scales = build_delayed_scaling(model, run.device, partial(_take_maximum, run.mesh))
    if fp8_scales is not None and resumed is not None:
        loaded = resumed.load_fp8_scales(fp8_scale_shards(fp8_scales, run.mesh))
        if not loaded:
            run.logger.log(f"warning: {resumed.path} holds no scales of delayed scaling; they start from 1")
    return TrainingState(model, optimizer, ema, data_parallel, start, fp8_scales, fp8_weights)


def _keep_weights_in_fp8(run: ResolvedRun, model: LanguageModel, optimizer: Optimizer, mesh: Mesh) -> Fp8Weights | None:
    """With `fp8_params`, keep the weights of linear layers in fp8 alone; return those that are trained.

    Raises:
        UserError: that is not possible on these devices.
    """
    if not run.model.fp8_params:
        return None
    if run.why_not_fp8_params:
        raise UserError(run.why_not_fp8_params)
    keep_fp8_weights(fp8_modules(model).values())
    if run.peft is not None:
        return None
    if run.layout is None or run.layout.shards == 1:
        return Fp8Weights(model, optimizer)
    ranks: dict[PartAxis, DistributedContext] = {
        "tensor": mesh.replicas,
        "expert": mesh.expert_replicas or mesh.replicas,
    }
    return Fp8Weights(
        model, optimizer, {axis: partial(each.all_reduce_, op=dist.ReduceOp.MAX) for axis, each in ranks.items()}
    )


def _take_maximum(mesh: Mesh, amax: Tensor) -> None:
    """Take the maximum over the ranks with the same layers, in place."""
    if mesh.tensor is not None:
        amax.copy_(mesh.tensor.maximum(amax))
    mesh.replicas.all_reduce_(amax, dist.ReduceOp.MAX)


def fp8_scale_shards(scales: DelayedScaling, mesh: Mesh) -> dict[str, LocalShard]:
    """Return the state of delayed scaling, of which all ranks with the same layers have copies."""
    rank, size = (0, 1) if mesh.tensor is None else (mesh.tensor.rank, mesh.tensor.size)
    copies = mesh.replicas.rank * size + rank, mesh.replicas.world_size * size
    return {name: whole_shard(tensor, *copies) for name, tensor in scales.tensors().items()}


def _resume(
    run: RunContext,
    resumed: Checkpoint,
    start: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
    base: PretrainedWeights | None,
) -> RunState:
    """Load weights and optimizer state of a checkpoint; return `start` at its step."""
    changes = check_resume_compatibility(resumed, start, run.data.tokenizer.to_dict(), run.config.root)
    load_resumed_weights(resumed, model, base, run.config.root)
    trains = resumed.state.step < run.resolved.trainer.max_steps
    for change in changes:  # logged only after the weights fit
        run.logger.log(f"warning: {change}" if trains else change)
    resumed.load_optimizer(optimizer, names_elsewhere(model))
    state = resumed.state
    run.logger.log(f"resuming from {resumed.path}, {pluralize(state.consumed_samples, 'sample')} consumed")
    progress = ("step", "consumed_samples", "loop", "metrics")
    return start.model_copy(update={name: getattr(state, name) for name in progress})


def open_peer_exchange(model: LanguageModel, mesh: Mesh, device: torch.device) -> None:
    """Let experts with the dispatcher `flex` exchange tokens through the memory of the GPUs.

    Raises:
        UserError: the GPUs of the ranks that share the experts do not read each other's memory.
    """
    found = [layer.experts for layer in find_moe_layers(model).values() if layer.experts.dispatcher == "flex"]
    if not found or mesh.experts is None or mesh.expert is None:
        return
    memory = find_peer_memory(mesh.experts, device)
    if memory is None:
        raise UserError(
            "`model.moe_token_dispatcher_type` (flex) needs ranks of `model.expert_model_parallel_size` on one host, "
            "whose GPUs read each other's memory; set model.moe_token_dispatcher_type=alltoall"
        )
    exchange = open_exchange(mesh.expert.group, memory, mesh.expert.size)
    for experts in found:
        experts.exchange = exchange


def _base_record(run: RunContext, base: PretrainedWeights | None) -> BaseRecord | None:
    """Return the record of the base weights for adapter checkpoints, hashed by rank 0; None without PEFT."""
    if base is None or not run.resolved.model.peft.is_on:
        return None
    text = base.record().model_dump_json() if run.ranks.is_rank_zero else ""
    return BaseRecord.model_validate_json(run.ranks.broadcast_text(text))


def build_data_parallel(run: ResolvedRun, device: torch.device, mesh: Mesh) -> DataParallel | None:
    """Build the data-parallel strategy (DDP, ZeRO-1, ZeRO-2, or FSDP2 and HSDP), or None for one data-parallel rank."""
    layout = run.layout
    if layout is None:
        return None
    reduce_dtype = grad_reduce_dtype(run.model, TORCH_DTYPES[run.precision.weights])
    copy_engines = partial(build_collectives, mesh.replicas, device, run.model.copy_engine_collectives)
    if layout.replicates_weights:
        return ReplicatedDataParallel(
            layout,
            device,
            reduce_dtype,
            mesh.replicas,
            mesh.expert_replicas,
            copy_engines(),
            overlaps_gather=run.overlaps_param_sync,
        )
    axes = mesh.layout
    sizes: dict[str, int] = {"tensor_ranks": axes.tensor, "expert_ranks": axes.expert, "pipeline_ranks": axes.pipeline}
    return ShardedDataParallel(layout, device, reduce_dtype, mesh.replicas.timeout, **sizes, copy_engines=copy_engines)


def build_model(
    run: ResolvedRun,
    vocab_size: int,
    device: torch.device,
    model_plan: ModelPlan | None = None,
    data_parallel: DataParallel | None = None,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Build the model with its initial weights.

    Args:
        run: the run.
        vocab_size: vocabulary size of the tokenizer.
        device: device of the model.
        model_plan: its attention backends, if they have been chosen before.
        data_parallel: shards the parameters over processes; None for one process.
        mesh: the ranks that share the model; None for one process.

    Raises:
        UserError: no attention backend is available, `model.compile` is not supported, or a loss or metric of the
            user's own is not registered.
    """
    try:
        model = build_from_keys(
            run.model,
            vocab_size=vocab_size,
            device=device,
            dtype=TORCH_DTYPES[run.precision.weights],
            flags=attention_flags(run.trainer.deterministic),
            micro_batch_size=run.model.micro_batch_size,
            batch_spec=run.batch_spec,
            compute_dtype=TORCH_DTYPES[run.precision.compute],
            sharding=data_parallel,
            peft=run.peft,
            plan=model_plan,
            kinds=call_kinds(run),
            tensor_parallel=None if mesh is None else mesh.tensor,
            context_parallel=None if mesh is None else mesh.context,
            expert_parallel=None if mesh is None else mesh.expert,
            pipeline_parallel=None if mesh is None else mesh.pipeline,
        )
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None
    model.own_functions = own_functions(run.model.loss, run.trainer.validation_metrics)
    return model


def build_optimizer(
    run: ResolvedRun,
    model: LanguageModel,
    data_parallel: DataParallel | None = None,
    mesh: Mesh | None = None,
    ranks: DistributedContext | None = None,
) -> Optimizer:
    """Build the optimizer of `model.optim` for all parameters of the model; a collective of all ranks of a pipeline."""
    sharding = ParameterSharding() if data_parallel is None else data_parallel.parameter_sharding
    sharding = replace(sharding, parts=partitions_of(model))
    reductions: list[Callable[[Mapping[str, Tensor]], None]] = []
    if mesh is not None and mesh.tensor is not None:
        names = partial_gradients(model, mesh.tensor)
        reductions.append(partial(reduce_partial_gradients, partial=names, ranks=mesh.tensor))
        sharding = replace(sharding, sum_over_parts=mesh.tensor.sum)
    if mesh is not None and model.pipeline is not None:
        reductions.append(SharedParameters(mesh, model.pipeline, ranks or DistributedContext()).reduce)
        sharding = replace(sharding, sum_over_stages=mesh.stages.all_reduce_)
    if mesh is not None and mesh.expert is not None:
        sharding = replace(sharding, sum_over_experts=mesh.expert.sum)
    return optimizer_factory.build_optimizer(
        run.model,
        model.named_parameters(),
        main_weights=run.precision.main_weights,
        clip_norm=run.trainer.gradient_clip_val,
        loss_scale=build_loss_scale(run, next(model.parameters()).device),
        host=optimizer_factory.host_copy_engine(run.model, next(model.parameters()).device),
        sharding=sharding,
        reduce_gradients=(lambda gradients: [reduce(gradients) for reduce in reductions]) if reductions else None,
    )


def build_loss_scale(run: ResolvedRun, device: torch.device) -> LossScale | None:
    """Build the loss scale of `model.native_amp_*`; None except in fp16."""
    if not run.precision.scales_loss:
        return None
    keys = run.model
    return LossScale(keys.native_amp_init_scale, keys.native_amp_growth_interval, keys.hysteresis, device)


def build_ema(
    keys: EmaBlock,
    model: LanguageModel,
    optimizer: Optimizer,
    data_parallel: DataParallel | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> EMA | None:
    """Build the EMA of `exp_manager.ema`, initialized from the current weights; None if disabled."""
    if not keys.enable:
        return None
    main_weights = {
        key.removesuffix(".main"): shard.local
        for key, shard in optimizer.local_shards().items()
        if key.endswith(".main")
    }
    of_ranks: dict[str, Any] = {}
    if data_parallel is not None:
        of_ranks = {"local_shard": data_parallel.local_shard, "all_gather_weights": data_parallel.gather_weights}
    return EMA(
        trainable_parameters(model),
        main_weights=main_weights,
        decay=keys.decay,
        every_n_steps=keys.every_n_steps,
        cpu_offload=keys.cpu_offload,
        wait_for_copies=optimizer.synchronize,
        parts=partitions_of(model),
        fp8_weights=fp8_weights,
        **of_ranks,
    )
