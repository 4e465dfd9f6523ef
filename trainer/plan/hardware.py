"""GPUs of `stoker plan`: memory, peak rates, and the fraction of them that training reaches; data in hardware.yaml."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.yaml_reader import read_yaml
from ..device.bench_table import MatmulRate, Rates

GIB = 2**30
_DATA: dict[str, Any] = read_yaml(Path(__file__).with_name("hardware.yaml")).tree
EFFICIENCY: dict[str, float] = {name: entry["value"] for name, entry in _DATA["efficiencies"].items()}
"""Measured efficiencies that hold for all GPUs, by their name in hardware.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSpec:
    """Specification of a GPU.

    Attributes:
        name: as reported by the driver; the peak is looked up by it.
        memory: total bytes as reported by the driver.
        capability: CUDA compute capability.
        bandwidth: memory bandwidth in bytes/s, from the data sheet.
        host_link: bytes/s to the host in one direction, as reached by copies of pinned memory.
        peer_link: bytes/s to the other GPUs of its machine, as reached by NCCL collectives.
        network: bytes/s to GPUs of other machines, as reached by NCCL collectives.
        measured: the efficiencies were measured on this GPU; otherwise they are those of the H100.
        pointwise_limit: bytes/s that pointwise kernels reach at most, whatever the bandwidth; infinite if not known.
        efficiency: efficiencies by their name in hardware.yaml.
        bench: file and date of the user's own measurements that rates and efficiencies were adjusted to; else empty.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bandwidth: float
    host_link: float
    peer_link: float
    network: float
    measured: bool = False
    pointwise_limit: float = math.inf
    efficiency: Mapping[str, float] = field(default_factory=lambda: EFFICIENCY, repr=False, hash=False)
    bench: str = ""

    @property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s; None if not known."""
        return bf16_peak_flops(self.name)

    @property
    def has_nvlink(self) -> bool:
        """True if GPUs of a machine are linked faster than by PCIe, whose generation 5 reaches 5e10 bytes/s."""
        return self.peer_link > 1e11

    @property
    def pointwise_bandwidth(self) -> float:
        """Bytes/s that pointwise kernels reach."""
        return min(self.bandwidth * self.efficiency["bandwidth"], self.pointwise_limit)


def _gpu(entry: dict[str, Any]) -> GPUSpec:
    figures = {key: value for key, value in entry.items() if key not in ("product", "memory_gib")}
    figures["capability"] = tuple(entry["capability"])
    return GPUSpec(memory=int(entry["memory_gib"] * GIB), **figures)


_TABLE = {name: _gpu(entry) for name, entry in _DATA["gpus"].items()}
GPU_NAMES = tuple(_TABLE)
DEFAULT_GPU = "h100"


def bf16_peak_flops(gpu_name: str) -> float | None:
    """Return the dense bf16 peak FLOP/s of a GPU by its driver name; None for an unknown GPU or a MIG slice."""
    if "MIG" in gpu_name:
        return None
    for pattern, teraflops in _DATA["peak_teraflops"].items():
        if re.search(rf"\b{pattern}\b", gpu_name):
            return teraflops * 1e12
    return None


def parse_gpu(text: str) -> GPUSpec:
    """Parse `--device`: a name in the table, a memory size (`80GiB`, `24GB`), or both (`h100:40GiB`).

    A size alone is an H100 with that much memory.

    Raises:
        ValueError: `text` is none of these.
    """
    name, colon, size = text.lower().partition(":")
    if name in _TABLE and not colon:
        return _TABLE[name]
    memory = _bytes(size if colon else name)
    if memory is None or (colon and name not in _TABLE):
        raise ValueError(
            f"`--device` ({text}) must be one of {', '.join(GPU_NAMES)}, a size like 80GiB, or both like h100:40GiB."
        )
    return replace(_TABLE[name if colon else DEFAULT_GPU], memory=memory)


def match_gpu(driver_name: str, memory: int, capability: tuple[int, int]) -> GPUSpec:
    """Return the specification of an installed GPU: its own memory, and the rates of the most similar GPU known."""
    products = {key: entry["product"] for key, entry in _DATA["gpus"].items()}
    matches = {key: re.search(rf"\b{pattern}\b", driver_name) for key, pattern in products.items()}
    lengths = {key: len(match.group()) for key, match in matches.items() if match}
    if lengths:  # the longest match; among sizes of one product the nearest
        named = [_TABLE[key] for key, length in lengths.items() if length == max(lengths.values())]
        similar = min(named, key=lambda gpu: abs(gpu.memory - memory))
    else:  # the same compute capability, or at least the same major one
        gpus = list(_TABLE.values())
        candidates = [gpu for gpu in gpus if gpu.capability == capability]
        candidates += [gpu for gpu in gpus if gpu.capability[0] == capability[0]]
        similar = [*candidates, _TABLE[DEFAULT_GPU]][0]
    measured = similar.measured and similar.name == driver_name
    return replace(similar, name=driver_name, memory=memory, capability=capability, measured=measured)


def adjust_to_measured(gpu: GPUSpec, rates: Rates, source: str) -> GPUSpec:
    """Return a GPU with the rates that `stoker bench` measured on it.

    Links are as measured. Efficiencies hold for whole training steps: they are those of the H100, multiplied by what
    was measured here relative to what the same functions measure on that H100 (`bench` in hardware.yaml).
    """
    here, there = rates, Rates.model_validate_json(json.dumps(_DATA["bench"]))
    adjusted = dict(EFFICIENCY)
    most, reference = max(here.matmul, key=_tokens), max(there.matmul, key=_tokens)
    if gpu.peak is not None:
        peak_there = _TABLE[DEFAULT_GPU].peak or gpu.peak
        adjusted["matmul"] *= most.matmul / reference.matmul * peak_there / gpu.peak
    adjusted["bandwidth"] *= here.memory / there.memory * _TABLE[DEFAULT_GPU].bandwidth / gpu.bandwidth
    if most.fp8 is not None and reference.fp8 is not None:
        adjusted["fp8_speed"] *= (most.fp8 / most.matmul) / (reference.fp8 / reference.matmul)
    adjusted["half_speed_tokens"] *= _half_speed_tokens(here) / _half_speed_tokens(there)
    for name in ("host_seconds_compiled", "host_seconds_eager"):
        adjusted[name] *= here.launch / there.launch
    links = {name: rate for name in ("host_link", "peer_link", "network") if (rate := getattr(here, name)) is not None}
    return replace(
        gpu, measured=True, efficiency=adjusted, bench=source, **{name: 1e9 * rate for name, rate in links.items()}
    )


def _half_speed_tokens(rates: Rates) -> float:
    """Return the tokens h at which matmuls have half their speed, if it is proportional to n / (n + h) of n tokens."""
    few, many = min(rates.matmul, key=_tokens), max(rates.matmul, key=_tokens)
    slope = few.matmul / many.matmul
    return max(1.0, few.tokens * many.tokens * (1 - slope) / max(1.0, slope * many.tokens - few.tokens))


def _tokens(rate: MatmulRate) -> int:
    return rate.tokens


def _bytes(text: str) -> int | None:
    """Parse a size such as `80GiB`; None if it is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(tib|tb|gib|gb|g|mib|mb)", text.strip().lower())
    if match is None:
        return None
    units = {"tib": 2**40, "tb": 10**12, "gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    size = int(float(match.group(1)) * units[match.group(2)])
    return size or None
