"""Components of a user's own that compute what built-in ones do; registered on import."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import stoker


@stoker.register("loss", "own_entropy")
def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """As the built-in loss."""
    return F.cross_entropy(logits, labels, reduction="none")


@stoker.register("metric", "entropy")
class Entropy:
    """As `val_loss`."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return entropy(logits, labels)


@stoker.register("metric", "top1")
def top1(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float()


@stoker.register("optimizer", "own_adamw")
class OwnAdamW(torch.optim.AdamW):
    """As the built-in AdamW, but that its update is said to be elementwise."""

    elementwise = True


@stoker.register("schedule", "own_linear")
def linear(step: int, max_steps: int, lr: float, min_lr: float, floor: float = 0.0) -> float:
    return max(lr * (1 - step / max_steps), min_lr, floor)
