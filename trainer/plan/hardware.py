"""The cards a run can be planned for: memory, speeds, and which part of them training reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .flops import bf16_peak

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as a plan sees it.

    Attributes:
        name: as the driver reports it; it tells the peak.
        memory: bytes there are in all, as the driver reports them.
        capability: CUDA compute capability.
        bandwidth: bytes a second to its own memory, from the data sheet.
        host_link: bytes a second to the host in one direction, as copies of pinned memory reach it.
        peer_link: bytes a second to the other cards of its machine, as NCCL's sums reach it.
        measured: the parts below were measured on this card; otherwise they are those of the H100.
        matmul_part: of its dense bf16 peak, what matrix products of a training step reach.
        attention_part: likewise fused attention of long sequences, forward and backward together, causal FLOPs counted
            at half.
        bandwidth_part: of its bandwidth, what pointwise kernels reach.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    bandwidth: float
    host_link: float
    peer_link: float
    measured: bool = False
    matmul_part: float = 0.74
    attention_part: float = 0.56
    bandwidth_part: float = 0.86

    @property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s, None where it is not known."""
        return bf16_peak(self.name)


# Memory is about what `torch.cuda.get_device_properties` reports, which is less than the data sheet's size; bandwidths
# are those of the data sheets. The parts are those with which the steps of docs/benchmarks.md that an H100 ran come out
# best: 1.2 B at 4,096 to 106,496 tokens, wide and T5 within 2 %, LoRA 4 %, experts 5 %. They agree with its kernels
# alone: GEMMs at 700 to 760 of 989 TFLOP/s, attention at 565 with sequences of 16,384.
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
"""What is said of each card in the names of its product, of which other forms have speeds like it."""
CARD_NAMES = tuple(_TABLE)
DEFAULT_CARD = "h100"


def card_named(text: str) -> Card:
    """The card of `--device`: a name of the table, a size of memory (`80GiB`, `24GB`), or both (`h100:40GiB`).

    A size alone is a card like the H100 with so much memory, of which nothing was measured.

    Raises:
        ValueError: it is neither.
    """
    name, colon, size = text.lower().partition(":")
    if name in _TABLE and not colon:
        return _TABLE[name]
    memory = _bytes(size if colon else name)
    if memory is None or (colon and name not in _TABLE):
        raise ValueError(
            f"`--device` ({text}) must be one of {', '.join(CARD_NAMES)}, a size as 80GiB, or both as h100:40GiB."
        )
    if colon:
        return replace(_TABLE[name], memory=memory)
    return replace(_TABLE[DEFAULT_CARD], memory=memory, measured=False)


def card_of(driver_name: str, memory: int, capability: tuple[int, int]) -> Card:
    """The card of this machine: its own memory, and the speeds of the table's card that its name says it is."""
    said = {key: re.search(rf"\b{pattern}\b", driver_name) for key, pattern in _PRODUCTS.items()}
    hits = {key: len(match.group()) for key, match in said.items() if match}
    if hits:  # the name that says most; of one name in several sizes, the nearest
        named = [_TABLE[key] for key, length in hits.items() if length == max(hits.values())]
        like = min(named, key=lambda card: abs(card.memory - memory))
    else:
        cards = list(_TABLE.values())
        alike = [card for card in cards if card.capability == capability]
        alike += [card for card in cards if card.capability[0] == capability[0]]
        like = [*alike, _TABLE[DEFAULT_CARD]][0]
    measured = like.measured and like.name == driver_name
    return replace(like, name=driver_name, memory=memory, capability=capability, measured=measured)


def _bytes(text: str) -> int | None:
    """A size in words; None where it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(tib|tb|gib|gb|g|mib|mb)", text.strip().lower())
    if match is None:
        return None
    units = {"tib": 2**40, "tb": 10**12, "gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}
    size = int(float(match.group(1)) * units[match.group(2)])
    return size or None
