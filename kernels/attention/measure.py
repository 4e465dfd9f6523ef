"""Measure the attention backends on the device of this process, as a training step calls them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..timing import Event, TimedCall, in_turns, record_event
from .backend_support import BACKENDS
from .backends.registry import get_attention_function
from .call_spec import AttentionCall, InstalledSoftware, MeasuredShape
from .dispatch import BackendSelection
from .inputs import AttentionInputs

_REACH = 128
"""Distances of T5's relative position buckets."""
_MAX_UNFUSED_TOKENS = 2048
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shapes_to_measure(device_type: str) -> Iterator[MeasuredShape]:
    """Yield the shapes, the most common ones first: head width, group size, length, mask and bias."""
    if device_type != "cuda":
        for tokens in (512, 128):
            for causal in (True, False):
                yield _shape(64, 1, tokens, causal=causal, batch=1024 // tokens, heads=4, dtype="fp32")
        return
    for tokens in (4096, 1024, 16384):
        for head_dim in (128, 64, 256):
            for group_size in (1, 4):
                for causal in (True, False):
                    yield _shape(head_dim, group_size, tokens, causal=causal)
    for tokens in (2048, 512, 8192):
        yield _shape(64, 1, tokens, causal=True, bias="slopes")
        yield _shape(64, 1, tokens, causal=False, bias="distance_with_gradient")


def _shape(head_dim: int, group_size: int, tokens: int, **options: Any) -> MeasuredShape:
    sizes: dict[str, Any] = {"batch": max(1, 16384 // tokens), "heads": 2048 // head_dim}
    return MeasuredShape(head_dim=head_dim, group_size=group_size, tokens=tokens, **(sizes | options))


def measure_attention(
    shape: MeasuredShape, device: torch.device, installed: InstalledSoftware, rounds: int = 3, round_ms: float = 20.0
) -> MeasuredShape:
    """Measure forward and backward of every backend that supports a shape.

    Args:
        shape: without times.
        device: this process's.
        installed: versions of the installed software.
        rounds: number of rounds, of which the median counts.
        round_ms: time per backend and round.
    """
    call = AttentionCall(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=shape.dtype,
        batch=shape.batch,
        heads=shape.heads,
        groups=shape.heads // shape.group_size,
        head_dim=shape.head_dim,
        queries=shape.tokens,
        keys=shape.tokens,
        causal=shape.causal,
        bias=shape.bias,
        reach=_REACH if shape.bias.startswith("distance") else 0,
        training=True,
    )
    calls: dict[str, TimedCall] = {}
    refused: dict[str, str] = {}
    inputs, leaves = _inputs(call, device)
    upstream = torch.randn_like(inputs.q)
    for backend in BACKENDS:
        in_interpreter = backend.name == "triton" and device.type != "cuda"
        if backend.family == "named" or in_interpreter or backend.why_not(call, installed) is not None:
            continue
        if backend.family == "unfused" and shape.tokens > _MAX_UNFUSED_TOKENS:
            continue
        timed = _timed(backend.name, call, inputs, leaves, upstream)
        try:
            timed()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, ValueError) as error:  # of which out of memory
            refused[backend.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
        else:
            calls[backend.name] = timed
    times = in_turns(calls, rounds, round_ms, device_type=device.type)
    milliseconds = {
        name: (_rounded(statistics.median(forward)), _rounded(statistics.median(backward)))
        for name, (forward, backward) in times.items()
    }
    return replace(shape, milliseconds=milliseconds, refused=refused)


def _timed(
    name: str, call: AttentionCall, inputs: AttentionInputs, leaves: list[torch.Tensor], upstream: torch.Tensor
) -> TimedCall:
    function = get_attention_function(BackendSelection(call, name, ()))

    def timed() -> list[Event]:
        start = record_event(call.device)
        out = function(inputs)
        middle = record_event(call.device)
        torch.autograd.grad(out, leaves, upstream)
        return [start, middle, record_event(call.device)]

    return timed


def _inputs(call: AttentionCall, device: torch.device) -> tuple[AttentionInputs, list[torch.Tensor]]:
    """Return random inputs, and those that need a gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator).requires_grad_()

    dtype = _TORCH_DTYPES[call.dtype]
    heads = (call.heads, call.groups, call.groups)
    q, k, v = (draw(call.batch, call.queries, number, call.head_dim, dtype=dtype) for number in heads)
    inputs, leaves = AttentionInputs(q, k, v, causal=call.causal), [q, k, v]
    if call.bias_is_distance_table:
        table = draw(call.heads, 2 * call.reach + 1)
        return inputs._replace(distance_bias=table), [*leaves, table]
    if call.bias_is_alibi:
        return inputs._replace(alibi_slopes=torch.logspace(-8, -1, call.heads, 2.0, device=device)), leaves
    return inputs, leaves


def _rounded(milliseconds: float) -> float:
    return float(f"{milliseconds:.4g}")
