"""Router logits for tests of MoE routing."""

import torch
from torch import Tensor

from stoker.kernels.moe.routing import RoutingResult

# Computed from the formulas in numpy: six tokens, four experts, top-2.
GOLDEN = torch.tensor(
    [
        [2.0, 1.0, 0.0, -1.0],
        [0.0, 0.5, 1.0, 2.0],
        [1.0, 1.2, -1.0, 0.0],
        [3.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 2.0, 3.0],
        [2.0, 2.1, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
GOLDEN_EXPERTS = [[0, 1], [3, 2], [1, 0], [0, 1], [3, 2], [1, 0]]


def random_logits(tokens: int, experts: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def to_dense(choice: RoutingResult, experts: int) -> Tensor:
    return choice.gates.new_zeros(len(choice.gates), experts).scatter(1, choice.experts, choice.gates)
