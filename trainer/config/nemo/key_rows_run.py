"""Rows of the key table: root keys, trainer, run directory, checkpoints and loggers."""

from __future__ import annotations

from collections.abc import Iterator

from .key_row import CHECKPOINT_NOTE, KeyState, Row, history, off, refused, rows


def rows_of_run() -> Iterator[Row]:
    """Yield rows of the root, `trainer` and `exp_manager`."""
    yield from _root()
    yield from _trainer()
    yield from _exp_manager()


def _root() -> Iterator[Row]:
    yield from rows(KeyState.REFUSED, "", "restore_from_path", "use model.restore_from_path")
    yield from rows(
        KeyState.HISTORICAL,
        "s3_checkpointing",
        "max_write_concurrency max_read_concurrency chunk_size_MB enable_async_checkpointing",
        "checkpoints are written to a file system; S3 is not supported",
    )
    yield Row(
        "hydra.*", KeyState.HISTORICAL, "Hydra composes only; it creates no run directory and starts no jobs here"
    )
    yield from history("", "config_version", "versions of other tools' configuration files")


def _trainer() -> Iterator[Row]:
    at = "trainer"
    yield refused(at, "logger", "stoker writes its own logs; see exp_manager.create_tensorboard_logger", False)
    yield refused(
        at,
        "enable_checkpointing",
        "stoker writes its own checkpoints; see exp_manager.checkpoint_callback_params",
        False,
    )
    sampler = "stoker has its own sampler, so that a resumed run sees every sample once"
    yield refused(at, "use_distributed_sampler", sampler, False)
    yield refused(at, "replace_sampler_ddp", sampler, False)
    yield refused(
        at,
        "accumulate_grad_batches",
        "accumulation follows from model.global_batch_size / model.micro_batch_size",
        1,
    )
    yield refused(
        at,
        "strategy",
        "the device layout follows from trainer.devices, trainer.num_nodes and model.fsdp",
        "auto",
        "ddp",
        "ddp_notebook",
    )
    yield refused(at, "gradient_clip_algorithm", "gradients are clipped by their global norm", "norm")
    yield refused(at, "check_val_every_n_epoch", "validation is scheduled in steps, by trainer.val_check_interval", 1)
    yield refused(at, "limit_train_batches", "the length of a run is trainer.max_steps", 1.0)
    yield refused(at, "max_epochs", "the length of a run is trainer.max_steps, over any number of epochs", -1)
    yield refused(at, "min_epochs", "the length of a run is trainer.max_steps", 0, 1)
    yield refused(at, "min_steps", "the length of a run is trainer.max_steps", -1, 0)
    yield refused(at, "callbacks", "classes are not named in YAML", None, [])
    yield refused(at, "plugins", "classes are not named in YAML", None, [])
    yield refused(at, "detect_anomaly", "torch's anomaly mode is enabled in code", False)
    yield refused(at, "inference_mode", "validation always runs without gradients", True)
    yield refused(at, "barebones", "stoker's training loop already has that little overhead", False)
    yield refused(at, "reload_dataloaders_every_n_epochs", "samples depend on the step only", 0)
    yield refused(
        at, "default_root_dir", "the run directory is exp_manager.exp_dir", None, same_as="exp_manager.exp_dir"
    )
    yield off(at, "limit_predict_batches", "prediction inside the trainer", None, 1.0)
    yield off(at, "sync_batchnorm", "these models have no batch norm", False)
    yield from history(at, "benchmark", "cuDNN autotuning of convolutions; these models have none")
    yield from history(
        at, "limit_test_batches", "training has no test loop; `stoker evaluate` measures a checkpoint", 500
    )
    yield from history(
        at,
        "weights_summary progress_bar_refresh_rate amp_backend tpu_cores checkpoint_callback move_metrics_to_cpu",
        "removed from Lightning long ago",
    )
    yield refused(at, "gpus", "use trainer.devices", None, same_as=f"{at}.devices")
    resumed = "exp_manager.resume_from_checkpoint"
    yield refused(at, "resume_from_checkpoint", f"use {resumed}", None, same_as=resumed)
    norm = "the global 2-norm of the gradients is always logged, and no other norm"
    yield refused(at, "track_grad_norm", norm, -1, False, 2, 2.0)
    skipped = f"a run stops after more than {at}.max_skipped_steps steps with a non-finite loss or gradient"
    yield refused(at, "terminate_on_nan", skipped, False, fix=f"~{{path}} {at}.max_skipped_steps=0")
    yield refused(at, "amp_level", "apex is not used; see model.megatron_amp_O2", None, "O0")


def _exp_manager() -> Iterator[Row]:
    at = "exp_manager"
    for logger in ("dllogger", "clearml", "neptune"):
        switch = f"{at}.create_{logger}_logger"
        note = f"stoker logs to TensorBoard, W&B, MLflow and CSV, not to {logger}"
        yield Row(switch, KeyState.REFUSED, note, (False,), default=False)
        yield Row(f"{at}.{logger}_logger_kwargs", KeyState.REFUSED, note, ({},), switch=switch)
        yield Row(f"{at}.{logger}_logger_kwargs.*", KeyState.REFUSED, note, switch=switch)
    yield refused(f"{at}.summary_writer_kwargs", "log_dir", "events go to `tensorboard` in the run directory", None)
    wandb, mlflow = f"{at}.wandb_logger_kwargs", f"{at}.mlflow_logger_kwargs"
    for name in ("api_key", "key"):
        yield refused(wandb, name, "secrets do not belong in a configuration; export WANDB_API_KEY", None)
    for name in ("token", "password", "username"):
        variable = f"MLFLOW_TRACKING_{name.upper()}"
        yield refused(mlflow, name, f"credentials do not belong in a configuration; export {variable}", None)
    yield refused(wandb, "log_model", "checkpoints stay in the run directory", False, None)
    yield refused(mlflow, "log_model", "checkpoints stay in the run directory", False, None)
    yield from rows(
        KeyState.REFUSED, wandb, "experiment", "objects are not named in YAML; `id` continues a run", off=({},)
    )
    for name, ours in (("dir", "save_dir"), ("version", "id")):
        yield refused(wandb, name, f"use {wandb}.{ours}", None, same_as=f"{wandb}.{ours}")
    resumed = "a resumed run always continues its W&B run; a new run gets a new id"
    yield refused(wandb, "resume", resumed, None, True, "allow", "auto")
    yield from history(wandb, "anonymous prefix", "anonymous runs and prefixes of metric names are not supported")
    yield from history(mlflow, "synchronous checkpoint_path_prefix", "metrics are always sent in the background")
    yield from history(
        f"{at}.early_stopping_callback_params",
        "check_on_train_epoch_end log_rank_zero_only",
        "early stopping is checked after each validation, and rank 0 prints",
    )
    yield from history(at, "resume_past_end", "a finished run ends at once; raise trainer.max_steps", False)
    yield off(at, "create_straggler_detection_callback", "straggler detection", False)
    yield off(at, "create_fault_tolerance_callback", "NVIDIA's fault tolerance package", False)
    yield from history(at, "straggler_detection_params fault_tolerance", "settings of unsupported features")
    yield from history(at, "create_preemption_callback", "always: SIGTERM ends in a checkpoint and exit code 143", True)
    yield from history(
        at, "log_step_timing log_tflops_per_sec_per_gpu", "always: step time and MFU are in every log line", True
    )
    yield from history(f"{at}.step_timing_kwargs", "buffer_size sync_cuda reduction", "step times are always exact")
    yield from history(at, "disable_validation_on_resume", "validation follows the step count, resumed or not")
    yield from history(at, "seconds_to_sleep", "ranks do not wait for files")
    yield from history(at, "log_local_rank_0_only log_global_rank_0_only", "only rank 0 logs")
    yield from history(at, "log_delta_step_timing create_ipl_epoch_callback", "a setting of NeMo's own logging")

    at = f"{at}.checkpoint_callback_params"
    yield from history(
        at,
        "always_save_nemo save_nemo_on_train_end save_nemo_on_validation_end save_best_model postfix "
        "model_parallel_size prefix n_resume",
        CHECKPOINT_NOTE,
    )
    yield refused(at, "save_last_n_optim_states", "every checkpoint holds its optimizer state", -1)
    yield from history(at, "filename", "a checkpoint is a directory `step-N`; its metrics are inside")
    yield from history(at, "verbose auto_insert_metric_name", "a setting of Lightning's own checkpoints")
    yield refused(at, "save_weights_only", "every checkpoint holds its optimizer state, for resuming", False)
    yield from history(at, "save_on_train_epoch_end", "checkpoints are scheduled in steps", False)
    yield off(at, "every_n_epochs", "checkpoints scheduled in epochs; use every_n_train_steps", None, 0)
