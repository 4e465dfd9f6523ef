"""Configurations and runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.load import load_run_config
from ..config.run_config import RunConfig
from ..utils import environment
from ..utils.errors import UserError

if TYPE_CHECKING:
    from pytorch_lightning import Callback
    from pytorch_lightning.loggers import Logger

    from ..plan.attention_report import AttentionReport
    from ..plan.run_plan import Plan
    from ..train import TrainingResult


def load_config(
    overrides: Iterable[str] = (),
    *,
    config_name: str | None = None,
    config_dir: str | Path | None = None,
    finetune: bool = False,
) -> RunConfig:
    """Compose and validate a configuration, as the command line does; torch is not imported.

    Args:
        overrides: `group=choice`, `key=value`, `~key`.
        config_name: the primary file, without `.yaml`; None: `train`, or `finetune`.
        config_dir: a folder with files of your own, searched first.
        finetune: as `stoker finetune`: keys of the model come from `model.restore_from_path`.

    Returns:
        The frozen configuration: `config.root.model.hidden_size`, `config.origins["model.hidden_size"]`.

    Raises:
        UserError: a file or choice does not exist.
        ConfigError: the configuration is not valid; `lines` has all problems.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    folder = None if config_dir is None else Path(config_dir)
    if finetune:
        from ..conversion.finetune_defaults import load_finetune_config as load
    else:
        load = load_run_config
    config = load(config_name, folder, list(overrides))
    if config.hydra is not None and config.hydra.is_multirun:
        raise UserError("`hydra.mode` is MULTIRUN, a sweep: start it with `stoker train`, or set hydra.mode=RUN")
    return config


def check_config(config: object) -> None:
    """Check that an argument is a configuration.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"`config` ({type(config).__name__}) must come from stoker.load_config([...])")


def train(config: RunConfig, *, callbacks: Sequence[Callback] = (), loggers: Sequence[Logger] = ()) -> TrainingResult:
    """Train as `stoker train` does, in this process.

    Under torchrun this process is one of the ranks; otherwise the configuration must be one of a single device.

    Args:
        config: from `load_config`.
        callbacks: Lightning callbacks besides those of `trainer.callbacks`; which ones can act says docs/extend.md.
        loggers: Lightning loggers besides those of `exp_manager.loggers`.

    Returns:
        The trained `model`, `directory`, `checkpoint`, `step`, `validation` and `stop_reason` of the run.

    Raises:
        UserError: the configuration or a callback is not supported here, training diverged, or the disk is full.
    """
    check_config(config)
    from ..distributed.placement import resolve_placement

    placement = resolve_placement(config.root.trainer, environment.snapshot())
    if placement.rank is None and (not placement.is_single or config.root.trainer.max_restarts):
        raise UserError(
            f"`trainer.devices` ({config.root.trainer.devices}), `trainer.num_nodes` "
            f"({config.root.trainer.num_nodes}) and `trainer.max_restarts` ({config.root.trainer.max_restarts}) need "
            "processes that stoker.train does not start; start this script with torchrun --nproc-per-node "
            f"{placement.world_size} and trainer.max_restarts=0, or use stoker train"
        )
    environment.prepare_process(config.root.env_vars)
    from ..train import run_training, train_as_rank

    if placement.rank is not None and placement.world_size > 1:
        return train_as_rank(config, placement, callbacks=callbacks, loggers=loggers)
    return run_training(config, callbacks=callbacks, loggers=loggers)


def finetune(
    config: RunConfig, *, callbacks: Sequence[Callback] = (), loggers: Sequence[Logger] = ()
) -> TrainingResult:
    """Fine-tune as `stoker finetune` does, in this process; see `train`.

    Args:
        config: from `load_config(..., finetune=True)`.
        callbacks: Lightning callbacks.
        loggers: Lightning loggers.

    Raises:
        UserError: the configuration names no pretrained model; or as `train`.
    """
    check_config(config)
    if config.root.model.restore_from_path is None:
        raise UserError(
            "`model.restore_from_path` (null) must name the model to fine-tune; load the configuration with "
            "load_config([...], finetune=True) and model.restore_from_path=FOLDER"
        )
    return train(config, callbacks=callbacks, loggers=loggers)


def plan(config: RunConfig, *, device: str | None = None) -> Plan:
    """Estimate memory and time of a run, as `stoker plan` does, without starting it.

    Args:
        config: from `load_config`.
        device: `h100`, `h200`, `a100` and so on, a memory size like `80GiB`, or both like `a100:40GiB`; None: the GPU
            of this machine, or an H100.

    Returns:
        The plan: `allocated`, `needed` and `available` bytes, `fits`, `memory` and `time`.

    Raises:
        UserError: there is no such GPU in the tables.
    """
    check_config(config)
    from ..plan.planned_target import known_vocabulary, planned_target
    from ..plan.run_plan import make_plan

    run, target = planned_target(config.root, device)
    try:
        return make_plan(run, target, vocab_size=known_vocabulary(run.data)[0])
    except ValueError as error:
        raise UserError(str(error).splitlines()) from None


def explain_attention(config: RunConfig, *, arch: str | None = None) -> AttentionReport:
    """Say which attention backend every layer of a run uses for each kind of call, and why not the others.

    Args:
        config: from `load_config`.
        arch: `sm80`, `sm90`, `sm100`, `cpu` and so on, which need not be here; None: the device of the configuration.

    Returns:
        The report: `choices`, each with `kind`, `backend` and the candidate `rows`; as text its `str`.

    Raises:
        UserError: there is no such device.
    """
    check_config(config)
    from ..plan.attention_report import ARCHITECTURES
    from ..plan.attention_report import explain_attention as explain

    if arch is not None and arch not in ARCHITECTURES:
        raise UserError(f"`arch` ({arch}) must be one of {', '.join(ARCHITECTURES)}")
    return explain(config.root, arch)
