"""Checks that need the device or the data of a run, before its model is built."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.attention.dispatch import BackendSelection
from ...models.build import plan_model
from ...models.config.families import family_slice
from ...models.config.peft import peft_slice
from ..config.batch_spec import batch_spec
from ..config.schema.root import RootBlock
from ..config.schema.trainer_and_data import DataBlock
from ..data.build_datasets import Data
from ..data.subsets import validation_subset
from ..device.determinism import attention_flags
from ..device.precision import PrecisionPlan
from ..utils.errors import UserError


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
