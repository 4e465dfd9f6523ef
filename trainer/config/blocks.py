"""The keys around the model: trainer, exp_manager, tokenizer, data and optimizer, with NeMo's names and meanings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ...models.config.block import Block, own

Precision = Literal[32, "32", "32-true", "bf16", "bf16-mixed", "bf16-true"]
PositiveInt = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty: an empty path or name is an unset variable of somebody's shell, not a wish."""
BlockT = TypeVar("BlockT", bound=Block)


def nested(kind: type[BlockT]) -> BlockT:
    """The default of a key that is a block: the block with all its defaults."""
    return kind.model_validate({})


class TrainerBlock(Block):
    """`trainer.*`: where and how long to train."""

    devices: PositiveInt | Literal["auto"] = 1
    """Devices per node."""
    num_nodes: int = Field(1, ge=1)
    """Machines in the run."""
    accelerator: Literal["auto", "gpu", "cuda", "cpu", "mps"] = "auto"
    """Kind of device; `auto` takes a CUDA GPU where there is one, else the CPU."""
    precision: Precision | None = None
    """`bf16` trains bf16 weights with fp32 main weights (see `model.megatron_amp_O2`), `32` trains in fp32;
    null: bf16 on a GPU from sm_80 on, 32 elsewhere."""
    max_steps: int = Field(100000, ge=1)
    """Optimizer steps to train; the schedules end here."""
    max_time: str | None = Field(None, pattern=r"^\d{1,4}:\d\d:\d\d:\d\d$", examples=["00:04:00:00"])
    """Stop (with a checkpoint) after this long: `DD:HH:MM:SS`, quoted."""
    log_every_n_steps: int = Field(10, ge=1)
    """Steps between two log lines; metrics stay on the device in between."""
    val_check_interval: int = Field(100, ge=1)
    """Optimizer steps between two validations."""
    limit_val_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 50
    """Global batches per validation (int), or the fraction of the validation set (float); 0 never validates."""
    gradient_clip_val: float | None = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 or null: off."""
    enable_progress_bar: bool = True
    """Show the live panel when the output is a terminal; otherwise plain lines."""
    enable_model_summary: bool = True
    """Print the table of modules and parameters before training."""
    num_sanity_val_steps: int = Field(0, ge=0)
    """Global validation batches to run before the first step."""


class CheckpointParams(Block):
    """`exp_manager.checkpoint_callback_params.*`: when to save and what to keep."""

    dirpath: Text | None = None
    """Directory of checkpoints; null: `checkpoints` in the run directory."""
    monitor: Literal["val_loss"] = "val_loss"
    """The metric that ranks checkpoints."""
    mode: Literal["min"] = "min"
    """A smaller metric is better."""
    save_top_k: int = Field(3, ge=-1)
    """Checkpoints to keep, the best by `monitor`; -1 keeps all, 0 none but the last."""
    save_last: bool = True
    """Always keep the newest checkpoint too, and save one when training ends."""
    every_n_train_steps: int | None = Field(None, ge=1)
    """Steps between two checkpoints; null: `trainer.val_check_interval`, so one after each validation."""


class ExpManagerBlock(Block):
    """`exp_manager.*`: where a run writes and what it logs."""

    exp_dir: Text | None = None
    """Parent of all runs; null: `./runs`."""
    explicit_log_dir: Text | None = None
    """The run directory itself; overrides exp_dir, name and version."""
    name: Text | None = None
    """Directory below `exp_dir`; null: the top-level `name`."""
    version: Text | int | None = None
    """Directory below `name`; null: a time stamp, or a counter without `use_datetime_version`."""
    use_datetime_version: bool = True
    """Name versions by time; False: version_0, version_1, ..."""
    resume_if_exists: bool = False
    """Go on from the newest valid checkpoint of this run; there is no version directory then."""
    resume_ignore_no_checkpoint: bool = True
    """With `resume_if_exists`, start from scratch when there is no checkpoint; False: that is an error."""
    resume_from_checkpoint: Text | None = None
    """A checkpoint directory to start from: weights, optimizer and step."""
    create_checkpoint_callback: bool = True
    """Write checkpoints."""
    checkpoint_callback_params: CheckpointParams = nested(CheckpointParams)
    """When to save and what to keep."""
    create_tensorboard_logger: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


class TokenizerBlock(Block):
    """`model.tokenizer.*`."""

    library: Literal["byte-level", "char"] = "byte-level"
    """`byte-level`: UTF-8 bytes in ByT5's scheme (pad 0, eos 1, unk 2, byte + 3). `char`: the characters of the
    training text."""


class DataBlock(Block):
    """`model.data.*`."""

    data_impl: Literal["pystd", "text", "mock"] = "pystd"
    """`pystd`: this interpreter's standard library. `text`: the file or folder at `path`. `mock`: random tokens."""
    path: str | None = own(None)
    """Text file, or folder whose text files are read, for `data_impl: text`."""
    splits_string: str = Field(
        "900,50,50", pattern=r"^\d{1,9}(\.\d{1,9})?(,\d{1,9}(\.\d{1,9})?){0,2}$", examples=["900,50,50"]
    )
    """Proportions of train, validation, test."""
    seq_length: int | None = Field(None, ge=1)
    """Tokens in a sample; null: `model.encoder_seq_length`."""
    num_workers: int = Field(0, ge=0, le=256)
    """Processes that prepare batches; 0 prepares them in a thread of the trainer."""


class SchedBlock(Block):
    """`model.optim.sched.*`: the learning rate over the steps. Golden numbers: nemo_semantics, Appendix B."""

    name: Literal["CosineAnnealing", "WarmupAnnealing"] = "CosineAnnealing"
    """Shape of the schedule."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a part of `max_steps`; only one of the two."""
    constant_steps: int | None = Field(None, ge=0)
    """Steps at `min_lr` at the end (CosineAnnealing)."""
    constant_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a part of `max_steps`; only one of the two."""
    min_lr: float = Field(0.0, ge=0)
    """Final learning rate."""
    max_steps: int | None = Field(None, ge=1)
    """Length of the schedule; null: `trainer.max_steps`."""


class OptimBlock(Block):
    """`model.optim.*`."""

    name: Literal["adamw", "fused_adam", "distributed_fused_adam", "megatron_fused_adam", "mcore_distributed_optim"] = (
        "adamw"
    )
    """AdamW; NeMo's names of its fused and distributed forms mean the same here and are reported once."""
    lr: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, for matrices and tables; never for biases and norms (but see
    `model.do_layer_norm_weight_decay`)."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.98], min_length=2, max_length=2)
    """Decay of the running mean and of the running square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the running square."""
    sched: SchedBlock = nested(SchedBlock)
    """Learning-rate schedule."""
