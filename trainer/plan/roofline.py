"""Roofline estimate of step time from FLOPs and bytes moved.

Matmuls, attention and pointwise kernels run one after the other, each at its measured fraction of the GPU's peak
(hardware.yaml); communication between ranks and copies to the host count where they do not overlap with computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...kernels.attention.dispatch import BackendSelection
from ...models.config.dense_stack import AttentionSlice
from ...models.config.peft import LoRASlice
from ...models.dispatch.core_attention import attended_pairs, recomputes_from_log_sum_exp
from ...models.layers.cost import StackInputs, recomputed_bytes
from ...models.layers.self_attention import context_moved_bytes
from ...models.model_cost import training_flops_per_sample
from ...models.parallel.schedule import StageTimes, simulate_step
from ..config.schema.optim import optimizer_kind, optimizer_settings
from .data_exchange import gradient_sums
from .hardware import EFFICIENCY, GPUSpec
from .launching import launching_seconds
from .layers import LayerInStack, layers_in_order
from .run_inputs import RunInputs
from .state_memory import num_state_elements
from .timeline import MemoryPlan
from .traffic import AxisTraffic, axis_traffic, message_seconds
from .transfers import offload_stall_seconds, offloaded_bytes

_ATTENTION_BACKWARD_RATIO = 2.5
"""FLOPs of fused attention's backward pass over those of its forward pass: five matmuls to two."""
_NARROW_HEAD_DIM = 64
"""Head width up to which fused attention is slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and bytes moved by one pass through some layers.

    Attributes:
        matmul: FLOPs of matmuls, grouped ones included.
        grouped: FLOPs of the grouped GEMMs of experts.
        fp8: those of `matmul` that are in fp8.
        attention: FLOPs of fused attention.
        moved: bytes that pointwise kernels read and write.
    """

    matmul: float = 0.0
    grouped: float = 0.0
    fp8: float = 0.0
    attention: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            matmul=self.matmul + other.matmul,
            grouped=self.grouped + other.grouped,
            fp8=self.fp8 + other.fp8,
            attention=self.attention + other.attention,
            moved=self.moved + other.moved,
        )

    def times(self, number: int) -> Work:
        """Return as much work as many times."""
        return Work(
            matmul=self.matmul * number,
            grouped=self.grouped * number,
            fp8=self.fp8 * number,
            attention=self.attention * number,
            moved=self.moved * number,
        )

    def dense_equivalent(self, fp8_speed: float) -> float:
        """FLOPs of dense matmuls in 16 bits that take the same time, with fp8 so much faster than these."""
        saved = self.fp8 * (1 - 1 / fp8_speed)
        return self.matmul + self.grouped * (1 / EFFICIENCY["grouped_gemm"] - 1) - saved


Passes = tuple[Work, Work]
"""Work of the forward and of the backward pass, the latter without recomputation."""


def _sum(passes: Iterable[Passes]) -> Passes:
    forward, backward = zip(*passes, strict=True)
    return sum(forward, Work()), sum(backward, Work())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of a training step over all ranks.

    Attributes:
        seconds: time of the step.
        model_flops: FLOPs of the step without recomputation.
        recomputed_flops: FLOPs of recomputation.
        tokens: of the global batch.
        peak_flops: peak FLOP/s of all GPUs.
        parts: seconds by component.
        sent: bytes a rank copies to its host per step; as many are copied back.
        traffic: what a rank sends to the others, by axis.
        rank: rank of the pipeline that computes longest, of which `parts`, `sent` and `traffic` are.
        bubble: part of the schedule of a pipeline in which its ranks wait, on average.
        stages: times of all pipeline stages; empty without a pipeline.
    """

    seconds: float
    model_flops: float
    recomputed_flops: float
    tokens: int
    peak_flops: float
    parts: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    traffic: tuple[AxisTraffic, ...] = ()
    rank: int = 0
    bubble: float = 0.0
    stages: tuple[StageTimes, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_flops / self.seconds / self.peak_flops


# ---------------------------------------------------------------- a micro batch


def _core_forward(
    attention: AttentionSlice, decision: BackendSelection, batch: int, queries: int, keys: int, ranks: int
) -> Work:
    """Work of the core of an attention (scores and weighted values) that `ranks` context-parallel ranks share; unfused
    attention computes masked pairs too.
    """
    width = attention.heads * attention.head_dim
    if not decision.saves_scores:
        return Work(attention=4.0 * width * batch * attended_pairs(attention, queries, keys) / ranks)
    pairs = float(batch * queries * keys) / ranks
    moved = decision.call.score_bytes / ranks * (EFFICIENCY["score_passes"] / 3)
    return Work(matmul=4.0 * width * pairs, moved=moved)


def _attentions(inputs: StackInputs) -> Iterator[tuple[AttentionSlice, BackendSelection, Work]]:
    """Yield self- and cross-attention of a layer, each with the forward work of its core."""
    own, cross, decision = inputs.stack.attention, inputs.cross, inputs.cross_attention
    batch, length, ranks = inputs.batch, inputs.length, inputs.mesh.context
    yield own, inputs.attention, _core_forward(own, inputs.attention, batch, length, length, ranks)
    if cross is not None and decision is not None:
        yield cross, decision, _core_forward(cross, decision, batch, length, inputs.encoder_length, ranks)


def attention_core_work(inputs: StackInputs, *, recompute_scores: bool = False) -> Work:
    """Forward work of the cores of all attentions of a layer; `recompute_scores`: backward recomputes the scores."""
    total = Work()
    for attention, decision, work in _attentions(inputs):
        if recompute_scores and decision.saves_scores and recomputes_from_log_sum_exp(attention, decision):
            moved = work.moved * EFFICIENCY["score_passes_recomputed"] / EFFICIENCY["score_passes"]
            work = replace(work, moved=moved)
        total += work
    return total


def _recompute_scores(inputs: StackInputs) -> Work:
    """Work to recompute the scores of the attentions that otherwise save them."""
    total = Work()
    for attention, decision, work in _attentions(inputs):
        if decision.saves_scores:
            # from log-sum-exps: two more matmuls, and no bytes besides those counted in `attention_core_work`
            total += replace(work, moved=0.0) if recomputes_from_log_sum_exp(attention, decision) else work
    return total


def _context_moved(inputs: StackInputs) -> tuple[int, int]:
    """Bytes that arranging and summing what context-parallel ranks exchange moves in a layer, forward and backward."""
    found = [context_moved_bytes(inputs.stack.attention, inputs, inputs.tokens)]
    if inputs.cross is not None:
        found.append(context_moved_bytes(inputs.cross, inputs, inputs.encoder_tokens))
    return sum(forward for forward, _ in found), sum(backward for _, backward in found)


def _layer_work(layer: LayerInStack, *, frozen: bool = False) -> Passes:
    """Work of a layer without recomputation; the backward pass has no gradients of frozen weights."""
    memory = layer.memory
    core = attention_core_work(layer.stack, recompute_scores="core_attention" in layer.recomputed_modules)
    passes = EFFICIENCY["pointwise_passes_compiled" if layer.stack.compiled else "pointwise_passes_eager"]
    saved = sum(each.num_bytes for each in memory.saved if each.part not in ("scores", "weights"))
    moved, arranging = passes * (saved + memory.input_bytes) / 3, _context_moved(layer.stack)
    flops = {"matmul": memory.matmul_flops, "grouped": memory.grouped_flops, "fp8": memory.fp8_flops}
    forward = Work(**flops, moved=moved + arranging[0]) + core
    if layer.skips_backward:
        return forward, Work()
    products = 1 if frozen else 2  # the gradients of inputs, and of weights
    backward = Work(
        matmul=products * memory.matmul_flops + 2 * core.matmul,
        fp8=(products if memory.inputs.saves_fp8 else 1) * memory.fp8_flops,
        grouped=products * memory.grouped_flops,
        attention=_ATTENTION_BACKWARD_RATIO * core.attention,
        moved=2 * moved + arranging[1] + 2 * core.moved,
    )
    return forward, backward


def recompute_work(layer: LayerInStack) -> Work:
    """Work of recomputation in the backward pass of a layer."""
    if layer.skips_backward:
        return Work()
    memory = layer.memory
    if layer.is_recomputed:
        forward, _ = _layer_work(layer)
        # the backward pass does not need the output of fc2, so the compiler does not recompute it
        skipped = memory.last_matmul_flops if layer.stack.compiled and layer.recompute.chunk == 1 else 0.0
        fp8 = forward.fp8 - skipped * (memory.inputs.fp8 is not None)
        return replace(forward, matmul=forward.matmul - skipped, fp8=fp8)
    modules = layer.recomputed_modules
    total = Work(moved=2.0 * recomputed_bytes(memory.saved, modules - {"core_attention"}))
    if "core_attention" in modules:
        total += _recompute_scores(layer.stack)
    if "moe" in modules and memory.has_experts:
        fp8 = memory.grouped_flops * memory.inputs.experts_in_fp8
        total += Work(matmul=memory.mlp_flops, grouped=memory.grouped_flops, fp8=fp8)
    return total


def _embedding_and_loss_work(run: RunInputs, stack: StackInputs) -> Passes:
    """Work of embeddings, head and loss around a stack, or what a pipeline stage has of it, for one micro batch.

    The loss computes its gradients, and multiplies them back, in the forward pass (`kernels.cross_entropy`).
    """
    e, ends = run.widths.compute, stack.stack.begins + stack.stack.ends
    logits = stack.tokens * run.family.padded_vocab_size * stack.computes_loss
    outer = Work(moved=stack.residual_elements * e * 2 * ends)
    products = (4.0 if run.is_frozen else 6.0) * logits * stack.stack.hidden_size
    return Work(matmul=products, moved=logits * e * 4) + outer, outer


def _lora_work(run: RunInputs, share: float) -> Passes:
    """Work that LoRA adds to a micro batch in a share of the rank's layers: three low-rank matmuls for each adapter
    matrix, one of them in the forward pass, bound by what they read.

    The input of a linear layer is read once more in each pass, and its gradient written once more; its output is
    written once more and the gradient of that read once more (`kernels.lora_linear`). In a fused MLP only the output's
    part is added between its projections.
    """
    peft = run.peft
    if not isinstance(peft, LoRASlice):
        return Work(), Work()
    tokens, trained = max(stack.tokens for stack in run.stacks), run.counts.trainable * share
    passes = 0.75 if all(stack.fused_lora_mlp for stack in run.stacks) else 1.0
    forward = Work(matmul=2.0 * tokens * trained, moved=passes * tokens * run.widths.compute * trained / peft.rank)
    return forward, replace(forward, matmul=2 * forward.matmul)


def _update_bytes(run: RunInputs) -> float:
    """Bytes of GPU memory that the optimizer's update reads and writes per step."""
    trained, gradient = run.counts.trainable, run.widths.weights
    main = run.precision.main_weight_bytes or gradient
    state = num_state_elements(run) / max(1, trained)
    sums = gradient_sums(run)
    per_parameter = main * 2 + state * run.precision.state_itemsize * 2 + sums.updated * 2 + gradient
    # the first gradient is written into the accumulators, or is one; others are added
    added, first = (2 * 4 + gradient, 4) if sums.accumulated else (3 * gradient, 3 * gradient)
    accumulation = added * run.micro_batches - first
    accumulated = run.sharded(trained) if run.shards_gradients else trained
    return run.sharded(trained) * per_parameter + accumulated * accumulation


def _newton_schulz_flops(run: RunInputs, memory: MemoryPlan) -> float:
    """FLOPs of Muon's Newton-Schulz iterations: 4 m^2 n + 2 m^3 each for an m x n matrix, m <= n."""
    if optimizer_kind(run.model_config.optim.name) != "muon" or run.is_frozen:
        return 0.0
    steps, total = optimizer_settings(run.model_config.optim)["ns_steps"], 0.0
    for layer in memory.layers:
        stack = layer.stack.stack
        hidden, mlp = stack.hidden_size, stack.mlp
        number = stack.moe.experts // run.mesh.expert if stack.moe and stack.moe.layers[layer.index] else 1
        width = stack.moe.ffn_hidden_size if number > 1 and stack.moe else mlp.ffn_hidden_size
        heads = stack.attention.heads * stack.attention.head_dim
        shapes = [(hidden, width)] * number * (3 if mlp.gated else 2) + [(hidden, heads)] * 3
        total += sum(4.0 * min(a, b) ** 2 * max(a, b) + 2.0 * min(a, b) ** 3 for a, b in shapes)
    return total * steps / run.shards


def _ema_seconds(run: RunInputs, memory: MemoryPlan, gpu: GPUSpec) -> float:
    """Seconds per step of updating the EMA: read, update, write; plus a copy if weights and EMA are on two devices.

    The time a host needs to update an EMA in its memory is not known, and counts as zero.
    """
    size = run.sharded(run.counts.trainable) * run.ema_itemsize
    source_on_host = memory.persistent.on_host > 0 and run.precision.main_weight_bytes > 0
    copy = size / gpu.host_link if run.ema_on_host != source_on_host else 0.0
    update = 0.0 if run.ema_on_host else 3 * size / gpu.pointwise_bandwidth
    return (copy + update) / run.ema_every_n_steps


# ---------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class _Speeds:
    """FLOP/s of matmuls and of attention, bytes/s of pointwise kernels, and the speed of fp8 relative to 16 bits."""

    matmul: float
    attention: float
    pointwise: float
    fp8: float

    def matmul_seconds(self, work: Work) -> float:
        """Seconds of the matmuls of `work`."""
        return work.dense_equivalent(self.fp8) / self.matmul

    def seconds(self, work: Work) -> float:
        """Seconds of `work`."""
        return self.matmul_seconds(work) + work.attention / self.attention + work.moved / self.pointwise

    def forward_and_backward(self, layer: LayerInStack, *, frozen: bool) -> tuple[float, float]:
        """Seconds of the forward pass of a layer, and of its backward pass with recomputation."""
        forward, backward = _layer_work(layer, frozen=frozen)
        return self.seconds(forward), self.seconds(backward + recompute_work(layer))


@dataclass(frozen=True, slots=True)
class RankTime:
    """Time of a step on one rank without what it waits for other stages of its pipeline.

    Attributes:
        parts: seconds by component.
        stages: seconds of the passes of a micro batch through each stage, with all but `after` and the update.
        after: seconds of messages after the last pass.
        recompute: work of recomputation in a step.
        sent: bytes copied to the host.
        traffic: what the rank sends to others, by axis.
    """

    parts: dict[str, float]
    stages: tuple[StageTimes, ...]
    after: float
    recompute: Work
    sent: int
    traffic: tuple[AxisTraffic, ...]


def step_time(ranks: Sequence[tuple[RunInputs, MemoryPlan]]) -> StepTime | None:
    """Estimate the time of a step on the target's GPU; None if its peak is not known for this precision.

    The peaks are those of 16-bit matmuls; fp32 and fp64 run at a small fraction of them.

    Args:
        ranks: ranks of the pipeline with their memory, or all together without one.
    """
    run, _ = ranks[0]
    gpu = run.target.gpu
    if gpu is None or gpu.peak is None or run.widths.compute != 2:
        return None
    times = [rank_time(each, memory, gpu) for each, memory in ranks]
    slowest = max(times, key=lambda each: sum(each.parts.values()))
    parts, stages, bubble = dict(slowest.parts), tuple[StageTimes, ...](), 0.0
    if len(times) > 1:
        stages = tuple(each for chunk in zip(*(time.stages for time in times), strict=True) for each in chunk)
        schedule = simulate_step(stages, len(times), run.micro_batches)
        ends = (end + time.after for end, time in zip(schedule.ends, times, strict=True))
        update = max(time.parts["update"] for time in times)
        parts["pipeline bubble"] = max(ends) + update - sum(parts.values())
        bubble = schedule.bubble
    samples, form, vocab = run.model_config.global_batch_size, run.batch_spec, run.family.padded_vocab_size
    vocab *= run.mesh.tensor
    recomputed = sum(time.recompute.matmul + time.recompute.attention for time in times)
    return StepTime(
        seconds=sum(parts.values()),
        model_flops=samples * training_flops_per_sample(run.model_config, vocab, form, frozen=run.is_frozen),
        recomputed_flops=run.ranks // len(times) * recomputed,
        tokens=samples * (form.seq_length + form.decoder_seq_length),
        peak_flops=gpu.peak * run.ranks,
        parts=parts,
        sent=slowest.sent,
        traffic=slowest.traffic,
        rank=times.index(slowest),
        bubble=bubble,
        stages=stages,
    )


def rank_time(run: RunInputs, memory: MemoryPlan, gpu: GPUSpec) -> RankTime:
    """Estimate the time of a step on one rank."""
    assert gpu.peak is not None
    speeds = _Speeds(
        matmul=gpu.peak * gpu.efficiency["matmul"] * _matmul_efficiency(run, gpu),
        attention=_attention_speed(run, gpu.peak),
        pointwise=gpu.pointwise_bandwidth,
        fp8=gpu.efficiency["fp8_speed"],
    )
    micro, recompute, all_recomputed = run.micro_batches, Work(), run.with_all_recomputed
    works, repeated = list[Passes](), list[list[float]]()
    for number, stack in enumerate(run.stacks):
        layers = [layer for layer in memory.layers if layer.stack is stack]
        outer = _embedding_and_loss_work(run, stack), _lora_work(run, len(layers) / max(1, len(memory.layers)))
        works.append(_sum([*outer, *(_layer_work(layer, frozen=run.is_frozen) for layer in layers)]))
        again, whole = sum(map(recompute_work, layers), Work()), run.fully_recomputed(number)
        all_again = again
        if whole:
            found, part = layers_in_order(all_recomputed), all_recomputed.stacks[number]
            all_again = sum((recompute_work(layer) for layer in found if layer.stack is part), Work())
        recompute += again.times(micro - len(whole)) + all_again.times(len(whole))
        repeated.append([speeds.seconds(all_again if number in whole else again) for number in range(micro)])
    forward, backward = _sum(works)
    model_work = forward + backward
    parts = {
        "matrix products": micro * speeds.matmul_seconds(model_work),
        "attention": micro * model_work.attention / speeds.attention,
        "pointwise": micro * model_work.moved / speeds.pointwise,
        "recomputed": speeds.seconds(recompute),
    }
    traffic = axis_traffic(
        run,
        memory.layers,
        gpu,
        micro_batch_seconds=(speeds.seconds(forward), speeds.seconds(backward)),
        matmul_seconds=micro * speeds.matmul_seconds(model_work),
        attention_seconds=parts["attention"],
    )

    def passes(layer: LayerInStack) -> tuple[float, float]:
        return speeds.forward_and_backward(layer, frozen=run.is_frozen)

    exchange = next((each.exposed for each in traffic if each.axis == "expert"), 0.0)
    once = set[str]() if run.shards_gradients else {"data", "expert data", "replicas"}
    after = sum((each.exposed for each in traffic if each.axis in {"embeddings", "position biases", *once}), 0.0)
    during = sum((each.exposed for each in traffic), -after)
    busy = sum(parts.values()) + during - exchange
    parts |= launching_seconds(run, gpu, memory.layers, passes, computing=busy, exchange=exchange)
    parts["copies not hidden"] = micro * offload_stall_seconds(memory.layers, passes, gpu.host_link)
    computing = micro * speeds.seconds(model_work) + sum(map(sum, repeated))
    scale = (sum(parts.values()) + during) / max(1e-12, computing)
    update = _update_bytes(run) / speeds.pointwise + _newton_schulz_flops(run, memory) / speeds.matmul
    parts["update"] = max(update, memory.persistent.on_host / gpu.host_link) + _ema_seconds(run, memory, gpu)
    parts["messages"] = during + after
    return RankTime(
        parts=parts,
        stages=tuple(
            StageTimes(
                forward=scale * speeds.seconds(work[0]),
                backward=scale * speeds.seconds(work[1]),
                recompute=tuple(scale * each for each in again),
                **message_seconds(run, stack, gpu),
            )
            for stack, work, again in zip(run.stacks, works, repeated, strict=True)
        ),
        after=after,
        recompute=recompute,
        sent=micro * sum(map(offloaded_bytes, memory.layers)) + memory.persistent.on_host,
        traffic=traffic,
    )


def _attention_speed(run: RunInputs, peak: float) -> float:
    """FLOP/s of the chosen attention backend: as measured on this card for the nearest shape, if it is known; else a
    fraction of the peak, by backend, head width and length.
    """
    times, decision = run.target.software.measured, run.stacks[-1].attention
    near = times.nearest(decision.call)[0] if times is not None else None
    if near is not None and (milliseconds := near.time(decision.backend, training=True)) is not None:
        return EFFICIENCY["attention_in_step"] * near.flops / milliseconds * 1e3
    slow = ("sdpa_flash", "sdpa_efficient", "flash_attn")
    capability, last = run.target.capability or (0, 0), run.stacks[-1]
    speed = EFFICIENCY["flash2_on_hopper"] if capability >= (9, 0) and last.attention.backend in slow else 1.0
    speed *= EFFICIENCY["narrow_heads"] if last.stack.attention.head_dim <= _NARROW_HEAD_DIM else 1.0
    keys = max(stack.length for stack in run.stacks)
    return peak * EFFICIENCY["attention"] * speed * keys / (keys + EFFICIENCY["half_speed_keys"])


def _matmul_efficiency(run: RunInputs, gpu: GPUSpec) -> float:
    """Speed of matmuls of this micro batch, relative to the measured one."""

    def speed(tokens: float) -> float:
        return tokens / (tokens + gpu.efficiency["half_speed_tokens"])

    whole = speed(max(stack.tokens for stack in run.stacks)) / speed(EFFICIENCY["measured_tokens"])
    if not run.tensor_parallel:
        return whole
    width = min(stack.stack.attention.heads * stack.stack.attention.head_dim for stack in run.stacks)
    return whole * speed(width) / speed(width * run.mesh.tensor)
