"""Cross-field rules of `exp_manager`, and of time limits, `fast_dev_run` and profiling in `trainer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ....models.config.key_block import Finding
from ...loggers.logger_backends import BACKENDS
from ...utils.redaction import holds_secret, is_secret
from ...utils.text import parse_duration, pluralize
from ..schema.exp_manager import METRICS, TRAINING_METRICS
from .rule_context import RuleContext, is_changed, no_effect, step_limit

_AT = "exp_manager"
_CALLBACK = f"{_AT}.checkpoint_callback_params"
_STOPPING = f"{_AT}.early_stopping_callback_params"
_MEMORY = "model.memory_profile"
_MIN_SECRET = 6
"""Fewest characters of a secret that is searched for: a shorter one may be in any name."""


def secrets_in_directory_names(context: RuleContext) -> Iterator[Finding]:
    """Check that no name of a directory holds the value of a secret variable, as by `name=${oc.env:TOKEN}`."""
    manager = context.root.exp_manager
    texts = {
        "name": context.root.name,
        **{f"{_AT}.{key}": getattr(manager, key) for key in ("name", "exp_dir", "explicit_log_dir", "version")},
        f"{_CALLBACK}.dirpath": manager.checkpoint_callback_params.dirpath,
    }
    for variable, value in context.environment.items() if not context.is_saved else ():
        if len(value) < _MIN_SECRET or not is_secret(variable):
            continue
        for key, text in texts.items():
            if value in str(text or ""):
                yield Finding.error(
                    (key,),
                    f"`{key.rpartition('.')[2]}` holds the value of {variable}, a secret, which a directory "
                    "would show in its name",
                    "use another variable, or a name",
                )


def settings_of_disabled_features(context: RuleContext) -> Iterator[Finding]:
    """Note settings of a disabled feature."""
    manager = context.root.exp_manager
    groups = (
        *(
            (f"{_AT}.{backend.settings}", f"{_AT}.create_{name}_logger", getattr(manager, f"create_{name}_logger"))
            for name, backend in BACKENDS.items()
            if backend.settings
        ),
        (_STOPPING, f"{_AT}.create_early_stopping_callback", manager.create_early_stopping_callback),
        (f"{_AT}.ema", f"{_AT}.ema.enable", manager.ema.enable),
        (_MEMORY, f"{_MEMORY}.enabled", context.root.model.memory_profile.enabled),
    )
    for block, switch, is_on in groups:
        inert = sorted(path for path in context.set_by_user if path.startswith(f"{block}.") and path != switch)
        inert = [path for path in inert if is_changed(context, path)]
        if inert and not is_on:
            names = ", ".join(f"`{path.removeprefix(f'{block}.')}`" for path in inert[:6])
            yield Finding.info(
                (*inert, switch),
                f"{pluralize(len(inert), 'key')} without effect because `{switch}` is False: {names}",
                f"{switch}=true",
            )


def wandb_has_a_project(context: RuleContext) -> Iterator[Finding]:
    """`create_wandb_logger` needs a project; null leaves it to W&B (WANDB_PROJECT), as in NeMo."""
    manager, path = context.root.exp_manager, f"{_AT}.wandb_logger_kwargs.project"
    if not manager.create_wandb_logger or manager.wandb_logger_kwargs.project is not None:
        return
    if path in context.set_by_user:
        rule = "`project` is null: the project is WANDB_PROJECT, or W&B's `uncategorized`"
        yield Finding.info((path,), rule, f"{path}=NAME")
    else:
        yield Finding.error(
            (path, f"{_AT}.create_wandb_logger"),
            "`create_wandb_logger` needs a `project`",
            f"{path}=NAME",
        )


def mlflow_settings_act(context: RuleContext) -> Iterator[Finding]:
    """Check MLflow's tracking URI (no credentials) and settings without effect."""
    manager = context.root.exp_manager
    keys, at = manager.mlflow_logger_kwargs, f"{_AT}.mlflow_logger_kwargs"
    # Without a logger too: the configuration is saved.
    if (manager.create_mlflow_logger or not context.is_saved) and holds_secret(keys.tracking_uri or ""):
        yield Finding.error(
            (f"{at}.tracking_uri",),
            "`tracking_uri` must not hold a user or a password",
            "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )
    if not manager.create_mlflow_logger:
        return
    if keys.save_dir is not None and (keys.tracking_uri is not None or "MLFLOW_TRACKING_URI" in context.environment):
        where = f"{at}.tracking_uri" if keys.tracking_uri is not None else "MLFLOW_TRACKING_URI"
        yield no_effect(f"{at}.save_dir", where, f"with `{where.rpartition('.')[2]}`, where the runs are stored")
    if keys.run_id is not None:
        for name in ("experiment_name", "run_name", "tags", "artifact_location"):
            if getattr(keys, name):
                yield no_effect(f"{at}.{name}", f"{at}.run_id", "with `run_id`, an existing run")


def monitored_metrics_are_measured(context: RuleContext) -> Iterator[Finding]:
    """Metrics for early stopping and for ranking checkpoints must be measured during the run."""
    root, manager = context.root, context.root.exp_manager
    stopping = manager.early_stopping_callback_params
    if manager.create_early_stopping_callback:
        why = _never_measured(context, stopping.monitor)
        if why is not None:
            key, reason = why
            yield Finding(
                "error" if stopping.strict else "warning",
                (f"{_STOPPING}.monitor", key),
                f"early stopping monitors `{stopping.monitor}`, which is never measured: {reason}",
                f"{_STOPPING}.monitor=loss, or {_AT}.create_early_stopping_callback=false",
            )
        elif root.trainer.val_check_interval > step_limit(context):
            yield Finding.warning(
                (f"{_AT}.create_early_stopping_callback", "trainer.val_check_interval", "trainer.max_steps"),
                f"early stopping is checked every `val_check_interval` ({root.trainer.val_check_interval}) steps, "
                f"never in {root.trainer.max_steps}",
                "trainer.val_check_interval=" + str(max(1, root.trainer.max_steps // 10)),
            )
    params = manager.checkpoint_callback_params
    path = f"{_CALLBACK}.monitor"
    why = _never_measured(context, params.monitor)
    if why is not None and path in context.set_by_user and manager.create_checkpoint_callback and params.save_top_k > 0:
        key, reason = why
        yield Finding.warning((path, key), f"`monitor` ({params.monitor}) is never measured: {reason}", f"{path}=loss")


def checkpoint_ranking_is_used(context: RuleContext) -> Iterator[Finding]:
    """`monitor` and `mode` rank checkpoints only if `save_top_k` is positive; the table of a sweep uses them too."""
    params = context.root.exp_manager.checkpoint_callback_params
    if params.save_top_k > 0 or not context.root.exp_manager.create_checkpoint_callback:
        return
    effect = "keeps all of them" if params.save_top_k == -1 else "keeps no ranked ones"
    for name in ("monitor", "mode"):
        path = f"{_CALLBACK}.{name}"
        if is_changed(context, path):
            yield Finding.info(
                (path, f"{_CALLBACK}.save_top_k"),
                f"`{name}` ({getattr(params, name)}) ranks no checkpoints and acts only in the table of a sweep: "
                f"`save_top_k` ({params.save_top_k}) {effect}",
                f"{_CALLBACK}.save_top_k=3",
            )


def monitored_losses_are_lowest_when_best(context: RuleContext) -> Iterator[Finding]:
    """Warn of `mode` max for a metric that falls as a model gets better."""
    manager = context.root.exp_manager
    kept = manager.checkpoint_callback_params
    for path, params, is_used, what in (
        (_CALLBACK, kept, manager.create_checkpoint_callback and kept.save_top_k > 0, "keeps the checkpoints with"),
        (_STOPPING, manager.early_stopping_callback_params, manager.create_early_stopping_callback, "waits for"),
    ):
        if is_used and params.mode == "max" and params.monitor in METRICS and params.monitor != "grad_norm":
            yield Finding.warning(
                (f"{path}.mode", f"{path}.monitor"),
                f"`mode` (max) {what} the highest `{params.monitor}`, which is the worst",
                f"{path}.mode=min",
            )


def _never_measured(context: RuleContext, metric: str) -> tuple[str, str] | None:
    """Return the key that prevents a metric from being measured and the reason, or None if it is measured."""
    if metric in TRAINING_METRICS:
        return None
    if not context.root.trainer.limit_val_batches:
        return "trainer.limit_val_batches", "`limit_val_batches` (0) never validates"
    if metric == "bits_per_byte" and context.root.model.data.data_impl == "mock":
        return "model.data.data_impl", "`data_impl: mock` has no text"
    return None


def ema_is_used(context: RuleContext) -> Iterator[Finding]:
    """Warn if the EMA is never used (no validation of it, no checkpoints) or never updated."""
    root, manager = context.root, context.root.exp_manager
    if not manager.ema.enable:
        return
    if manager.ema.validate_original_weights and not root.trainer.limit_val_batches:
        path = f"{_AT}.ema.validate_original_weights"
        yield no_effect(path, "trainer.limit_val_batches", "with `limit_val_batches` (0)")
    validated = root.trainer.limit_val_batches and not manager.ema.validate_original_weights
    if not validated and not manager.create_checkpoint_callback:
        yield no_effect(
            f"{_AT}.ema.enable", f"{_AT}.create_checkpoint_callback", "without validation of it and without checkpoints"
        )
    if manager.ema.every_n_steps > step_limit(context):
        yield Finding.warning(
            (f"{_AT}.ema.every_n_steps", "trainer.max_steps"),
            f"the EMA is never updated: `every_n_steps` ({manager.ema.every_n_steps}) is larger than `max_steps` "
            f"({root.trainer.max_steps})",
            f"{_AT}.ema.every_n_steps=1",
        )


def a_run_ends(context: RuleContext) -> Iterator[Finding]:
    """`max_steps: -1` needs `max_epochs`: the schedule needs a length, and NeMo fails without one."""
    trainer = context.root.trainer
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        yield Finding.error(
            ("trainer.max_steps", "trainer.max_epochs"),
            "`max_steps` (-1) needs `max_epochs`: a run, and its schedule, must have a length in steps or in epochs",
            "trainer.max_steps=100000, or trainer.max_epochs=1",
        )


def smaller_time_limit_applies(context: RuleContext) -> Iterator[Finding]:
    """Of `trainer.max_time` and `exp_manager.max_time_per_run` the smaller applies."""
    first, second = context.root.trainer.max_time, context.root.exp_manager.max_time_per_run
    if first is None or second is None:
        return
    paths = ("trainer.max_time", f"{_AT}.max_time_per_run")
    larger, smaller = paths if parse_duration(first) > parse_duration(second) else paths[::-1]
    yield no_effect(larger, smaller, f"with `{smaller.rpartition('.')[2]}`, which is not longer")


def durations_are_positive(context: RuleContext) -> Iterator[Finding]:
    """Durations must be at least one second: a limit of zero ends every start, an interval of zero saves every step."""
    trainer, manager = context.root.trainer, context.root.exp_manager
    interval = manager.checkpoint_callback_params.train_time_interval
    for path, duration, fix in (
        ("trainer.max_time", trainer.max_time, "~trainer.max_time for no limit"),
        (f"{_AT}.max_time_per_run", manager.max_time_per_run, f"~{_AT}.max_time_per_run for no limit"),
        (f"{_CALLBACK}.train_time_interval", interval, f"{_CALLBACK}.every_n_train_steps=1 to save after every step"),
    ):
        if duration is not None and not parse_duration(duration):
            rule = f"`{path.rpartition('.')[2]}` ({duration}) must be at least one second"
            yield Finding.error((path,), rule, fix)


def copied_files_have_distinct_names(context: RuleContext) -> Iterator[Finding]:
    """`files_to_copy` must have distinct names: all go into one directory."""
    names = Counter(path.rstrip("/").rpartition("/")[2] for path in context.root.exp_manager.files_to_copy)
    duplicates = [name for name, count in names.items() if count > 1]
    if duplicates:
        yield Finding.error(
            (f"{_AT}.files_to_copy",),
            f"`files_to_copy` has {names[duplicates[0]]} files named {duplicates[0]}; all go into one directory",
            "rename one of them",
        )


def fast_dev_run_disables_features(context: RuleContext) -> Iterator[Finding]:
    """Note features that `fast_dev_run` disables: checkpoints, loggers and early stopping."""
    manager = context.root.exp_manager
    if not int(context.root.trainer.fast_dev_run):
        return
    switches = [f"create_{name}_logger" for name in BACKENDS if name != "tensorboard"]  # which is on by default
    features = ("resume_if_exists", "resume_from_checkpoint", "create_early_stopping_callback", *switches)
    ignored = [name for name in features if getattr(manager, name)]
    if ignored:
        yield Finding.info(
            ("trainer.fast_dev_run", *(f"{_AT}.{name}" for name in ignored)),
            f"`fast_dev_run` starts from scratch, without checkpoints and loggers; ignored: {', '.join(ignored)}",
        )


def profiled_steps_are_reached(context: RuleContext) -> Iterator[Finding]:
    """Ranges of profiled steps must be valid and within the run."""
    trainer, memory = context.root.trainer, context.root.model.memory_profile
    path, limit = "trainer.profile_steps", "trainer.fast_dev_run" if int(trainer.fast_dev_run) else "trainer.max_steps"
    steps = int(trainer.fast_dev_run) or step_limit(context)
    if trainer.profiler == "pytorch":
        yield from _step_range_findings(path, path, trainer.profile_steps[0], trainer.profile_steps[1], limit, steps)
    elif path in context.set_by_user:
        yield no_effect(path, "trainer.profiler", "without `trainer.profiler=pytorch`")
    if memory.enabled:
        yield from _step_range_findings(
            f"{_MEMORY}.start_step", f"{_MEMORY}.end_step", memory.start_step, memory.end_step, limit, steps
        )
        if isinstance(trainer.devices, int) and memory.rank >= trainer.devices * trainer.num_nodes:
            yield Finding.error(
                (f"{_MEMORY}.rank", "trainer.devices"),
                f"`rank` ({memory.rank}) must be below the number of processes ({trainer.devices * trainer.num_nodes})",
                f"{_MEMORY}.rank=0",
            )


def _step_range_findings(start: str, end: str, first: int, last: int, limit: str, steps: int) -> Iterator[Finding]:
    keys = (start,) if start == end else (start, end)
    if first > last:
        yield Finding.error(keys, f"the first step ({first}) must not come after the last ({last})")
    elif first > steps:
        yield Finding.error(
            (*keys, limit), f"step {first} is never reached: `{limit.rpartition('.')[2]}` is {steps}", f"{limit}={last}"
        )
