"""Callback that logs the norm of the weights, and stops the run when they have grown to a multiple of their start."""

import pytorch_lightning as pl
import torch

import stoker


@stoker.register("callback", "weight_norm")
class WeightNorm(pl.Callback):
    """Log `weight_norm` before each validation, and stop at twice the first one."""

    first: float | None = None

    def on_validation_start(self, trainer, pl_module):
        """Measure: on one device; sharded weights would need a sum over ranks."""
        norm = float(torch.linalg.vector_norm(torch.stack([w.detach().norm() for w in pl_module.model.parameters()])))
        self.first = norm if self.first is None else self.first
        pl_module.log("weight_norm", norm)
        trainer.should_stop = norm > 2 * self.first

    def state_dict(self):
        """Return what a resumed run needs."""
        return {"first": self.first}

    def load_state_dict(self, state_dict):
        """Restore it."""
        self.first = state_dict["first"]


@stoker.register("callback", "patience")
def patience():
    """Return a callback of Lightning's own, with settings."""
    return pl.callbacks.EarlyStopping("val_loss", patience=2)
