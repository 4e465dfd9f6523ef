"""Build model, data-parallel strategy, optimizer and EMA of a run from the configuration."""

from __future__ import annotations

import torch

from ...models.build import LanguageModel
from ...models.build import build_model as build_from_keys
from ...models.config.peft import peft_slice
from ...models.peft.apply import trainable_parameters
from ..config.batch_spec import batch_spec
from ..config.parameter_layout import layout_from_config
from ..config.schema.root import RootBlock
from ..data.build_datasets import Data
from ..device.determinism import attention_flags
from ..device.precision import PrecisionPlan
from ..distributed.data_parallel import DataParallel, grad_reduce_dtype
from ..distributed.ddp import ReplicatedDataParallel
from ..distributed.fsdp import ShardedDataParallel
from ..distributed.process_group import DistributedContext
from ..optim import optimizer_factory
from ..optim.base_optimizer import Optimizer
from ..optim.ema import EMA
from ..plan.memory_check import check_memory
from ..utils.errors import UserError


def data_parallel_from_config(
    root: RootBlock, precision: PrecisionPlan, device: torch.device, ranks: DistributedContext
) -> DataParallel | None:
    """Return the data-parallel strategy (DDP and ZeRO-1, or FSDP2 and HSDP), or None for one process."""
    layout = layout_from_config(root, ranks.world_size)
    if layout is None:
        return None
    reduce_dtype = grad_reduce_dtype(root, precision.param_dtype)
    if layout.replicates_weights:
        return ReplicatedDataParallel(layout, device, reduce_dtype)
    return ShardedDataParallel(layout, device, reduce_dtype, ranks.timeout)


def build_model(
    root: RootBlock,
    data: Data,
    precision: PrecisionPlan,
    device: torch.device,
    data_parallel: DataParallel | None = None,
) -> LanguageModel:
    """Build the model with its initial weights.

    Raises:
        UserError: it does not fit in memory, no attention backend is available, or `model.compile` is not supported.
    """
    check_memory(root, precision, device, data_parallel.layout if data_parallel else None)
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
