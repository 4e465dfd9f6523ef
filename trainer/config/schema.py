"""The whole configuration: `name`, `env_vars`, `trainer`, `exp_manager` and `model`, each key that acts.

Keys that do not act (not yet, refused, historical) are in `key_table.py`; together they are every key stoker knows.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...models.config.block import Block, own
from ...models.config.gpt import GPTKeys
from .blocks import DataBlock, MemoryProfileBlock, Text, TokenizerBlock, TrainerBlock, nested
from .exp_manager import ExpManagerBlock
from .optim import OptimBlock

RampUpBatchSize = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=3, max_length=3)]


class ModelBlock(GPTKeys):
    """`model.*`: the model, its batches, its data and its optimizer."""

    family: Literal["gpt"] = own("gpt")
    """Which model the keys describe."""
    micro_batch_size: int = Field(4, ge=1)
    """Samples that go through the model at once, per device."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step, over all devices: gradients accumulate over global / (micro * devices) batches."""
    rampup_batch_size: RampUpBatchSize | None = None
    """`[start, increment, samples]`: the global batch starts at `start` samples and grows by `increment` at equal
    intervals until `samples` samples are consumed; null: it is always `global_batch_size`."""
    fsdp: bool = False
    """Cut the parameters over all processes (FSDP2); False: each process has them all."""
    fsdp_sharding_strategy: Literal["full", "hybrid", "grad"] = "full"
    """`full`: weights are gathered layer by layer (ZeRO-3). `grad`: they stay whole during a micro batch (ZeRO-2).
    `hybrid`: as `full` inside groups of `fsdp_shard_size` processes, which hold copies of each other."""
    fsdp_shard_size: int | None = own(None, ge=2)
    """Processes that share one copy of the parameters with `hybrid`; null: those of one machine."""
    fsdp_grad_reduce_dtype: Literal[32, "32", "fp32", "bf16"] = "fp32"
    """In which gradients of bf16 weights are summed over several processes, sharded or not."""
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
    memory_profile: MemoryProfileBlock = nested(MemoryProfileBlock)
    """A record of the GPU's memory."""


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
