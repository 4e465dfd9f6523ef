"""Lightning callbacks of users' own in `stoker train`: which ones can act there, their hooks and their state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.config.extensions import load_extension
from ..lightning.lightning_imports import callbacks as lightning
from ..lightning.lightning_imports import pl
from ..utils.errors import UserError

_TAKE_OVER: Mapping[type[pl.Callback], str] = {
    lightning.Checkpoint: "exp_manager.checkpoint_callback_params saves checkpoints",
    lightning.GradientAccumulationScheduler: "model.rampup_batch_size changes the batch size during a run",
    lightning.StochasticWeightAveraging: "exp_manager.ema averages weights",
    lightning.WeightAveraging: "exp_manager.ema averages weights",
    lightning.BaseFinetuning: "model.peft trains some parameters only",
    lightning.ModelPruning: "stoker has no pruning",
    lightning.BatchSizeFinder: "stoker plan --fit finds the largest micro batch",
    lightning.LearningRateFinder: "sweep with stoker train -m model.optim.lr=...",
    lightning.ProgressBar: "trainer.enable_progress_bar shows progress",
}
"""Callbacks that would take over what stoker does, and what does it."""
_NEVER_CALLED = (
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
"""Hooks of single micro batches and of Lightning's checkpoints, which this training loop has none of."""


class UserCallbacks:
    """Callbacks of a user's own, in the order given.

    Args:
        names: those registered under the names of `trainer.callbacks`.
        given: instances.

    Attributes:
        callbacks: the instances.

    Raises:
        UserError: some cannot act in `stoker train`; lists every reason.
    """

    def __init__(self, names: Sequence[str] = (), given: Sequence[pl.Callback] = ()) -> None:
        problems: list[str] = []
        self.callbacks: list[pl.Callback] = []
        for name in names:
            try:
                self.callbacks.append(load_extension("callback", name)())
            except (LookupError, ValueError, TypeError) as error:
                problems.append(f"`trainer.callbacks` ({name}): {error}")
        self.callbacks += given
        problems += [line for callback in self.callbacks for line in _problems(callback)]
        keys = [callback.state_key for callback in self.callbacks if isinstance(callback, pl.Callback)]
        problems += [f"the callback {key} is given twice" for key in sorted({k for k in keys if keys.count(k) > 1})]
        if problems:
            raise UserError(problems)
        self.state()  # what a checkpoint cannot hold is told before training

    def publish(self, trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
        """Make metrics visible in `trainer.callback_metrics`."""
        if self.callbacks:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Call the hooks of the start of a validation."""
        for callback in self.callbacks:
            callback.on_validation_start(trainer, module)
            callback.on_validation_epoch_start(trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule, metrics: Mapping[str, float]) -> None:
        """Call the hooks of the end of a validation, with its metrics published."""
        self.publish(trainer, metrics)
        for callback in self.callbacks:
            callback.on_validation_epoch_end(trainer, module)
            callback.on_validation_end(trainer, module)

    def state(self) -> dict[str, Any]:
        """Return the state of each callback that has one, for JSON.

        Raises:
            UserError: it holds something else than tensors, numbers, text, lists and mappings.
        """
        states = {callback.state_key: callback.state_dict() for callback in self.callbacks}
        return {key: _encode(state, f"state_dict() of callback {key}") for key, state in states.items() if state}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Restore what `state` has returned; callbacks that had none keep theirs."""
        for callback in self.callbacks:
            if callback.state_key in states:
                callback.load_state_dict(_decode(states[callback.state_key]))


def _problems(callback: Any) -> Iterator[str]:
    """Yield why a callback cannot act in `stoker train`."""
    name = type(callback).__name__
    if isinstance(callback, type):
        yield f"{callback.__name__} is a class; give an instance, {callback.__name__}()"
        return
    if not isinstance(callback, pl.Callback):
        yield f"{name} is not a callback; derive it from pytorch_lightning.Callback"
        return
    for kind, instead in _TAKE_OVER.items():
        if isinstance(callback, kind):
            yield f"the callback {name} cannot act in stoker train: {instead}; or use stoker.GPTModule in a pl.Trainer"
            return
    hooks = [hook for hook in _NEVER_CALLED if getattr(type(callback), hook) is not getattr(pl.Callback, hook)]
    if hooks:
        yield (
            f"the callback {name} overrides {', '.join(hooks)}, which stoker train never calls: a training step is a "
            "global batch, and callback state is saved by state_dict; use on_train_batch_end, "
            "on_before_optimizer_step or on_validation_end, or stoker.GPTModule in a pl.Trainer"
        )


def _encode(value: Any, where: str) -> Any:
    """Return a value for JSON, which knows neither tensors nor infinity."""
    if isinstance(value, Tensor):
        return {"tensor": _encode(value.tolist(), where), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, where) for key, item in value.items()}
    raise UserError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot store; return tensors, numbers, text, "
        "lists and mappings with text keys"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tensor", "dtype"}:
        return torch.tensor(_decode(value["tensor"]), dtype=getattr(torch, value["dtype"]))
    if value.keys() == {"float"}:
        return float(value["float"])
    return {key: _decode(item) for key, item in value.items()}
