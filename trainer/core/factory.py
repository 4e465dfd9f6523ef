"""Build the components of a run from the configuration: device, model, optimizer, validation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...kernels.attention.dispatch import BackendSelection
from ...models.build import LanguageModel, plan_model
from ...models.build import build_model as build_from_keys
from ...models.config.families import family_slice
from ...models.config.peft import peft_slice
from ...models.model_cost import training_flops_per_sample
from ...models.peft.apply import trainable_parameters
from ..callbacks.preemption import StopHandler
from ..callbacks.reporting import ThroughputFactors
from ..callbacks.train_loop import SaveFunction, ValidateFunction
from ..checkpoint.async_saver import CheckpointSaver
from ..checkpoint.loop_state import LoopState
from ..checkpoint.reader import EMA_WEIGHTS, OPTIMIZER, RunState, tensors_to_save
from ..checkpoint.run_environment import device_name
from ..checkpoint.writer import CheckpointContent, apply_retention
from ..config.batch_spec import batch_spec
from ..config.parameter_layout import layout_from_config
from ..config.run_config import RunConfig
from ..config.schema.exp_manager import canonical_metric_name
from ..config.schema.root import RootBlock
from ..config.schema.trainer_and_data import DataBlock
from ..data.batch_sampler import BatchSchedule
from ..data.build_datasets import Data
from ..data.subsets import validation_subset
from ..data.tokenizers.tokenizer import tokenizer_state
from ..device.cuda_graph_support import uses_cuda_graph
from ..device.determinism import attention_flags
from ..device.precision import PrecisionPlan
from ..distributed.build_data_parallel import build_data_parallel, grad_reduce_dtype
from ..distributed.data_parallel import DataParallel
from ..distributed.process_group import DistributedContext
from ..evaluation.held_out_loss import EvaluationResult, evaluate, loss_function
from ..lightning.cuda_graph import CapturedMicroBatches, RunMicroBatch
from ..lightning.lightning_module import LanguageModule
from ..optim import optimizer_factory
from ..optim.base_optimizer import Optimizer
from ..optim.ema import EMA
from ..plan.hardware import bf16_peak_flops
from ..utils.environment import enable_expandable_segments
from ..utils.errors import UserError
from ..utils.local_shard import local_shard
from ..utils.text import pluralize


def choose_device(root: RootBlock, ranks: DistributedContext | None = None) -> torch.device:
    """Return the device of `trainer.accelerator`; `auto` is a CUDA GPU if there is one, else the CPU.

    Raises:
        UserError: there is no such device.
    """
    keys = root.trainer
    kind = {"gpu": "cuda", "auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(
        keys.accelerator, keys.accelerator
    )
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[kind]:
        raise UserError(
            f"`trainer.accelerator` ({keys.accelerator}): torch {torch.__version__} finds no such device here; "
            "use trainer.accelerator=cpu or auto"
        )
    if kind != "cuda":
        return torch.device(kind)
    enable_expandable_segments()
    index, gpus = (ranks or DistributedContext()).local_rank, torch.cuda.device_count()
    if index and index >= gpus:
        raise UserError(
            f"`trainer.devices` ({keys.devices}): this machine has {pluralize(gpus, 'GPU')}; use trainer.devices={gpus}"
        )
    return torch.device(kind, index)


def data_parallel_from_config(
    root: RootBlock, precision: PrecisionPlan, device: torch.device, ranks: DistributedContext
) -> DataParallel | None:
    """Return the data-parallel strategy (DDP, FSDP2 or HSDP), or None for one process."""
    layout = layout_from_config(root, ranks.world_size)
    return (
        None
        if layout is None
        else build_data_parallel(layout, device, grad_reduce_dtype(root, precision.param_dtype), ranks.timeout)
    )


def check_attention(root: RootBlock, precision: PrecisionPlan, device: torch.device) -> Mapping[str, BackendSelection]:
    """Check that the model can run on this device, before anything is built or written.

    Returns:
        The attention backend decision for each attention and kind of call.

    Raises:
        UserError: no attention backend is available, or `model.compile` is not supported.
    """
    keys = root.model
    try:
        form = batch_spec(root)
        plan = plan_model(
            family_slice(keys, vocab_size=1, batch_spec=form),
            device=device,
            dtype=precision.autocast_dtype or precision.param_dtype,
            flags=attention_flags(root),
            micro_batch_size=keys.micro_batch_size,
            batch_spec=form,
            peft=peft_slice(keys.peft),
        )
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None
    return plan.decisions


def build_model(
    root: RootBlock,
    data: Data,
    precision: PrecisionPlan,
    device: torch.device,
    data_parallel: DataParallel | None = None,
) -> LanguageModel:
    """Build the model with its initial weights.

    Raises:
        UserError: no attention backend is available, or `model.compile` is not supported.
    """
    try:
        return build_from_keys(
            root.model,
            vocab_size=data.vocab_size,
            device=device,
            dtype=precision.param_dtype,
            flags=attention_flags(root),
            micro_batch_size=root.model.micro_batch_size,
            batch_spec=batch_spec(root),
            compute_dtype=precision.autocast_dtype or precision.param_dtype,
            sharding=data_parallel,
            peft=peft_slice(root.model.peft),
        )
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None


def build_optimizer(
    root: RootBlock, model: LanguageModel, precision: PrecisionPlan, data_parallel: DataParallel | None = None
) -> Optimizer:
    """Build the optimizer of `model.optim` for all parameters of the model."""
    return optimizer_factory.build_optimizer(
        root.model,
        model.named_parameters(),
        main_weights=precision.main_weights,
        clip_norm=root.trainer.gradient_clip_val,
        host=optimizer_factory.host_copy_engine(root.model, model.output_weight.device),
        **({} if data_parallel is None else data_parallel.optimizer_arguments),
    )


def build_throughput(
    root: RootBlock, model: LanguageModel, device: torch.device, world_size: int = 1
) -> ThroughputFactors:
    """Return the token and FLOP counts from which throughput and MFU of all processes are computed."""
    form = batch_spec(root)
    tokens = form.seq_length + form.decoder_seq_length
    peak = bf16_peak_flops(device_name(device))
    return ThroughputFactors(
        tokens_per_sample=tokens,
        flops_per_token=training_flops_per_sample(
            root.model, model.output_weight.shape[0], form, frozen=root.model.peft.is_on
        )
        / tokens,
        peak_flops=None if peak is None else peak * world_size,
    )


def check_metrics(root: RootBlock, data: Data) -> list[str]:
    """Check that the monitored metrics can be measured on the data.

    Returns:
        One warning for each metric that is never measured.

    Raises:
        UserError: early stopping monitors such a metric with `strict`.
    """
    if data.token_byte_counts.any():
        return []
    manager, at = root.exp_manager, "exp_manager"
    params, stopping = manager.checkpoint_callback_params, manager.early_stopping_callback_params
    why = "is never measured: the byte lengths of this tokenizer's tokens do not add up to that of the text"
    warnings: list[str] = []
    if manager.create_early_stopping_callback and stopping.monitor == "bits_per_byte":
        line = f"`{at}.early_stopping_callback_params.monitor` (bits_per_byte) {why}; use val_loss"
        if stopping.strict:
            raise UserError(line)
        warnings.append(line)
    if manager.create_checkpoint_callback and params.save_top_k > 0 and params.monitor == "bits_per_byte":
        warnings.append(f"`{at}.checkpoint_callback_params.monitor` (bits_per_byte) {why}; use val_loss")
    return warnings


def check_splits(root: RootBlock, data: Data) -> list[str]:
    """Check the validation split.

    Returns:
        A warning if `model.data.splits_string` has no effect.

    Raises:
        UserError: no validation samples would be left.
    """
    if root.trainer.limit_val_batches and data.validation is not None:
        validation_subset(root, data.validation)
    keys = root.model.data
    if not data.has_predefined_splits or keys.splits_string == DataBlock.model_fields["splits_string"].default:
        return []
    if keys.train_ds.file_names is not None:
        return []  # reported by a configuration rule
    return [
        f"`model.data.splits_string` ({keys.splits_string}) has no effect: {keys.path} has its own splits; leave it out"
    ]


def build_validation(
    root: RootBlock,
    model: LanguageModel,
    data: Data,
    precision: PrecisionPlan,
    device: torch.device,
    ranks: DistributedContext | None = None,
    data_parallel: DataParallel | None = None,
) -> ValidateFunction | None:
    """Return a function that validates on `trainer.limit_val_batches` of the samples, or None if that is 0."""
    limit = root.trainer.limit_val_batches
    if not limit or data.validation is None:
        return None
    samples = validation_subset(root, data.validation)
    size = root.model.micro_batch_size
    per_global_batch = root.model.global_batch_size // size
    default_batches = limit if isinstance(limit, int) else None

    def validate(global_batches: int | None, should_stop: Callable[[], bool] | None) -> EvaluationResult:
        model.eval()
        batches = default_batches if global_batches is None else global_batches
        try:
            return evaluate(
                loss_function(model, precision, device),
                samples,
                token_bytes=data.token_byte_counts,
                batch_size=size,
                limit_batches=None if batches is None else batches * per_global_batch,
                device=device,
                ranks=ranks,
                should_stop=should_stop,
            )
        finally:
            if data_parallel is not None:
                data_parallel.reshard()
            model.train()

    return validate


def build_save(
    config: RunConfig,
    data: Data,
    start: RunState,
    module: LanguageModule,
    plan: BatchSchedule,
    saver: CheckpointSaver,
    ema: EMA | None = None,
) -> SaveFunction | None:
    """Return a function that saves a checkpoint of a step, or None if no checkpoint would be kept."""
    keys = config.root.exp_manager
    params = keys.checkpoint_callback_params
    if not keys.create_checkpoint_callback or (params.save_top_k == 0 and not params.save_last):
        return None

    def save(step: int, metrics: Mapping[str, float], loop: LoopState) -> Path:
        state = start.model_copy(
            update={
                "step": step,
                "updates": module.unwrapped_optimizer.step_count,
                "consumed_samples": plan.consumed_samples(step),
                "val_loss": metrics.get("val_loss"),
                "metrics": {name: value for name, value in metrics.items() if name != "val_loss"},
                "loop": loop,
            }
        )
        kind, state_dict = tensors_to_save(module.model)
        tensors = {
            kind: {name: local_shard(tensor) for name, tensor in state_dict.items()},
            OPTIMIZER: module.unwrapped_optimizer.local_shards(),
        }
        if ema is not None:
            tensors[EMA_WEIGHTS] = ema.local_shards()
        return saver.save(CheckpointContent(state, tensors, config.document, tokenizer_state(data.tokenizer)))

    return save


def build_retention(root: RootBlock, checkpoints: Path, stop_handler: StopHandler) -> Callable[[], None]:
    """Return a function that applies checkpoint retention; a run that is being stopped keeps its newest checkpoint."""
    params = root.exp_manager.checkpoint_callback_params

    def clean() -> None:
        apply_retention(
            checkpoints,
            save_top_k=params.save_top_k,
            save_last=params.save_last or stop_handler.reason is not None,
            monitor=canonical_metric_name(params.monitor),
            mode=params.mode,
        )

    return clean


def build_graph_capture(
    root: RootBlock, model: LanguageModel, device: torch.device, world_size: int, log: Callable[[str], None]
) -> Callable[[RunMicroBatch], RunMicroBatch] | None:
    """Return a wrapper that captures micro batches as CUDA graphs, or None for eager; see `model.enable_cuda_graph`.

    With `enable_cuda_graph: null`, a capture that runs out of memory is logged with `log` and falls back to eager.
    """
    if not uses_cuda_graph(root, device, world_size, model.attention_decisions):
        return None
    on_failure = None if root.model.enable_cuda_graph else log
    return lambda run: CapturedMicroBatches(run, model.parameters(), on_failure)


def build_ema(
    root: RootBlock, model: LanguageModel, optimizer: Optimizer, data_parallel: DataParallel | None = None
) -> EMA | None:
    """Build the EMA of `exp_manager.ema`, initialized from the current weights; None if disabled."""
    keys = root.exp_manager.ema
    if not keys.enable:
        return None
    main_weights = {
        key.removesuffix(".main"): piece.local
        for key, piece in optimizer.local_shards().items()
        if key.endswith(".main")
    }
    return EMA(
        trainable_parameters(model),
        main_weights=main_weights,
        decay=keys.decay,
        every_n_steps=keys.every_n_steps,
        cpu_offload=keys.cpu_offload,
        wait_for_copies=optimizer.synchronize,
        **(
            {}
            if data_parallel is None
            else {"local_shard": data_parallel.local_shard, "all_gather_weights": data_parallel.after_update}
        ),
    )
