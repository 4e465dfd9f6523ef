"""Rules between the keys that say where a run writes, and when it validates and saves."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.key_block import Finding
from ...utils.text import counted
from .rule_context import Facts, Rule, no_effect


def directories_stay_below(facts: Facts) -> Iterator[Finding]:
    """`name` and `version` name directories below `exp_dir`."""
    root = facts.root
    for path, value in (
        ("name", root.name),
        ("exp_manager.name", root.exp_manager.name),
        ("exp_manager.version", root.exp_manager.version),
    ):
        if isinstance(value, str) and (value.startswith("/") or ".." in value.split("/") or "\0" in value):
            yield Finding(
                "error",
                (path,),
                f"`{path}` must be a name below `exp_manager.exp_dir`, without `..`",
                "use a plain name, or exp_manager.explicit_log_dir=DIRECTORY",
            )


def log_dir_is_given_once(facts: Facts) -> Iterator[Finding]:
    """`explicit_log_dir` is the run directory itself."""
    manager = facts.root.exp_manager
    if manager.explicit_log_dir is not None:
        for name in ("exp_dir", "name", "version"):
            path = f"exp_manager.{name}"
            if path in facts.given and getattr(manager, name) is not None:
                yield Finding(
                    "warning",
                    (path, "exp_manager.explicit_log_dir"),
                    f"`{name}` has no effect with `explicit_log_dir`",
                    f"~{path}",
                )
    elif manager.resume_if_exists and manager.version is not None:
        yield Finding(
            "warning",
            ("exp_manager.version", "exp_manager.resume_if_exists"),
            "`version` has no effect with `resume_if_exists`: all attempts share one directory",
            "~exp_manager.version",
        )
    namers = {
        "explicit_log_dir": manager.explicit_log_dir is not None,
        "resume_if_exists": manager.resume_if_exists,
        "version": manager.version is not None,
    }
    path = "exp_manager.use_datetime_version"
    if not manager.use_datetime_version and any(namers.values()) and path in facts.own:
        namer = next(name for name, names in namers.items() if names)
        yield no_effect(path, f"exp_manager.{namer}", f"with `{namer}`, which names the directory")


def missing_checkpoint_needs_resume(facts: Facts) -> Iterator[Finding]:
    """Only a run that looks for a checkpoint of its own can miss it."""
    manager = facts.root.exp_manager
    path = "exp_manager.resume_ignore_no_checkpoint"
    if not manager.resume_ignore_no_checkpoint and not manager.resume_if_exists and path in facts.own:
        yield no_effect(path, "exp_manager.resume_if_exists", "without `resume_if_exists`")


def checkpoint_keys_need_checkpoints(facts: Facts) -> Iterator[Finding]:
    """Without the callback nothing is saved."""
    manager = facts.root.exp_manager
    below = "exp_manager.checkpoint_callback_params."
    if manager.create_checkpoint_callback:
        return
    typed = sorted(path for path in facts.given if path.startswith(below))
    if manager.resume_if_exists and f"{below}dirpath" in typed:
        typed.remove(f"{below}dirpath")  # where the checkpoint to go on from lies
    if typed:
        yield Finding(
            "warning",
            (typed[0], "exp_manager.create_checkpoint_callback"),
            "the keys of `checkpoint_callback_params` have no effect with `create_checkpoint_callback: false`",
        )


def some_checkpoint_is_kept(facts: Facts) -> Iterator[Finding]:
    """Checkpoints that are switched on, but never due or never kept, are not written."""
    manager, steps = facts.root.exp_manager, facts.root.trainer.max_steps
    params = manager.checkpoint_callback_params
    if not manager.create_checkpoint_callback or params.save_last:
        return
    below = "exp_manager.checkpoint_callback_params"
    if params.save_top_k == 0:
        yield Finding(
            "warning",
            (f"{below}.save_top_k", f"{below}.save_last"),
            "no checkpoint is written, not even at a signal: `save_top_k` (0) and `save_last` (False) keep none",
            f"{below}.save_last=true, or exp_manager.create_checkpoint_callback=false",
        )
    elif (
        params.every_n_train_steps is not None
        and params.every_n_train_steps > steps
        and params.train_time_interval is None
    ):
        yield Finding(
            "warning",
            (f"{below}.every_n_train_steps", f"{below}.save_last", "trainer.max_steps"),
            f"no checkpoint is due in {counted(steps, 'step')}: `every_n_train_steps` is {params.every_n_train_steps} "
            "and `save_last` False",
            f"{below}.save_last=true, or {below}.every_n_train_steps={steps}",
        )


def validation_keys_need_validation(facts: Facts) -> Iterator[Finding]:
    """`limit_val_batches: 0` never validates."""
    manager, trainer = facts.root.exp_manager, facts.root.trainer
    drops = "model.data.validation_drop_last"
    if facts.root.model.data.validation_drop_last and drops in facts.own and trainer.overfit_batches:
        yield no_effect(drops, "trainer.overfit_batches", "with `overfit_batches`, which are whole")
    if trainer.limit_val_batches:
        return
    if facts.root.model.data.validation_drop_last and drops in facts.own and not trainer.overfit_batches:
        yield no_effect(drops, "trainer.limit_val_batches", "with `limit_val_batches` (0)")
    if trainer.num_sanity_val_steps and "trainer.num_sanity_val_steps" in facts.own:
        yield no_effect("trainer.num_sanity_val_steps", "trainer.limit_val_batches", "with `limit_val_batches` (0)")
    params = manager.checkpoint_callback_params
    times_checkpoints = (
        manager.create_checkpoint_callback and params.every_n_train_steps is None and params.train_time_interval is None
    ) or manager.create_early_stopping_callback
    if "trainer.val_check_interval" in facts.own and not times_checkpoints:
        yield no_effect("trainer.val_check_interval", "trainer.limit_val_batches", "with `limit_val_batches` (0)")


def checkpoints_come_in_time(facts: Facts) -> Iterator[Finding]:
    """With intervals longer than the run only the end is saved."""
    manager, trainer = facts.root.exp_manager, facts.root.trainer
    params = manager.checkpoint_callback_params
    is_timed = params.every_n_train_steps is not None or params.train_time_interval is not None
    if not manager.create_checkpoint_callback or is_timed or trainer.max_steps < 1000:
        return
    key = "trainer.val_check_interval"
    if trainer.val_check_interval > trainer.max_steps and key in facts.given:
        yield Finding(
            "info",
            ("exp_manager.checkpoint_callback_params.every_n_train_steps", key),
            f"checkpoints come every `val_check_interval` ({trainer.val_check_interval}) steps: only the end of the "
            "run is saved",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=1000",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (
    directories_stay_below,
    log_dir_is_given_once,
    missing_checkpoint_needs_resume,
    checkpoint_keys_need_checkpoints,
    some_checkpoint_is_kept,
    validation_keys_need_validation,
    checkpoints_come_in_time,
)
