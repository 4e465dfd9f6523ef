"""Keys of `exp_manager`: run directory, checkpoints and early stopping, with NeMo's names; loggers in `LoggerKeys`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from ....models.config.key_block import ComponentName, ConfigBlock, NonEmptyText, block_default, extension_field
from ...loggers.logger_backends import LoggerKeys

Metric = Literal[
    "val_loss", "validation_loss", "bits_per_byte", "loss", "grad_norm", "reduced_train_loss", "train_loss"
]
"""Metrics for ranking checkpoints and for early stopping: of validation first, then of training steps."""
METRICS: tuple[str, ...] = get_args(Metric)
OWN_METRIC = "val_"
"""Before the name of a metric of the user's own."""
OwnMetric = Annotated[str, Field(pattern=r"^val_."), ComponentName("val_NAME of one of `trainer.validation_metrics`")]
Duration = Annotated[str, Field(pattern=r"^\d{1,4}:\d\d:\d\d:\d\d$", examples=["00:04:00:00"])]
"""`DD:HH:MM:SS`; text only, since YAML 1.1 reads `10:30:00` as a base-60 number."""

_METRIC_ALIASES = {"reduced_train_loss": "loss", "train_loss": "loss", "validation_loss": "val_loss"}
TRAINING_METRICS = frozenset({"loss", "grad_norm", "reduced_train_loss", "train_loss"})


def canonical_metric_name(metric: str) -> str:
    """Return the name under which a metric is logged; NeMo and Lightning use aliases of `loss` and `val_loss`."""
    return _METRIC_ALIASES.get(metric, metric)


class CheckpointParams(ConfigBlock):
    """`exp_manager.checkpoint_callback_params.*`: when to save checkpoints and which to keep."""

    dirpath: NonEmptyText | None = None
    """Directory of checkpoints; null: `checkpoints` in the run directory."""
    monitor: Metric | OwnMetric = "val_loss"
    """Metric for ranking checkpoints; `reduced_train_loss` and `train_loss` are aliases of `loss` (training loss),
    `validation_loss` of `val_loss`."""
    mode: Literal["min", "max"] = "min"
    """`min`: a smaller metric is better; `max`: a larger one."""
    save_top_k: int = Field(3, ge=-1)
    """Number of best checkpoints (by `monitor`) to keep; -1: all, 0: none but the last."""
    save_last: bool = True
    """Always keep the newest checkpoint too, and save one when training ends."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only for the copy to host memory."""
    every_n_train_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Steps between checkpoints; null: `trainer.val_check_interval`, so one after each validation, unless
    `train_time_interval` is set. `auto`: as many as lose the least time (Young and Daly), from the measured cost of a
    checkpoint and the failures of the run so far; the first after 10 steps."""
    train_time_interval: Duration | None = None
    """Save when this much time has passed since the last checkpoint: `DD:HH:MM:SS`, quoted. With `every_n_train_steps`
    whichever comes first."""


class EarlyStoppingParams(ConfigBlock):
    """`exp_manager.early_stopping_callback_params.*`: stop when a metric no longer improves.

    The metric is checked every `trainer.val_check_interval` steps, after validation.
    """

    monitor: Metric | OwnMetric = "val_loss"
    """Metric to monitor; `reduced_train_loss` and `train_loss` are aliases of `loss` (training loss),
    `validation_loss` of `val_loss`."""
    mode: Literal["min", "max"] = "min"
    """`min`: a smaller metric is better; `max`: a larger one."""
    min_delta: float = Field(0.001, ge=0)
    """Minimum change that counts as an improvement."""
    patience: int = Field(10, ge=0)
    """Checks without improvement before the run stops."""
    verbose: bool = True
    """Log each check."""
    strict: bool = True
    """Raise an error if the metric is never measured; False: warn."""
    check_finite: bool = True
    """Stop when the metric is not finite."""
    stopping_threshold: float | None = None
    """Stop once the metric is better than this."""
    divergence_threshold: float | None = None
    """Stop once the metric is worse than this."""


class EmaBlock(ConfigBlock):
    """`exp_manager.ema.*`: exponential moving average (EMA) of the weights, for validation and every checkpoint."""

    enable: bool = False
    """Maintain the EMA."""
    decay: float = Field(0.999, ge=0, lt=1)
    """Decay factor: weight of the old average at each update."""
    cpu_offload: bool = False
    """Keep the EMA in host memory; each update then waits for the device."""
    validate_original_weights: bool = False
    """Validate the trained weights instead of the EMA."""
    every_n_steps: int = Field(1, ge=1)
    """Steps between EMA updates."""


class RunKeys(ConfigBlock):
    """Run directory, checkpoints and early stopping, in `exp_manager`."""

    exp_dir: NonEmptyText | None = None
    """Parent directory of all runs; null: `./runs`."""
    explicit_log_dir: NonEmptyText | None = None
    """The run directory itself; overrides exp_dir, name and version."""
    name: NonEmptyText | None = None
    """Directory below `exp_dir`; null: the top-level `name`."""
    version: NonEmptyText | int | None = None
    """Directory below `name`; null: a timestamp, or a counter without `use_datetime_version`."""
    use_datetime_version: bool = True
    """Name versions by timestamp; False: version_0, version_1, ..."""
    resume_if_exists: bool = False
    """Resume from the newest valid checkpoint of this run; no version directory is created then."""
    resume_ignore_no_checkpoint: bool = True
    """With `resume_if_exists`, start from scratch if there is no checkpoint; False: raise an error."""
    resume_from_checkpoint: NonEmptyText | None = None
    """Checkpoint directory to resume from: weights, optimizer state and step."""
    max_time_per_run: Duration | None = None
    """Save a checkpoint and stop after this wall-clock time; the smaller of this and `trainer.max_time` applies."""
    files_to_copy: list[NonEmptyText] = Field(default=[])
    """Files to copy into `files` in the run directory."""
    create_checkpoint_callback: bool = True
    """Write checkpoints."""
    checkpoint_callback_params: CheckpointParams = block_default(CheckpointParams)
    """When to save checkpoints and which to keep."""
    create_early_stopping_callback: bool = False
    """Stop when a metric no longer improves."""
    early_stopping_callback_params: EarlyStoppingParams = block_default(EarlyStoppingParams)
    """Metric and criteria of early stopping."""
    ema: EmaBlock = block_default(EmaBlock)
    """Exponential moving average of the weights."""
    create_report: bool = extension_field(True)
    """Write report.html, a page with curves, memory, attention and configuration, when the run ends."""
    report_sample_tokens: int = extension_field(64, ge=0, le=1000)
    """Most tokens of the sample in the report, which a GPT or T5 of one process generates when training ends, within
    3 seconds; 0: none."""


class ExpManagerBlock(LoggerKeys, RunKeys):
    """`exp_manager.*`: run directory, checkpoints and loggers."""
