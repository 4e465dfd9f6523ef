"""Focal loss (Lin et al. 2017, arXiv 1708.02002): tokens that the model predicts well count less."""

import torch.nn.functional as F
from torch import Tensor

import stoker

GAMMA = 2.0


@stoker.register("loss", "focal")
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (1 - p)^gamma times the cross-entropy of each token, p being the probability of its label.

    Args:
        logits: fp32 (N, V).
        labels: int64 (N,).

    Returns:
        fp32 (N,).
    """
    entropy = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-entropy).exp()) ** GAMMA * entropy
