"""The whole configuration: `name`, `env_vars`, `trainer`, `exp_manager` and `model`, each key that acts.

Keys that do not act (not yet, refused, historical) are in `key_table.py`; together they are every key stoker knows.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...models.config.block import Block, own
from ...models.config.gpt import GPTKeys
from .blocks import DataBlock, ExpManagerBlock, OptimBlock, Text, TokenizerBlock, TrainerBlock, nested


class ModelBlock(GPTKeys):
    """`model.*`: the model, its batches, its data and its optimizer."""

    family: Literal["gpt"] = own("gpt")
    """Which model the keys describe."""
    micro_batch_size: int = Field(4, ge=1)
    """Samples that go through the model at once, per device."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step, over all devices: gradients accumulate over global / (micro * devices) batches."""
    megatron_amp_O2: bool = True  # noqa: N815
    """With bf16: True keeps bf16 weights and fp32 main weights in the optimizer, False fp32 weights and autocast."""
    do_layer_norm_weight_decay: bool = False
    """Apply weight decay to norm weights too."""
    tokenizer: TokenizerBlock = nested(TokenizerBlock)
    """Text to token ids."""
    data: DataBlock = nested(DataBlock)
    """Where samples come from."""
    optim: OptimBlock = nested(OptimBlock)
    """Optimizer and schedule."""


class RootBlock(Block):
    """The root of the configuration."""

    name: Text = "stoker"
    """Name of the run."""
    env_vars: dict[str, str | int | float | bool] = Field(default={})
    """Environment variables for the training processes; a contradiction with the caller's environment is an error."""
    trainer: TrainerBlock = nested(TrainerBlock)
    """Where and how long to train."""
    exp_manager: ExpManagerBlock = nested(ExpManagerBlock)
    """Where a run writes and what it logs."""
    model: ModelBlock = nested(ModelBlock)
    """The model, its batches, its data and its optimizer."""
