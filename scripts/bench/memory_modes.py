"""Memory saved and time lost by each memory-saving mode, and by plain torch with activation checkpointing.

See `rounds.py` for the method.

    python scripts/bench/memory_modes.py [--shape 1b wide] [--rounds 3] [--only none full offload_12 ...]
        [--seconds 500] [--results FILE.jsonl]

`1b`: `experiment=llama_1b_bench`, 24 layers of width 2048. `wide`: 8 layers of width 4096. Sequence 4096, micro batch
4, random tokens, AdamW, clipping to 1.0; attention that saves its scores (`unfused`) has a micro batch of 1, with which
the scores of all layers fit. A mode is compared with its base within each round. Peers are compiled plain torch with
cuDNN attention and bf16 autocast, with all blocks checkpointed, or with all saved tensors in pinned host memory.

Micro batches run as CUDA graphs (column `recorded`) unless something other than the optimizer state is offloaded. The
memory pool of a graph is allocated at capture and not available to other tensors afterwards, so the memory taken from
the device is `reserved`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peers import PlainGPT, Shape, Step, autocast_step, with_random_tokens
from plan_check import planned
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SHAPES = {"1b": Shape(), "wide": Shape(layers=8, hidden=4096, heads=32, groups=8, ffn=11264)}
LENGTH = Length(warm_up=8, windows=4, window=4)
CHECKPOINT, OFFLOAD = "model.activations_checkpoint_", "model.cpu_offloading"
CHEAP = [f"{CHECKPOINT}modules=[norm,mlp_activation]"]
UNFUSED = ["model.attention_backend=unfused", "model.micro_batch_size=1", "model.global_batch_size=1"]


class Mode(NamedTuple):
    """One way to train the benchmark model.

    Attributes:
        title: in the table.
        overrides: of the experiment.
        base: name of the mode it is compared with.
    """

    title: str
    overrides: list[str]
    base: str = "none"


def full(method: str, layers: int) -> list[str]:
    return [f"{CHECKPOINT}granularity=full", f"{CHECKPOINT}method={method}", f"{CHECKPOINT}num_layers={layers}"]


def offload(layers: int, *, weights: bool = False, activations: bool = True) -> list[str]:
    switches = [f"{OFFLOAD}_weights={weights}", f"{OFFLOAD}_activations={activations}"]
    return [f"{OFFLOAD}=true", f"{OFFLOAD}_num_layers={layers}", *switches]


def modes_of(shape: Shape) -> dict[str, Mode]:
    """Return the modes measured for a shape, by name."""
    last = shape.layers - 1
    offloaded = sorted({shape.layers // 6, shape.layers // 4, shape.layers // 2, last - 1, last} - {0})
    return {
        "none": Mode("nothing saved", []),
        "norm": Mode("recompute: norm", [f"{CHECKPOINT}modules=[norm]"]),
        "cheap": Mode("recompute: norm, mlp_activation", CHEAP),
        "block_half": Mode(f"recompute: block {shape.layers // 2}", full("block", shape.layers // 2)),
        "full": Mode("recompute: uniform 1 (all)", full("uniform", 1)),
        "full_2": Mode("recompute: uniform 2 (all)", full("uniform", 2)),
        "unfused": Mode("unfused attention, micro batch 1", UNFUSED, "unfused"),
        "unfused_selective": Mode(
            "unfused attention, micro batch 1, recompute: selective",
            [*UNFUSED, f"{CHECKPOINT}granularity=selective"],
            "unfused",
        ),
        **{
            f"offload_{number}": Mode(f"offload: {number} layer{'s' * (number > 1)}", offload(number))
            for number in offloaded
        },
        "cheap_offload": Mode(f"cheap recompute, offload: {last - 1} layers", CHEAP + offload(last - 1)),
        "full_offload": Mode(f"full recompute, offload: {last - 1} layers", full("uniform", 1) + offload(last - 1)),
        "weights": Mode(f"offload: weights of {last} layers", offload(last, weights=True, activations=False)),
        "both": Mode(f"offload: {last - 1} layers and their weights", offload(last - 1, weights=True)),
        "optimizer": Mode("offload: optimizer", [f"{OFFLOAD}_optimizer=true"]),
    }


# ---------------------------------------------------------------- peers


def in_blocks(model: PlainGPT, run: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss function that calls `run` on each block; final norm, head and loss are compiled together."""

    @torch.compile
    def tail(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.norm(hidden)).float().flatten(0, 1), labels.flatten())

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = model.embedding(tokens)
        for block in model.blocks:
            hidden = run(block, hidden, model.cosine, model.sine)
        return tail(hidden, labels)

    return loss_of


def plain_checkpointed(shape: Shape, *, inside: bool) -> Step:
    """Checkpoint every block: inside of one compiled model, or around separately compiled blocks."""
    with torch.device("cuda"):
        model = PlainGPT(shape)
    if inside:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return autocast_step(torch.compile(model), model)
    for block in model.blocks:
        block.compile()
    return autocast_step(in_blocks(model, partial(checkpoint, use_reentrant=False)), model)


def plain_save_on_cpu(shape: Shape, *, compiled: bool) -> Step:
    """Keep all tensors that the blocks save for backward in pinned host memory.

    Compiled blocks need the original strides, which `save_on_cpu` does not preserve; they use equivalent hooks that do.
    """
    with torch.device("cuda"):
        model = PlainGPT(shape)
    if compiled:
        for block in model.blocks:
            block.compile()

    def run(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with saved_tensors_hooks(to_host, from_host) if compiled else save_on_cpu(pin_memory=True):
            return block(*inputs)

    return autocast_step(in_blocks(model, run), model)


def to_host(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], torch.device]:
    """Return a copy in pinned host memory, the original strides and the original device."""
    host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor), tensor.stride(), tensor.device


def from_host(saved: tuple[Tensor, tuple[int, ...], torch.device]) -> Tensor:
    host, stride, device = saved
    restored = host.to(device, non_blocking=True)
    if restored.stride() == stride:
        return restored
    return torch.empty_strided(restored.size(), stride, dtype=restored.dtype, device=device).copy_(restored)


def plain(shape: Shape) -> Step:
    """Compile the whole model, without any memory saving."""
    with torch.device("cuda"):
        model = PlainGPT(shape)
    return autocast_step(torch.compile(model), model)


PEERS: Mapping[str, tuple[str, Callable[[Shape], Step], str]] = {
    "plain": ("plain torch: nothing saved", plain, "none"),
    "plain_inside": (
        "plain torch: every block checkpointed, compile(checkpoint(block))",
        partial(plain_checkpointed, inside=True),
        "full",
    ),
    "plain_around": (
        "plain torch: every block checkpointed, checkpoint(compile(block))",
        partial(plain_checkpointed, inside=False),
        "full",
    ),
    "plain_save_on_cpu": (
        "plain torch: blocks, not compiled, in save_on_cpu(pin_memory=True)",
        partial(plain_save_on_cpu, compiled=False),
        "offload_all",
    ),
    "plain_to_host": (
        "plain torch: compiled blocks in save_on_cpu(pin_memory=True) that keeps strides",
        partial(plain_save_on_cpu, compiled=True),
        "offload_all",
    ),
}


# ---------------------------------------------------------------- measuring


def overrides_of(shape: Shape) -> list[str]:
    """Return the overrides that train the benchmark experiment with this shape."""
    keys = {"num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn}
    keys |= {"num_attention_heads": shape.heads, "num_query_groups": shape.groups}
    return ["experiment=llama_1b_bench", *(f"model.{key}={value}" for key, value in keys.items())]


def measure(name: str, case: str) -> Row:
    """Run one mode or one peer in this process."""
    shape = SHAPES[case]
    tokens = shape.micro_batch * shape.sequence
    if name in PEERS:
        step = with_random_tokens(PEERS[name][1](shape), shape)
        return result(name, time_windows(step, LENGTH), tokens)
    mode = modes_of(shape)[name]
    overrides = [*overrides_of(shape), *mode.overrides]
    row = stoker_result(name, overrides, LENGTH, shape.sequence if mode.base == "unfused" else tokens)
    return row | {"planned_gib": planned(overrides).allocated / 2**30}


if __name__ == "__main__":
    names = dict.fromkeys([*(name for shape in SHAPES.values() for name in modes_of(shape)), *PEERS])
    run_benchmark(
        __file__,
        __doc__,
        names,
        measure,
        lambda case: [f"memory_{case}"],
        option="--shape",
        cases=sorted(SHAPES),
        chosen=lambda case: [*modes_of(SHAPES[case]), *PEERS],
    )
