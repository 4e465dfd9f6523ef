"""The whole configuration: `name`, `env_vars`, `trainer`, `exp_manager` and `model`, each key that acts.

Keys that do not act (not yet, refused, historical) are in `key_table.py`; together they are every key stoker knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ....models.config.bert import BertKeys
from ....models.config.gpt import GPTKeys
from ....models.config.key_block import Block, own
from ....models.config.model_keys import FAMILIES, Family
from ....models.config.peft import PeftKeys
from ....models.config.t5 import T5Keys
from .exp_manager import ExpManagerBlock
from .optim import OptimBlock
from .trainer_and_data import DataBlock, MemoryProfileBlock, Text, TokenizerBlock, TrainerBlock, nested

RampUpBatchSize = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=3, max_length=3)]


class RunKeys(Block):
    """What `model.*` holds in every family besides the model itself: its batches, its data and its optimizer."""

    family: Family = own("gpt")
    """Which model the keys describe; left out: that which a NeMo file tells by its keys, else `gpt`."""
    restore_from_path: Text | None = None
    """Begin with the weights of this checkpoint, of the newest one of this run directory, or of this folder of Hugging
    Face's, at step 0: a model of the same shape and tokenizer, which `stoker finetune` takes from there. A run that
    resumes goes on from its own."""
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
    cpu_offloading_optimizer: bool = own(False)
    """Keep the optimizer's state and main weights in pinned host memory: 12 bytes per parameter with AdamW and bf16.
    They go through the GPU during each update, to the same results; the host link decides how long it takes."""
    enable_cuda_graph: bool | None = None
    """Record forward and backward of a micro batch as a CUDA graph and launch them at once: for small models, which
    keep the host busier than the GPU. One process; validation takes memory beside it. null: wherever it can be had,
    and where a recording fails, the run goes on without. True: or else the run is refused."""
    do_layer_norm_weight_decay: bool = False
    """Apply weight decay to norm weights too."""
    tokenizer: TokenizerBlock = nested(TokenizerBlock)
    """Text to token ids."""
    data: DataBlock = nested(DataBlock)
    """Where samples come from."""
    optim: OptimBlock = nested(OptimBlock)
    """Optimizer and schedule."""
    peft: PeftKeys = nested(PeftKeys)
    """Fine-tuning with few parameters: the weights of `restore_from_path` are frozen."""
    memory_profile: MemoryProfileBlock = nested(MemoryProfileBlock)
    """A record of the GPU's memory."""


class ModelBlock(RunKeys, GPTKeys):
    """`model.*` of a GPT: the model, its batches, its data and its optimizer."""

    answer_only_loss: bool | None = None
    """Fine-tuning: True (and null) predicts the answers alone, False prompts too."""


class T5ModelBlock(RunKeys, T5Keys):
    """`model.*` of a T5: the model, its batches, its data and its optimizer."""

    family: Family = own("t5")
    """Which model the keys describe; left out: that which a NeMo file tells by its keys, else `gpt`."""


class BertModelBlock(RunKeys, BertKeys):
    """`model.*` of a BERT: the model, its batches, its data and its optimizer."""

    family: Family = own("bert")
    """Which model the keys describe; left out: that which a NeMo file tells by its keys, else `gpt`."""


AnyModelBlock = ModelBlock | T5ModelBlock | BertModelBlock
MODEL_BLOCKS: dict[Family, type[AnyModelBlock]] = {"gpt": ModelBlock, "t5": T5ModelBlock, "bert": BertModelBlock}


def family_of(model: Any) -> Family:
    """The family of a `model` block, as plain data or typed; one that names none, or no known one, is a GPT."""
    named = model.get("family") if isinstance(model, dict) else getattr(model, "family", None)
    known: dict[Any, Family] = {family: family for family in FAMILIES}
    return known.get(named, "gpt") if isinstance(named, str) else "gpt"


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
    model: Annotated[
        Annotated[ModelBlock, Tag("gpt")] | Annotated[T5ModelBlock, Tag("t5")] | Annotated[BertModelBlock, Tag("bert")],
        Discriminator(family_of),
    ] = nested(ModelBlock)
    """The model, its batches, its data and its optimizer."""
