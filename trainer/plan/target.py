"""Device and software that a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.attention.call_spec import InstalledSoftware
from ...kernels.attention.flags import AttentionFlags
from .hardware import GPUSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device and software that a run is planned for.

    Attributes:
        device: device type.
        capability: CUDA compute capability; None on other devices.
        gpu: GPU; None without one.
        memory: device memory in bytes; None for a CPU or if unknown.
        software: installed, or assumed, packages, with the measured times of attention.
        flags: attention flags from environment variables.
        host_memory: host memory per process in bytes; None if unknown.
        peer_access: the GPUs of a machine read each other's memory; None if unknown.
        ignored_bench: one line about a file of `stoker bench` that does not hold here; else empty.
    """

    device: str
    capability: tuple[int, int] | None
    gpu: GPUSpec | None
    memory: int | None
    software: InstalledSoftware
    flags: AttentionFlags
    host_memory: int | None = None
    peer_access: bool | None = None
    ignored_bench: str = ""

    @property
    def name(self) -> str:
        """Name of the GPU, or the device type."""
        return self.gpu.name if self.gpu else self.device
