"""Schema of the configuration: every key that acts, below `name`, `env_vars`, `trainer`, `exp_manager` and `model`.

Keys that do not act (not yet, refused, historical) are in `nemo/inactive_keys.yaml`; together they are all known keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ....models.config.bert import BertKeys
from ....models.config.gpt import GPTKeys
from ....models.config.key_block import ConfigBlock, NonEmptyText, block_default, extension_field
from ....models.config.model import FAMILIES, Family
from ....models.config.parallel import ParallelKeys
from ....models.config.peft import PeftKeys
from ....models.config.t5 import T5Keys
from .exp_manager import ExpManagerBlock
from .optim import OptimBlock
from .trainer_and_data import DataBlock, MemoryProfileBlock, TokenizerBlock, TrainerBlock

RampUpBatchSize = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=3, max_length=3)]


class RunKeys(ParallelKeys):
    """Keys of `model.*` in every family besides the architecture: batches, data, optimizer and parallelism."""

    family: Family = extension_field("gpt")
    """Model family; by default inferred from the keys of a NeMo file, else `gpt`."""
    restore_from_path: NonEmptyText | None = None
    """Pretrained weights to start from, at step 0: a checkpoint, the newest checkpoint of a run directory, or a Hugging
    Face folder. Shape and tokenizer must match; `stoker finetune` reads them from there. A resumed run loads its own
    checkpoint instead."""
    micro_batch_size: int = Field(4, ge=1)
    """Samples per data-parallel rank and forward pass."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step over all devices; gradients accumulate over global / (micro * data-parallel ranks)
    micro batches, where several devices that share a replica of the model are one data-parallel rank."""
    rampup_batch_size: RampUpBatchSize | None = None
    """`[start, increment, samples]`: the global batch size starts at `start` and grows by `increment` at equal
    intervals until `samples` samples are consumed; null: `global_batch_size` from the start."""
    fsdp: bool = False
    """Shard parameters, gradients and optimizer state over all processes; False: replicate them."""
    fsdp_sharding_strategy: Literal["full", "hybrid", "grad"] = "full"
    """`full`: gather parameters layer by layer (ZeRO-3). `grad`: keep all parameters, shard gradients and optimizer
    state (ZeRO-2). `hybrid`: as `full` within groups of `fsdp_shard_size` processes, replicated across groups."""
    fsdp_shard_size: int | None = extension_field(None, ge=2)
    """Size of a sharding group with `hybrid`; null: the processes of one node."""
    fsdp_grad_reduce_dtype: Literal[32, "32", "fp32", "bf16"] = "fp32"
    """Dtype in which gradients of bf16 and fp16 weights are reduced over processes, sharded or replicated."""
    copy_engine_collectives: bool | None = extension_field(None)
    """Exchange weights and gradients of data-parallel ranks on one host by the GPUs' copy engines, which takes no time
    of the kernels beside it and sums in fp32 at the traffic of bf16; NCCL otherwise. null: where the GPUs read each
    other's memory. True: an error where they do not, and with `hybrid`."""
    megatron_amp_O2: bool = True  # noqa: N815
    """With precision bf16 or 16: True keeps 16-bit weights, and fp32 main weights in the optimizer; False fp32 weights
    with autocast."""
    native_amp_init_scale: float = Field(4294967296, ge=1)
    """First loss scale in fp16. The default, NeMo's, overflows at first: about 15 steps are skipped while it falls."""
    native_amp_growth_interval: int = Field(1000, ge=1)
    """Consecutive steps without overflow after which the loss scale of fp16 doubles."""
    hysteresis: int = Field(2, ge=1)
    """Overflows from which on each one halves the loss scale of fp16, down to 1; counted anew when it has doubled."""
    cpu_offloading_optimizer: bool = extension_field(False)
    """Keep optimizer state and main weights in pinned host memory: 12 bytes per parameter with AdamW and bf16. Each
    update copies them through the GPU, with identical results; its time depends on the host link."""
    enable_cuda_graph: bool | None = None
    """Capture forward and backward of a micro batch as a CUDA graph, with the communication of tensor-parallel ranks:
    for small models that are limited by kernel launches; on other ranks, those of each layer (docs/distributed.md).
    Validation needs additional memory. null: if supported, falling back to eager execution if the capture fails; True:
    raise an error instead."""
    do_layer_norm_weight_decay: bool = False
    """Apply weight decay to norm weights too."""
    tokenizer: TokenizerBlock = block_default(TokenizerBlock)
    """Tokenizer."""
    data: DataBlock = block_default(DataBlock)
    """Datasets and training objective."""
    optim: OptimBlock = block_default(OptimBlock)
    """Optimizer and schedule."""
    peft: PeftKeys = block_default(PeftKeys)
    """Parameter-efficient fine-tuning: the weights of `restore_from_path` are frozen."""
    memory_profile: MemoryProfileBlock = block_default(MemoryProfileBlock)
    """Record of GPU memory allocations."""


class ModelBlock(RunKeys, GPTKeys):
    """`model.*` of a GPT: architecture, batches, data and optimizer."""

    answer_only_loss: bool | None = None
    """Fine-tuning: True (and null) computes the loss on answers only, False on prompts too."""


class T5ModelBlock(RunKeys, T5Keys):
    """`model.*` of a T5: architecture, batches, data and optimizer."""

    family: Family = extension_field("t5")
    """Model family; by default inferred from the keys of a NeMo file, else `gpt`."""


class BertModelBlock(RunKeys, BertKeys):
    """`model.*` of a BERT: architecture, batches, data and optimizer."""

    family: Family = extension_field("bert")
    """Model family; by default inferred from the keys of a NeMo file, else `gpt`."""


AnyModelBlock = ModelBlock | T5ModelBlock | BertModelBlock
MODEL_BLOCKS: dict[Family, type[AnyModelBlock]] = {"gpt": ModelBlock, "t5": T5ModelBlock, "bert": BertModelBlock}


def family_of(model: Any) -> Family:
    """Return the family of a `model` block, plain or typed; `gpt` if it names none or an unknown one."""
    named = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    known: dict[Any, Family] = {family: family for family in FAMILIES}
    return known.get(named, "gpt") if isinstance(named, str) else "gpt"


class RootBlock(ConfigBlock):
    """The root of the configuration."""

    name: NonEmptyText = "stoker"
    """Name of the run."""
    env_vars: dict[str, str | int | float | bool] = Field(default={})
    """Environment variables of the training processes; a conflict with the caller's environment is an error."""
    trainer: TrainerBlock = block_default(TrainerBlock)
    """Devices, precision and length of training."""
    exp_manager: ExpManagerBlock = block_default(ExpManagerBlock)
    """Run directory, checkpoints and loggers."""
    model: Annotated[
        Annotated[ModelBlock, Tag("gpt")] | Annotated[T5ModelBlock, Tag("t5")] | Annotated[BertModelBlock, Tag("bert")],
        Discriminator(family_of),
    ] = block_default(ModelBlock)
    """Architecture, batches, data and optimizer."""
