"""Top-5 accuracy: the share of tokens whose label is among the five most probable."""

from torch import Tensor

import stoker


@stoker.register("metric", "top5")
def top5(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 for each token whose label is among the five largest logits, else 0.

    Args:
        logits: fp32 (N, V).
        labels: int64 (N,).

    Returns:
        fp32 (N,).
    """
    return (logits.topk(5).indices == labels[:, None]).any(dim=1).float()
