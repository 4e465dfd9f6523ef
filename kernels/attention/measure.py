"""Measure the attention backends on the device of this process, as a training step calls them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ..timing import Event, TimedCall, in_turns, record_event
from .backend_support import BACKENDS
from .backends.registry import get_attention_function
from .call_spec import AttentionCall, InstalledSoftware, MeasuredCall
from .dispatch import BackendSelection
from .inputs import AttentionInputs

_MAX_UNFUSED_TOKENS = 2048
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def calls_to_measure(capability: tuple[int, int] | None) -> Iterator[AttentionCall]:
    """Yield the calls for a GPU, the most common ones first, or for the CPU (None)."""
    on_gpu = capability is not None
    device: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "dtype": "bf16" if on_gpu else "fp32"}
    in_all, width = (16384, 2048) if on_gpu else (1024, 256)

    def call(head_dim: int, group_size: int, tokens: int, **options: Any) -> AttentionCall:
        heads, batch = width // head_dim, max(1, in_all // tokens)
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "groups": heads // group_size, "head_dim": head_dim}
        length: dict[str, Any] = {"queries": tokens, "keys": tokens, "training": True}
        return AttentionCall(**device, capability=capability, **sizes, **length, **options)

    if not on_gpu:
        yield from (call(64, 1, tokens, causal=causal) for tokens, causal in product((512, 128), (True, False)))
        return
    for tokens, head_dim, group_size, causal in product((4096, 1024, 16384), (128, 64, 256), (1, 4), (True, False)):
        yield call(head_dim, group_size, tokens, causal=causal)
    for tokens in (2048, 512, 8192):
        yield call(64, 1, tokens, bias="slopes")
        yield call(64, 1, tokens, causal=False, bias="distance_with_gradient", reach=128)  # T5's


def measure_attention(
    call: AttentionCall, device: torch.device, installed: InstalledSoftware, rounds: int = 3, round_ms: float = 20.0
) -> MeasuredCall:
    """Measure forward and backward of every backend that supports a call.

    Args:
        call: of this process's device.
        device: the device.
        installed: versions of the installed software.
        rounds: number of rounds, of which the median counts.
        round_ms: time per backend and round.
    """
    calls: dict[str, TimedCall] = {}
    refused: dict[str, str] = {}
    inputs, leaves = _inputs(call, device)
    upstream = torch.randn_like(inputs.q)
    for backend in BACKENDS:
        in_interpreter = backend.name == "triton" and device.type != "cuda"
        if backend.family == "named" or in_interpreter or backend.why_not(call, installed) is not None:
            continue
        if backend.family == "unfused" and call.keys > _MAX_UNFUSED_TOKENS:
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
    return MeasuredCall(call=call, milliseconds=milliseconds, refused=refused)


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
