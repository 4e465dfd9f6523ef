"""GPU table for `stoker plan`: memory size, peak rates, and the fraction of them that training reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .flops import bf16_peak_flops

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Specification of a GPU.

    Attributes:
        name: as reported by the driver; the peak is looked up by it.
        memory: total bytes as reported by the driver.
        capability: CUDA compute capability.
        bandwidth: memory bandwidth in bytes/s, from the data sheet.
        host_link: bytes/s to the host in one direction, as reached by copies of pinned memory.
        peer_link: bytes/s to the other GPUs of its machine, as reached by NCCL collectives.
        measured: the fractions below were measured on this GPU; otherwise they are those of the H100.
        matmul_efficiency: fraction of the dense bf16 peak that matmuls of a training step reach.
        attention_efficiency: the same for fused attention on long sequences, forward and backward together, with half
            of all FLOPs counted for a causal mask.
        bandwidth_efficiency: fraction of the memory bandwidth that pointwise kernels reach.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bandwidth: float
    host_link: float
    peer_link: float
    measured: bool = False
    matmul_efficiency: float = 0.74
    attention_efficiency: float = 0.56
    bandwidth_efficiency: float = 0.86

    @property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s; None if not known."""
        return bf16_peak_flops(self.name)


# Memory is about what `torch.cuda.get_device_properties` reports, which is less than the data sheet's size; bandwidths
# are those of the data sheets. The fractions are a fit to the H100 steps of docs/benchmarks.md: 1.2 B at 4,096 to
# 106,496 tokens, wide and T5 within 2 %, LoRA 4 %, MoE 5 %. They agree with single kernels on the H100: GEMMs at 700 to
# 760 of 989 TFLOP/s, attention at 565 with sequences of 16,384.
_TABLE: dict[str, Card] = {
    "h100": Card(
        name="NVIDIA H100 80GB HBM3", memory=int(79.1 * GIB), capability=(9, 0), bandwidth=3.35e12, host_link=50e9,
        peer_link=330e9, measured=True,
    ),
    "h100-pcie": Card(
        name="NVIDIA H100 PCIe", memory=int(79.1 * GIB), capability=(9, 0), bandwidth=2.0e12, host_link=50e9,
        peer_link=40e9,
    ),
    "h200": Card(
        name="NVIDIA H200", memory=int(139.8 * GIB), capability=(9, 0), bandwidth=4.8e12, host_link=50e9,
        peer_link=330e9,
    ),
    "gh200": Card(
        name="NVIDIA GH200 96GB HBM3", memory=int(95.0 * GIB), capability=(9, 0), bandwidth=4.0e12, host_link=350e9,
        peer_link=330e9,
    ),
    "b200": Card(
        name="NVIDIA B200", memory=int(178.0 * GIB), capability=(10, 0), bandwidth=8.0e12, host_link=50e9,
        peer_link=650e9,
    ),
    "a100": Card(
        name="NVIDIA A100-SXM4-80GB", memory=int(79.1 * GIB), capability=(8, 0), bandwidth=2.04e12, host_link=24e9,
        peer_link=220e9,
    ),
    "a100-40": Card(
        name="NVIDIA A100-SXM4-40GB", memory=int(39.4 * GIB), capability=(8, 0), bandwidth=1.56e12, host_link=24e9,
        peer_link=220e9,
    ),
    "a10": Card(
        name="NVIDIA A10", memory=int(22.0 * GIB), capability=(8, 6), bandwidth=0.6e12, host_link=24e9, peer_link=20e9
    ),
    "l4": Card(
        name="NVIDIA L4", memory=int(22.0 * GIB), capability=(8, 9), bandwidth=0.3e12, host_link=24e9, peer_link=20e9
    ),
    "l40s": Card(
        name="NVIDIA L40S", memory=int(44.4 * GIB), capability=(8, 9), bandwidth=0.864e12, host_link=24e9,
        peer_link=20e9,
    ),
    "rtx4090": Card(
        name="NVIDIA GeForce RTX 4090", memory=int(23.5 * GIB), capability=(8, 9), bandwidth=1.008e12,
        host_link=24e9, peer_link=20e9,
    ),
    "rtx5090": Card(
        name="NVIDIA GeForce RTX 5090", memory=int(31.4 * GIB), capability=(12, 0), bandwidth=1.79e12,
        host_link=48e9, peer_link=40e9,
    ),
}  # fmt: skip
_PRODUCTS = {
    "h100": "H[18]00",
    "h100-pcie": "H[18]00 PCIe",
    "h200": "H200",
    "gh200": "GH200",
    "b200": "G?B200",
    "a100": "A[18]00",
    "a100-40": "A[18]00",
    "a10": "A10G?",
    "l4": "L4",
    "l40s": "L40S",
    "rtx4090": "RTX 4090",
    "rtx5090": "RTX 5090",
}
"""Pattern of each GPU's product name as reported by the driver, including variants of similar speed."""
GPU_NAMES = tuple(_TABLE)
DEFAULT_GPU = "h100"


def parse_gpu(text: str) -> Card:
    """Parse `--device`: a name in the table, a memory size (`80GiB`, `24GB`), or both (`h100:40GiB`).

    A size alone is an H100 with that much memory, not marked as measured.

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
    if colon:
        return replace(_TABLE[name], memory=memory)
    return replace(_TABLE[DEFAULT_GPU], memory=memory, measured=False)


def match_gpu(driver_name: str, memory: int, capability: tuple[int, int]) -> Card:
    """Return the specification of an installed GPU: its own memory, and the rates of the most similar GPU in the table.

    Args:
        driver_name: product name reported by the driver.
        memory: total bytes.
        capability: CUDA compute capability.
    """
    matches = {key: re.search(rf"\b{pattern}\b", driver_name) for key, pattern in _PRODUCTS.items()}
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


def _bytes(text: str) -> int | None:
    """Parse a size such as `80GiB`; None if it is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(tib|tb|gib|gb|g|mib|mb)", text.strip().lower())
    if match is None:
        return None
    units = {"tib": 2**40, "tb": 10**12, "gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    size = int(float(match.group(1)) * units[match.group(2)])
    return size or None
