"""Expert parallelism: the plan that leaves a rank its share of the experts of every layer (GShard, arXiv 2006.16668).

The ranks that share the experts have different tokens, of one micro batch or of several, and exchange them in every
layer (`moe/dispatch.py`). An expert's matrices are never split.
"""

from __future__ import annotations

import torch
from torch import nn

from .moe.moe_layer import find_moe_layers
from .parallel.expert import ExpertParallel
from .parallel.partition import RankPart, even_partition, set_partitions


def apply_expert_parallel(model: nn.Module, ranks: ExpertParallel) -> None:
    """Keep this rank's experts only, in place; after `apply_tensor_parallel` and `apply_peft`, if these are applied.

    Args:
        model: model on the meta device with all experts, which get `partitions` (`partitions_of`).
        ranks: the expert-parallel ranks.

    Raises:
        ValueError: the model has no experts, or they do not split evenly over the ranks.
    """
    layers = find_moe_layers(model)
    if not layers:
        raise ValueError(f"`expert_model_parallel_size` ({ranks.size}) must be 1 in a model without experts.")
    for layer in layers.values():
        experts, number = layer.experts, len(layer.router.weight)
        if number % ranks.size:
            raise ValueError(
                f"`num_moe_experts` ({number}) must be a multiple of `expert_model_parallel_size` ({ranks.size})."
            )
        experts.ranks = ranks
        part = ranks.part(even_partition(0, ranks.size, number))
        parameters = dict(experts.named_parameters(recurse=False))
        for name, full in parameters.items():
            own = torch.empty_like(full[: number // ranks.size])
            setattr(experts, name, nn.Parameter(own, requires_grad=full.requires_grad))
        set_partitions(experts, dict.fromkeys(parameters, part))
    if getattr(model, "default_partition", None) is None:  # without tensor parallelism all ranks have all the rest
        rest = RankPart(None, 0, 1, ranks.replica * ranks.size + ranks.rank, ranks.size * ranks.num_replicas)
        set_partitions(model, {}, default=rest)
