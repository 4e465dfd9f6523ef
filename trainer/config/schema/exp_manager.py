"""The keys of `exp_manager`: where a run writes, what it logs, when it saves and when it stops, with NeMo's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ....models.config.key_block import Block, own
from .trainer_and_data import Text, nested

Metric = Literal[
    "val_loss", "validation_loss", "bits_per_byte", "loss", "grad_norm", "reduced_train_loss", "train_loss"
]
"""Figures that rank checkpoints and stop runs: those of a validation, then those of the training steps."""
Duration = Annotated[str, Field(pattern=r"^\d{1,4}:\d\d:\d\d:\d\d$", examples=["00:04:00:00"])]
"""`DD:HH:MM:SS`; text only, since YAML reads `10:30:00` as a number."""

_OTHER_NAMES = {"reduced_train_loss": "loss", "train_loss": "loss", "validation_loss": "val_loss"}
TRAINING_METRICS = frozenset({"loss", "grad_norm", "reduced_train_loss", "train_loss"})


def logged_name(metric: Metric) -> str:
    """The name under which a metric is logged: `loss` and `val_loss` have other names in NeMo and Lightning."""
    return _OTHER_NAMES.get(metric, metric)


class CheckpointParams(Block):
    """`exp_manager.checkpoint_callback_params.*`: when to save and what to keep."""

    dirpath: Text | None = None
    """Directory of checkpoints; null: `checkpoints` in the run directory."""
    monitor: Metric = "val_loss"
    """The metric that ranks checkpoints; `reduced_train_loss` and `train_loss` mean `loss`, the training loss,
    and `validation_loss` means `val_loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    save_top_k: int = Field(3, ge=-1)
    """Checkpoints to keep, the best by `monitor`; -1 keeps all, 0 none but the last."""
    save_last: bool = True
    """Always keep the newest checkpoint too, and save one when training ends."""
    async_save: bool = False
    """Write checkpoints beside training: a step waits for the copy into host memory only."""
    every_n_train_steps: int | None = Field(None, ge=1)
    """Steps between two checkpoints; null: `trainer.val_check_interval`, so one after each validation, unless
    `train_time_interval` times them."""
    train_time_interval: Duration | None = None
    """Save when this long has passed since the last checkpoint: `DD:HH:MM:SS`, quoted. With `every_n_train_steps`
    whichever comes first."""


class EarlyStoppingParams(Block):
    """`exp_manager.early_stopping_callback_params.*`: when a run stops because it gets no better.

    The metric is checked every `trainer.val_check_interval` steps, after the validation.
    """

    monitor: Metric = "val_loss"
    """The metric that is checked; `reduced_train_loss` and `train_loss` mean `loss`, the training loss,
    and `validation_loss` means `val_loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    min_delta: float = Field(0.001, ge=0)
    """A smaller change than this is no improvement."""
    patience: int = Field(10, ge=0)
    """Checks without improvement before the run stops."""
    verbose: bool = True
    """Print a line for each check."""
    strict: bool = True
    """Refuse a run that never measures the metric; False: warn."""
    check_finite: bool = True
    """Stop when the metric is not finite."""
    stopping_threshold: float | None = None
    """Stop once the metric is better than this."""
    divergence_threshold: float | None = None
    """Stop once the metric is worse than this."""


class EmaBlock(Block):
    """`exp_manager.ema.*`: an exponential moving average of the weights, for validation and in every checkpoint."""

    enable: bool = False
    """Keep the average."""
    decay: float = Field(0.999, ge=0, lt=1)
    """Weight of the old average at each update."""
    cpu_offload: bool = False
    """Keep the average in host memory; each update then waits for the device."""
    validate_original_weights: bool = False
    """Validate the weights as trained instead of their average."""
    every_n_steps: int = Field(1, ge=1)
    """Steps between two updates of the average."""


class SummaryWriterBlock(Block):
    """`exp_manager.summary_writer_kwargs.*`: the settings of TensorBoard's writer that make sense here."""

    max_queue: int = Field(10, ge=1)
    """Events that wait before the writer flushes them."""
    flush_secs: int = Field(120, ge=1)
    """Seconds between two flushes."""
    filename_suffix: str = Field("", pattern=r"^[\w.\-]{0,64}$")
    """Added to the names of event files."""


class WandbBlock(Block):
    """`exp_manager.wandb_logger_kwargs.*`: settings of Weights & Biases; its key comes from WANDB_API_KEY alone."""

    project: Text | None = None
    """The project the run is in; needed."""
    name: Text | None = None
    """Name of the run; null: the name of the run directory."""
    entity: Text | None = None
    """User or team; null: the default of your account."""
    group: Text | None = None
    """Groups runs."""
    job_type: Text | None = None
    """Kind of run within a group."""
    tags: list[Text] = Field(default=[])
    """Tags of the run."""
    notes: Text | None = None
    """A longer description."""
    save_dir: Text | None = None
    """Where its files are written; null: the run directory."""
    id: Annotated[str, Field(pattern=r"^[\w\-]{1,64}$")] | None = None
    """Identity of the run; null: a new one, which a resumed run takes up again."""
    offline: bool = False
    """Send nothing: write what `wandb sync` sends later."""


class MlflowBlock(Block):
    """`exp_manager.mlflow_logger_kwargs.*`: settings of MLflow; credentials come from its environment variables."""

    experiment_name: Text | None = None
    """The experiment the run is in; null: the name of the run."""
    run_name: Text | None = None
    """Name of the run; null: the name of the run directory."""
    tracking_uri: Text | None = None
    """The tracking server or store; null: MLFLOW_TRACKING_URI, else a database in `save_dir`."""
    save_dir: Text | None = None
    """Directory of the database `mlflow.db` where there is no tracking server; null: the run directory."""
    prefix: str = Field("", max_length=64)
    """Put before the name of each metric."""
    tags: dict[str, str | int | float | bool] = Field(default={})
    """Tags of the run."""
    artifact_location: Text | None = None
    """Where a new experiment keeps its artifacts; null: the server decides."""
    run_id: Annotated[str, Field(pattern=r"^[\w\-]{1,64}$")] | None = None
    """A run to go on with; null: a new one, which a resumed run takes up again."""


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
    max_time_per_run: Duration | None = None
    """Stop (with a checkpoint) after this long, as `trainer.max_time` does; the smaller of the two counts."""
    files_to_copy: list[Text] = Field(default=[])
    """Files to keep a copy of, in `files` in the run directory."""
    create_checkpoint_callback: bool = True
    """Write checkpoints."""
    checkpoint_callback_params: CheckpointParams = nested(CheckpointParams)
    """When to save and what to keep."""
    create_early_stopping_callback: bool = False
    """Stop when a metric gets no better."""
    early_stopping_callback_params: EarlyStoppingParams = nested(EarlyStoppingParams)
    """Which metric, and when it counts as no better."""
    ema: EmaBlock = nested(EmaBlock)
    """A moving average of the weights."""
    create_tensorboard_logger: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    summary_writer_kwargs: SummaryWriterBlock = nested(SummaryWriterBlock)
    """Settings of TensorBoard's writer."""
    create_wandb_logger: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    wandb_logger_kwargs: WandbBlock = nested(WandbBlock)
    """Settings of Weights & Biases."""
    create_mlflow_logger: bool = False
    """Log to MLflow (extra `mlflow`)."""
    mlflow_logger_kwargs: MlflowBlock = nested(MlflowBlock)
    """Settings of MLflow."""
    create_csv_logger: bool = own(False)
    """Write metrics.csv, a table, beside metrics.jsonl."""
