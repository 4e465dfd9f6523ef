"""Time that a step takes longer than its work because of kernel launches, on the GPU and on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config.captured_layers import captures_layers
from .hardware import EFFICIENCY, GPUSpec
from .layers import LayerInStack
from .run_inputs import RunInputs


def launching_seconds(
    run: RunInputs,
    gpu: GPUSpec,
    layers: Sequence[LayerInStack],
    passes: Callable[[LayerInStack], tuple[float, float]],
    *,
    computing: float,
    exchange: float,
) -> dict[str, float]:
    """Return the seconds of a step in which kernels start, and those in which the GPU waits for the host.

    The host runs ahead of the GPU, so that only the sums of both matter. But where it waits for the numbers of rows of
    an exchange, the GPU has done all before and then waits for each launch: there the longer one counts in each pass.

    Args:
        run: inputs of the estimate.
        gpu: the GPU of a rank.
        layers: of the rank.
        passes: seconds that the GPU computes in the forward and in the backward pass of a layer.
        computing: seconds that it computes in the step, or waits for messages but those of `exchange`.
        exchange: seconds in which it does nothing but exchange the tokens of experts, in the step.
    """
    micro, ring = run.micro_batches, _ring_steps(run)
    starting = max(0.0, micro * len(layers) * EFFICIENCY["gpu_seconds"] - computing)
    starting += micro * len(layers) * ring * EFFICIENCY["gpu_ring_step_seconds"]
    captures = run.uses_cuda_graph and captures_layers(run.model_config, run.ranks)
    outside = _host_seconds_outside(run, gpu, layers)
    if run.uses_cuda_graph and not captures:
        return {"starting kernels": starting, "waiting for the host": max(0.0, outside - computing - starting)}
    number = micro * sum(2 + _repeats_exchange(layer) for layer in layers if _exchanges_tokens(layer))
    own, sent = _host_seconds(run, gpu), exchange / max(1, number)
    waiting, launching, busy = 0.0, outside, computing + starting
    for layer in layers:
        if not _exchanges_tokens(layer):
            # that of a layer without compilation is the mean of layers with and without cross-attention
            crosses = run.compiled and layer.stack.cross is not None
            share = EFFICIENCY["host_cross_attention"] if crosses else 1.0
            share *= EFFICIENCY["host_tensor_parallel"] if run.mesh.tensor > 1 else 1.0
            share += EFFICIENCY["host_ring_step"] * ring
            launching += micro * own * (EFFICIENCY["host_layer_graph"] if captures else share)
            continue
        repeats, (forward, backward) = _repeats_exchange(layer), passes(layer)
        left = 1.0 - EFFICIENCY["host_before_experts"] * captures
        launched = own * EFFICIENCY["host_exchange_forward"] * left
        launched_backward = own * EFFICIENCY["host_exchange_backward"] * left * (not layer.skips_backward)
        for computed, exchanges, host, waits in (
            (forward, 1, launched, True),
            (backward, 1 + repeats, launched_backward + launched * repeats, repeats),
        ):
            if waits and _waits_for_rows(layer):
                waiting += micro * max(0.0, host - computed - sent * exchanges)
                busy -= micro * computed
            else:
                launching += micro * host
                busy += micro * sent * exchanges
    return {"starting kernels": starting, "waiting for the host": waiting + max(0.0, launching - busy)}


def _host_seconds(run: RunInputs, gpu: GPUSpec) -> float:
    return gpu.efficiency["host_seconds_compiled" if run.compiled else "host_seconds_eager"]


def _host_seconds_outside(run: RunInputs, gpu: GPUSpec, layers: Sequence[LayerInStack]) -> float:
    """Return the host's time of a step outside of its layers: the loop, the update, and exchanges of ranks, which the
    time of a layer that sends tokens includes.
    """
    exchanges = 0
    if run.layout is not None:
        each_time = run.layout.shards_gradients or not run.layout.replicates_weights
        times = run.micro_batches if each_time else 1
        exchanges = times * sum(not _exchanges_tokens(layer) for layer in layers)
    layer = gpu.efficiency["host_seconds_compiled"]
    return layer * (EFFICIENCY["host_step"] + EFFICIENCY["host_bucket"] * exchanges)


def _ring_steps(run: RunInputs) -> int:
    """Return the steps of ring attention in a layer; 0 without."""
    split = run.run.context_split
    return split.ring_ranks if split is not None and split.ring_ranks > 1 else 0


def _exchanges_tokens(layer: LayerInStack) -> bool:
    """True if a layer sends tokens to experts of other ranks."""
    return layer.memory.has_experts and layer.stack.mesh.expert > 1


def _waits_for_rows(layer: LayerInStack) -> bool:
    """True if the host waits for the numbers of rows in each exchange of tokens of a layer; see `moe.dispatch`."""
    moe = layer.stack.stack.moe
    return moe is not None and moe.dispatcher != "allgather" and not moe.pad_to_capacity


def _repeats_exchange(layer: LayerInStack) -> bool:
    """True if the backward pass of a layer exchanges its tokens again."""
    return layer.is_recomputed or ("moe" in layer.recomputed_modules and not layer.skips_backward)
