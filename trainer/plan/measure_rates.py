"""Measure the rates that plans are estimated from: matmuls, memory, launches, copies to the host, collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ...kernels.fp8.quantize import quantize
from ...kernels.fp8.scaled_matmul import has_scaled_matmul, scaled_matmul
from ...kernels.timing import Event, in_turns, record_event
from ..device.bench_table import MatmulRate, Rates

_WIDTH, _TOKENS = 4096, (512, 2048, 16384)
_CPU_WIDTH, _CPU_TOKENS = 1024, (128, 1024)
_COPIED = {"cuda": 1 << 30, "cpu": 64 << 20}
_LAUNCHES = 200
_REDUCED_BYTES = 256 << 20
_CALLS = 5


def measure_rates(device: torch.device, links: Mapping[str, float]) -> Rates:
    """Measure the rates of a device; `links` are those of its collectives."""
    on_gpu = device.type == "cuda"
    tokens, width = (_TOKENS, _WIDTH) if on_gpu else (_CPU_TOKENS, _CPU_WIDTH)
    source = torch.empty(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), device)
    host_link = None
    if on_gpu:
        pinned = torch.empty(source.numel() // 4, dtype=torch.uint8, pin_memory=True)
        received = target[: pinned.numel()]
        host_link = pinned.numel() / _seconds(lambda: received.copy_(pinned, non_blocking=True), device)
    return Rates(
        matmul=tuple(_matmul_rate(each, width, device) for each in tokens),
        memory=_rounded(2 * source.numel() / copy / 1e9),
        launch=_rounded(1e6 * _launch_seconds(device)),
        host_link=None if host_link is None else _rounded(host_link / 1e9),
        **links,
    )


def _matmul_rate(tokens: int, width: int, device: torch.device) -> MatmulRate:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = (torch.randn(rows, width, device=device, dtype=dtype) for rows in (tokens, width))
    teraflop = 2 * tokens * width * width / 1e12
    rate, in_fp8 = teraflop / _seconds(lambda: x @ weight.t(), device), None
    if device.type == "cuda" and has_scaled_matmul(device, "tensor"):
        a, b = (quantize(each, "e4m3", "tensor", columns=False).rows for each in (x, weight))
        assert a is not None
        assert b is not None
        in_fp8 = _rounded(teraflop / _seconds(lambda: scaled_matmul(a, b, dtype), device))
    return MatmulRate(tokens=tokens, matmul=_rounded(rate), fp8=in_fp8)


def _launch_seconds(device: torch.device) -> float:
    """Return the host time of launching one kernel through PyTorch, of many in a row."""
    one = torch.zeros(1, device=device)

    def launch() -> float:
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            one.add_(1)
        seconds = time.perf_counter() - begin
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return seconds / _LAUNCHES

    return statistics.median([launch() for _ in range(_CALLS + 1)][1:])


def measure_links(device: torch.device, ranks: int, ranks_per_node: int) -> dict[str, float]:
    """Measure the all-reduce of all ranks, which call this together; return `peer_link` or `network`, in GB/s.

    Its bus bandwidth is that of the slowest link, between machines divided by the GPUs of one, which share the network.
    """
    summed = torch.zeros(_REDUCED_BYTES // 2, dtype=torch.bfloat16, device=device)
    moved = 2 * (ranks - 1) / ranks * _REDUCED_BYTES
    rate = moved / _seconds(lambda: dist.all_reduce(summed), device) / 1e9
    return {"peer_link": _rounded(rate)} if ranks <= ranks_per_node else {"network": _rounded(rate / ranks_per_node)}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call."""

    def timed() -> list[Event]:
        begin = record_event(device.type)
        call()
        return [begin, record_event(device.type)]

    for _ in range(2):
        timed()
    (rounds,) = in_turns({"": timed}, _CALLS, 0.0, device_type=device.type)[""]
    return statistics.median(rounds) / 1e3


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
