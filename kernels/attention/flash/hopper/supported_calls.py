"""Dispatch between the Hopper kernels and the portable ones, which compute the same."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from ....launch import INTERPRETED
from ...backend_support import (
    HOPPER_HEAD_DIMS,
    MIN_TRITON,
    hopper_kernels_support,
    hopper_kernels_support_documents,
)
from ..kernel_arguments import FlashAttentionParams


@cache
def has_gluon() -> bool:
    """Return True if the installed Triton includes Gluon in a version tested."""
    try:
        installed = tuple(int(part) for part in version("triton").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return False
    return installed >= MIN_TRITON and find_spec("triton.experimental.gluon") is not None


@cache
def is_hopper(device: torch.device) -> bool:
    """Return True if a CUDA device is of sm_90."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def make_tma_compatible(tensor: Tensor) -> Tensor:
    """Return the tensor (batch, rows, heads, head_dim) if TMA can read it, else a contiguous copy.

    TMA requires addresses and strides in multiples of 16 bytes, a contiguous last dimension and no expanded dimension.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:  # head widths are multiples of 16 bytes
        return tensor
    unit = 16 // tensor.element_size()
    strided = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    aligned = all(stride > 0 and stride % unit == 0 for stride in strided)
    if aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def supports_scores(q: Tensor, k: Tensor, scale: float, *, packed: bool = False) -> bool:
    """Return True if the Hopper kernels support the scores of these tensors; `packed` ones have no batch dimension."""
    if INTERPRETED or not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if q.ndim != (3 if packed else 4) or q.shape[-1] not in HOPPER_HEAD_DIMS:
        return False
    if scale <= 0 or not (q.numel() and k.numel()):
        return False
    return has_gluon() and is_hopper(q.device)


def supports(q: Tensor, k: Tensor, v: Tensor, problem: FlashAttentionParams) -> bool:
    """Return True if the Hopper kernels support this call, forward and backward."""
    distance, has_slopes = problem.distance_bias, problem.alibi_slopes is not None
    relative = distance is not None or has_slopes
    options = (
        problem.packed
        and not (
            _have_the_same_documents(q, k, problem)
            and hopper_kernels_support_documents(
                q.shape[-1], q.shape[0], causal=problem.right == 0, bias=relative or problem.sinks is not None
            )
        ),
        problem.left >= 0 or problem.right > 0,
        problem.softcap,
        problem.dropout_p,
        problem.bias is not None,
        problem.key_padding_mask is not None,
        distance is not None and has_slopes,
        v.shape[-1] != q.shape[-1],
        problem.attention_chunk,
        problem.sinks is not None and (distance is not None or has_slopes),
    )
    reach = 0 if distance is None else distance.shape[1] // 2
    if not hopper_kernels_support(q.shape[-1], options=options, relative_bias=relative, reach=reach):
        return False
    return supports_scores(q, k, problem.scale, packed=problem.packed)


def _have_the_same_documents(q: Tensor, k: Tensor, problem: FlashAttentionParams) -> bool:
    ends, key_ends = problem.cu_seqlens_q, problem.cu_seqlens_k
    if ends is None or key_ends is None or q.shape[0] != k.shape[0]:
        return False
    are_alike = ends.shape == key_ends.shape and ends.stride() == key_ends.stride()
    return ends is key_ends or (are_alike and ends.data_ptr() == key_ends.data_ptr())
