"""Roofline estimate of step time from FLOPs and bytes moved.

Matmuls, attention and pointwise kernels run one after the other, each at its measured fraction of the GPU's peak;
communication between ranks is added, and copies to the host count where they do not overlap with computation.
Efficiencies that are not properties of a GPU were measured in the training steps of docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...kernels.attention.dispatch import BackendSelection
from ...models.config.peft import LoRASlice, peft_slice
from ...models.config.stack import AttentionSlice, StackSlice
from ..config.schema.optim import optimizer_kind, optimizer_settings
from .attention_memory import recomputes_from_log_sum_exp
from .flops import training_flops_per_sample
from .hardware import GPUSpec
from .inputs import RunInputs, StackInputs
from .layer_memory import expert_rows, recomputed_bytes
from .state_memory import main_weight_bytes, num_parameters, num_state_elements, num_trainable_parameters
from .timeline import LayerInStack, MemoryPlan
from .transfers import offload_stall_seconds, offloaded_bytes

_ATTENTION_BACKWARD_RATIO = 2.5
"""FLOPs of fused attention's backward pass over those of its forward pass: five matmuls to two."""
_POINTWISE_PASSES_COMPILED, _POINTWISE_PASSES_EAGER = 4.8, 8.0
"""Times that pointwise kernels, forward and backward, move the saved bytes of a layer. Compiled: from the remainder of
the measured step after everything else is subtracted; eager: from the difference that compiling makes."""
_SCORE_PASSES, _SCORE_PASSES_RECOMPUTED = 7.0, 3.5
"""Times that unfused attention moves its scores (matmuls, softmax and their gradients), and the same if scores are
recomputed from log-sum-exps. Both measured on an H100, as 108 and 97 ms of a step."""
_FLASH2_ON_HOPPER = 0.63
"""Speed of FlashAttention 2 on Hopper relative to kernels written for Hopper."""
_NARROW_HEAD_DIM, NARROW_HEAD_SPEED = 64, 0.75
"""Head width up to which fused attention is slower, and its speed relative to wider heads. On an H100 325 TFLOP/s in an
MoE step; 434 in a LoRA step with heads of 128."""
_GROUPED_GEMM_SPEED = 0.875
"""Speed of grouped GEMMs relative to dense ones, in the same MoE step: 640 TFLOP/s."""
HOST_SECONDS_PER_LAYER, _HOST_SECONDS_OF_EAGER_LAYER = 3.6e-3, 4.5e-3
"""Launch time of a layer on the host, forward and backward, compiled and eager: T5 base with an H100, measured as 84 ms
for 24 compiled layers; the eager figure is an estimate from the number of launches."""
GPU_SECONDS_PER_LAYER = 0.15e-3
"""Minimum GPU time of a layer in a CUDA graph: 65 kernels of about 2 us, an estimate."""
_HALF_SPEED_TOKENS = 256
"""Tokens at which matmuls reach half their speed because they do not fill the GPU: an estimate."""
_HALF_SPEED_KEYS = 600
"""Keys at which fused attention reaches half its speed on long sequences. On an H100, heads of 128, causal: 331
TFLOP/s over 1,024 keys, 503 over 4,096, 565 over 16,384."""
_MEASURED_TOKENS = 16_384
"""Tokens per micro batch of the steps in which the efficiencies in `cards` were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs and bytes moved by one pass through some layers.

    Attributes:
        matmul: FLOPs of matmuls, grouped ones included.
        grouped: FLOPs of the grouped GEMMs of experts.
        attention: FLOPs of fused attention.
        moved: bytes that pointwise kernels read and write.
    """

    matmul: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            matmul=self.matmul + other.matmul,
            grouped=self.grouped + other.grouped,
            attention=self.attention + other.attention,
            moved=self.moved + other.moved,
        )

    @property
    def dense_equivalent(self) -> float:
        """FLOPs of dense matmuls that take the same time."""
        return self.matmul + self.grouped * (1 / _GROUPED_GEMM_SPEED - 1)


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
    """

    seconds: float
    model_flops: float
    recomputed_flops: float
    tokens: int
    peak_flops: float
    parts: dict[str, float] = field(default_factory=dict)
    sent: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_flops / self.seconds / self.peak_flops


# ---------------------------------------------------------------- FLOPs


def _attended_pairs(attention: AttentionSlice, queries: int, keys: int) -> float:
    """Number of (query, key) pairs that are not masked in one sample; a causal mask counts half of all pairs."""
    if attention.causal:
        left = -1 if attention.window is None else attention.window[0]
        width = keys if left < 0 else min(left + 1, keys)
        return queries * (2 * width - width**2 / keys) / 2
    pairs = float(queries * keys)
    for side in attention.window or ():
        beyond = keys - 1 - side if 0 <= side < keys else 0
        pairs -= beyond * (beyond + 1) / 2
    return pairs


def _attention_forward(
    attention: AttentionSlice, decision: BackendSelection, batch: int, queries: int, keys: int
) -> Work:
    """Work of the core of an attention (scores and weighted values); unfused attention computes masked pairs too."""
    width = attention.heads * attention.head_dim
    if not decision.saves_scores:
        return Work(attention=4.0 * width * batch * _attended_pairs(attention, queries, keys))
    pairs = float(batch * queries * keys)
    return Work(matmul=4.0 * width * pairs, moved=decision.call.score_bytes * (_SCORE_PASSES / 3))


def projection_flops(facts: StackInputs, *, is_moe: bool) -> tuple[float, float]:
    """Forward FLOPs of the matmuls of a layer, and of the last one (fc2; 0 with experts)."""
    stack, tokens = facts.stack, facts.tokens
    hidden = stack.hidden_size
    total = tokens * _attention_weights(stack, stack.attention)
    if facts.cross is not None:
        query, key = facts.cross.heads * facts.cross.head_dim, facts.cross.groups * facts.cross.head_dim
        total += 2 * tokens * hidden * query + facts.encoder_tokens * hidden * 2 * key
    ups, moe = (2 if stack.mlp.gated else 1), stack.moe if is_moe else None
    if moe is None:
        last = tokens * hidden * stack.mlp.ffn_hidden_size
        total += last * (ups + 1)
    else:
        last = 0.0
        total += expert_rows(moe, tokens) * (ups + 1) * hidden * moe.ffn_hidden_size + tokens * hidden * moe.experts
        total += tokens * (ups + 1) * hidden * (moe.shared_ffn_hidden_size or 0)
    return 2.0 * total, 2.0 * last


def _attention_weights(stack: StackSlice, attention: AttentionSlice) -> int:
    query, key = attention.heads * attention.head_dim, attention.groups * attention.head_dim
    return stack.hidden_size * (2 * query + 2 * key)


def _grouped_forward(facts: StackInputs) -> float:
    """Forward FLOPs of the grouped GEMMs of an MoE layer."""
    stack, moe = facts.stack, facts.stack.moe
    assert moe is not None
    return (
        2.0 * expert_rows(moe, facts.tokens) * (3 if stack.mlp.gated else 2) * stack.hidden_size * moe.ffn_hidden_size
    )


def _experts_forward(facts: StackInputs) -> float:
    """Forward FLOPs of router, experts and shared expert of an MoE layer."""
    total, _ = projection_flops(facts, is_moe=True)
    attention = 2.0 * facts.tokens * _attention_weights(facts.stack, facts.stack.attention)
    if facts.cross is not None:
        query, key = facts.cross.heads * facts.cross.head_dim, facts.cross.groups * facts.cross.head_dim
        attention += 2.0 * facts.stack.hidden_size * (2 * facts.tokens * query + 2 * facts.encoder_tokens * key)
    return total - attention


# ---------------------------------------------------------------- a micro batch


def _attentions(facts: StackInputs) -> Iterator[tuple[AttentionSlice, BackendSelection, Work]]:
    """Yield self- and cross-attention of a layer, each with the forward work of its core."""
    stack, own, cross, decision = facts.stack, facts.attention, facts.cross, facts.cross_attention
    yield stack.attention, own, _attention_forward(stack.attention, own, facts.batch, facts.length, facts.length)
    if cross is not None and decision is not None:
        yield cross, decision, _attention_forward(cross, decision, facts.batch, facts.length, facts.encoder_length)


def attention_core_work(facts: StackInputs, *, recompute_scores: bool = False) -> Work:
    """Forward work of the cores of all attentions of a layer; `recompute_scores`: the backward pass recomputes the
    scores.
    """
    total = Work()
    for attention, decision, work in _attentions(facts):
        from_log_sum_exp = (
            recompute_scores and decision.saves_scores and recomputes_from_log_sum_exp(attention, decision)
        )
        if from_log_sum_exp:
            work = replace(work, moved=work.moved * _SCORE_PASSES_RECOMPUTED / _SCORE_PASSES)
        total += work
    return total


def _recompute_scores(facts: StackInputs) -> Work:
    """Work to recompute the scores of the attentions that otherwise save them."""
    total = Work()
    for attention, decision, work in _attentions(facts):
        if decision.saves_scores:
            # from log-sum-exps: two more matmuls, and no bytes besides those counted in `attention_core_work`
            total += replace(work, moved=0.0) if recomputes_from_log_sum_exp(attention, decision) else work
    return total


def _layer_work(layer: LayerInStack, *, frozen: bool = False) -> Work:
    """Work of a layer's forward and backward pass without recomputation; frozen weights have no gradients."""
    facts, experts = layer.stack, _has_experts(layer)
    matmul, _ = projection_flops(facts, is_moe=experts)
    core = attention_core_work(facts, recompute_scores="core_attention" in layer.recomputed_modules)
    passes = _POINTWISE_PASSES_COMPILED if facts.compiled else _POINTWISE_PASSES_EAGER
    saved = sum(each.num_bytes for each in layer.memory.saved if each.part not in ("scores", "weights"))
    if layer.skips_backward:
        moved = passes * (saved + layer.memory.input_bytes) / 3
        return Work(matmul=matmul, grouped=_grouped_forward(facts) if experts else 0.0, moved=moved) + core
    return Work(
        matmul=(2 if frozen else 3) * matmul + 3 * core.matmul,
        grouped=(2 if frozen else 3) * _grouped_forward(facts) if experts else 0.0,
        attention=(1 + _ATTENTION_BACKWARD_RATIO) * core.attention,
        moved=passes * (saved + layer.memory.input_bytes) + 3 * core.moved,
    )


def recompute_work(layer: LayerInStack) -> Work:
    """Work of recomputation in the backward pass of a layer."""
    if layer.skips_backward:
        return Work()
    facts, experts = layer.stack, _has_experts(layer)
    core = attention_core_work(facts)
    if layer.is_recomputed:
        matmul, last = projection_flops(facts, is_moe=experts)
        # the backward pass does not need the output of fc2, so the compiler does not recompute it
        skipped = last if facts.compiled and layer.recompute.chunk == 1 else 0.0
        moved = _layer_work(layer).moved - 3 * core.moved
        grouped = _grouped_forward(facts) if experts else 0.0
        return Work(matmul=matmul - skipped, grouped=grouped, moved=moved / 3) + core
    modules = layer.recomputed_modules
    total = Work(moved=2.0 * recomputed_bytes(layer.memory.saved, modules - {"core_attention"}))
    if "core_attention" in modules:
        total += _recompute_scores(facts)
    if "moe" in modules and experts:
        total += Work(matmul=_experts_forward(facts), grouped=_grouped_forward(facts))
    return total


def _has_experts(layer: LayerInStack) -> bool:
    moe = layer.stack.stack.moe
    return moe is not None and moe.layers[layer.index]


def _embedding_and_loss_work(facts: RunInputs) -> Work:
    """Work of embeddings, head and loss for one micro batch."""
    vocab, hidden = facts.family.padded_vocab_size, facts.stacks[-1].stack.hidden_size
    e = facts.widths.compute
    logits = facts.output_tokens * vocab
    moved = logits * e * 4 + sum(stack.tokens * stack.stack.hidden_size for stack in facts.stacks) * e * 8
    return Work(matmul=(4.0 if facts.model_config.peft.is_on else 6.0) * logits * hidden, moved=moved)


def _lora_work(facts: RunInputs) -> Work:
    """Work that LoRA adds to a micro batch: three low-rank matmuls for each adapter matrix, bound by what they read.

    The input of a linear layer is read twice more and its gradient written once more; its output is written once more
    and the gradient of that read once more (`kernels.lora_linear`). In a fused MLP only the output's part is added
    between its projections.
    """
    peft = peft_slice(facts.model_config.peft)
    if not isinstance(peft, LoRASlice):
        return Work()
    tokens, trained = max(stack.tokens for stack in facts.stacks), num_trainable_parameters(facts)
    passes = 1.5 if all(stack.fused_lora_mlp for stack in facts.stacks) else 2.0
    return Work(matmul=6.0 * tokens * trained, moved=passes * tokens * facts.widths.compute * trained / peft.rank)


# ---------------------------------------------------------------- bytes over links


def _messages(facts: RunInputs) -> float:
    """Bytes a GPU sends to its peers per step, in ring all-reduces, reduce-scatters and all-gathers."""
    layout = facts.layout
    if layout is None:
        return 0.0
    peers = (facts.ranks - 1) / facts.ranks
    gradients = num_trainable_parameters(facts) * facts.reduce_itemsize
    if layout.replicates_weights:
        weights = num_trainable_parameters(facts) * facts.widths.weights
        return peers * (2 * gradients if layout.shards == 1 else gradients + weights)
    weights = num_parameters(facts) * facts.widths.weights
    gathers = 2 if layout.reshard_after_forward else 1
    return peers * facts.micro_batches * (gathers * weights + gradients)


def _update_bytes(facts: RunInputs) -> float:
    """Bytes of GPU memory that the optimizer's update reads and writes per step."""
    main = main_weight_bytes(facts.precision) or facts.widths.weights
    state = num_state_elements(facts) / num_trainable_parameters(facts)
    gradient = facts.widths.weights
    per_parameter = main * 2 + state * main * 2 + gradient * 2 + facts.widths.weights
    accumulation = (2 * 4 + gradient) * facts.micro_batches if facts.micro_batches > 1 else 0
    return (
        num_trainable_parameters(facts) / facts.shards * per_parameter + num_trainable_parameters(facts) * accumulation
    )


def _newton_schulz_flops(facts: RunInputs, memory: MemoryPlan) -> float:
    """FLOPs of Muon's Newton-Schulz iterations: 4 m^2 n + 2 m^3 each for an m x n matrix, m <= n."""
    if optimizer_kind(facts.model_config.optim.name) != "muon" or facts.model_config.peft.is_on:
        return 0.0
    steps, total = optimizer_settings(facts.model_config.optim)["ns_steps"], 0.0
    for layer in memory.layers:
        stack = layer.stack.stack
        hidden, mlp = stack.hidden_size, stack.mlp
        number = stack.moe.experts if stack.moe and stack.moe.layers[layer.index] else 1
        width = stack.moe.ffn_hidden_size if number > 1 and stack.moe else mlp.ffn_hidden_size
        heads = stack.attention.heads * stack.attention.head_dim
        shapes = [(hidden, width)] * number * (3 if mlp.gated else 2) + [(hidden, heads)] * 3
        total += sum(4.0 * min(a, b) ** 2 * max(a, b) + 2.0 * min(a, b) ** 3 for a, b in shapes)
    return total * steps / facts.shards


def _ema_seconds(facts: RunInputs, memory: MemoryPlan, gpu: GPUSpec) -> float:
    """Seconds per step of updating the EMA: read, update, write; plus a copy if weights and EMA are on two devices.

    The time a host needs to update an EMA in its memory is not known, and counts as zero.
    """
    size = num_trainable_parameters(facts) / facts.shards * facts.ema_itemsize
    source_on_host = memory.persistent.on_host > 0 and main_weight_bytes(facts.precision) > 0
    copy = size / gpu.host_link if facts.ema_on_host != source_on_host else 0.0
    update = 0.0 if facts.ema_on_host else 3 * size / (gpu.bandwidth * gpu.bandwidth_efficiency)
    return (copy + update) / facts.ema_every_n_steps


# ---------------------------------------------------------------- time


def step_time(facts: RunInputs, memory: MemoryPlan) -> StepTime | None:
    """Estimate the time of a step on the target's GPU; None if its peak is not known for this precision.

    The peaks are those of 16-bit matmuls; fp32 and fp64 run at a small fraction of them.
    """
    gpu = facts.target.gpu
    if gpu is None or gpu.peak is None or facts.widths.compute != 2:
        return None
    model_work, recompute = _embedding_and_loss_work(facts) + _lora_work(facts), Work()
    for layer in memory.layers:
        model_work += _layer_work(layer, frozen=facts.model_config.peft.is_on)
        recompute += recompute_work(layer)
    micro = facts.micro_batches
    attention_speed = gpu.peak * _attention_efficiency(facts) * gpu.attention_efficiency
    matmul_speed = gpu.peak * gpu.matmul_efficiency * _matmul_efficiency(facts)
    parts = {
        "matrix products": micro * model_work.dense_equivalent / matmul_speed,
        "attention": micro * model_work.attention / attention_speed,
        "pointwise": micro * model_work.moved / (gpu.bandwidth * gpu.bandwidth_efficiency),
        "recomputed": micro * _seconds(recompute, gpu, matmul_speed, attention_speed),
    }
    computing = sum(parts.values())

    def forward_and_backward(layer: LayerInStack) -> tuple[float, float]:
        work = _layer_work(layer, frozen=facts.model_config.peft.is_on)
        seconds = _seconds(work, gpu, matmul_speed, attention_speed)
        if layer.skips_backward:
            return seconds, 0.0
        return seconds / 3, seconds * 2 / 3 + _seconds(recompute_work(layer), gpu, matmul_speed, attention_speed)

    host = HOST_SECONDS_PER_LAYER if facts.compiled else _HOST_SECONDS_OF_EAGER_LAYER
    layers = micro * len(memory.layers)
    parts["starting kernels"] = max(0.0, layers * GPU_SECONDS_PER_LAYER - computing)
    parts["waiting for the host"] = 0.0
    if not facts.uses_cuda_graph:
        parts["waiting for the host"] = max(0.0, layers * host - computing - parts["starting kernels"])
    parts["copies not hidden"] = micro * offload_stall_seconds(memory.layers, forward_and_backward, gpu.host_link)
    update = _update_bytes(facts) / (gpu.bandwidth * gpu.bandwidth_efficiency)
    update += _newton_schulz_flops(facts, memory) / matmul_speed
    parts["update"] = max(update, memory.persistent.on_host / gpu.host_link) + _ema_seconds(facts, memory, gpu)
    parts["messages"] = _messages(facts) / gpu.peer_link
    samples = facts.model_config.global_batch_size
    return StepTime(
        seconds=sum(parts.values()),
        model_flops=samples
        * training_flops_per_sample(
            facts.model_config, facts.family.padded_vocab_size, facts.batch_spec, frozen=facts.model_config.peft.is_on
        ),
        recomputed_flops=facts.ranks * micro * (recompute.matmul + recompute.attention),
        tokens=samples * (facts.batch_spec.seq_length + facts.batch_spec.decoder_seq_length),
        peak_flops=gpu.peak * facts.ranks,
        parts=parts,
        sent=micro * sum(map(offloaded_bytes, memory.layers)) + memory.persistent.on_host,
    )


def _attention_efficiency(facts: RunInputs) -> float:
    """Speed of the chosen attention backend, relative to the GPU's best one on long sequences."""
    slow = ("sdpa_flash", "sdpa_efficient", "flash_attn")
    capability = facts.target.capability or (0, 0)
    last = facts.stacks[-1]
    speed = _FLASH2_ON_HOPPER if capability >= (9, 0) and last.attention.backend in slow else 1.0
    speed *= NARROW_HEAD_SPEED if last.stack.attention.head_dim <= _NARROW_HEAD_DIM else 1.0
    keys = max(stack.length for stack in facts.stacks)
    return speed * keys / (keys + _HALF_SPEED_KEYS)


def _matmul_efficiency(facts: RunInputs) -> float:
    """Speed of matmuls of this micro batch, relative to the measured one."""

    def speed(tokens: int) -> float:
        return tokens / (tokens + _HALF_SPEED_TOKENS)

    return speed(max(stack.tokens for stack in facts.stacks)) / speed(_MEASURED_TOKENS)


def _seconds(work: Work, gpu: GPUSpec, matmul_speed: float, attention_speed: float) -> float:
    """Seconds of `work` at the given FLOP/s of matmuls and attention."""
    pointwise = work.moved / (gpu.bandwidth * gpu.bandwidth_efficiency)
    return work.dense_equivalent / matmul_speed + work.attention / attention_speed + pointwise
