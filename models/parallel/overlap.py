"""Matrix products whose communication runs beside them, on GPUs that read each other's memory.

The product is computed in one part for each rank: while a part is multiplied, the next one is copied from, or the last
one by, another rank (asynchronous tensor parallelism: Wang et al., "Overlap Communication with Dependent Computation
via Decomposition in Large Deep Learning Models", ASPLOS 2023; with torch's symmetric memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory  # defines the operations
from torch import Tensor

_ops: Any = torch.ops.symm_mem


def gather_and_multiply(rows: Tensor, matrix: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the rows (rows, in) of all ranks, in the order of the ranks, and their product with a matrix (in, out)."""
    # without the gathered rows, torch would multicast few of them
    gathered, products = _ops.fused_all_gather_matmul(rows.contiguous(), [matrix], 0, group, return_A=True)
    return gathered, products[0]


def multiply_and_scatter(rows: Tensor, matrix: Tensor, group: str) -> Tensor:
    """Return this rank's share of the rows of the sum over the ranks of rows (rows, in) times a matrix (in, out)."""
    return _ops.fused_matmul_reduce_scatter(rows, matrix, "sum", 0, group)


def devices_share_memory(devices: Sequence[int]) -> bool:
    """Return True if this process sees these GPUs, and they can read each other's memory."""
    return all(0 <= device < torch.cuda.device_count() for device in devices) and all(
        torch.cuda.can_device_access_peer(device, peer) for device in devices for peer in devices if device != peer
    )
