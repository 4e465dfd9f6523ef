"""What a step computes and moves, from which a roofline gives its time.

Matrix products, attention, and pointwise kernels run one after the other, each at the part of the card's peak that it
was measured to reach; messages between ranks are added, copies to the host count where they do not fit beside the
computation. The parts that are no constant of a card come from the training step of docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...kernels.attention.dispatch import Decision
from ...models.config.peft_slice import LoRASlice, peft_slice
from ...models.config.slices import AttentionSlice, StackSlice
from ..config.schema.optim import optimizer_kind, optimizer_settings
from .attention_memory import scores_come_from_sums
from .flops import training_flops_per_sample
from .hardware import Card
from .inputs import RunFacts, StackFacts
from .layer_memory import recomputed, rows_of
from .state_memory import main_weight_bytes, parameters_of, state_of, trained_of
from .timeline import MemoryPlan, PlacedLayer
from .transfers import sent_by, waited_for_copies

BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of fused attention's backward pass, in those of its forward: five products to two."""
PASSES_COMPILED, PASSES_AS_WRITTEN = 4.8, 8.0
"""How often pointwise kernels, forward and backward, move the bytes that a layer keeps. Compiled: what is left of the
measured step when everything else is taken off; as written: from the difference that compiling makes."""
PASSES_OF_SCORES, PASSES_FROM_SUMS = 7.0, 3.5
"""Likewise of the scores of unfused attention: products, softmax and their gradients; and where scores come again from
log-sum-exps. Both measured on an H100, as 108 and 97 ms of a step."""
SLOW_ATTENTION = 0.63
"""The speed of FlashAttention 2 on Hopper in that of the kernels written for it."""
NARROW_HEADS, NARROW = 64, 0.75
"""Heads no wider than the first: what fused attention reaches, in what it does with wider ones. On an H100 in a step
with experts 325 TFLOP/s, in one of LoRA with heads of 128 434."""
GROUPED = 0.875
"""The speed of grouped matrix products in that of whole ones, of the same step with experts: 640 TFLOP/s."""
HOST_SECONDS_OF_LAYER, HOST_SECONDS_AS_WRITTEN = 3.6e-3, 4.5e-3
"""What a host needs to launch a layer, forward and backward, compiled and not: T5 base beside an H100, measured as 84
ms of 24 compiled layers; the other is an estimate from the number of launches."""
CARD_SECONDS_OF_LAYER = 0.15e-3
"""What a card needs for a layer of a CUDA graph, however small it is: 65 kernels of some 2 us, an estimate."""
FILLING_TOKENS = 256
"""Matrix products of so many tokens run at half their speed, for they leave much of the card idle: an estimate."""
FILLING_KEYS = 600
"""Fused attention over so many keys runs at half the speed of long sequences. On an H100, heads of 128, causal: 331
TFLOP/s over 1,024 keys, 503 over 4,096, 565 over 16,384."""
MEASURED_TOKENS = 16_384
"""Of the step that gave the speeds of the cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass through some layers computes and moves.

    Attributes:
        matmul: FLOPs of matrix products.
        grouped: of those, what experts have.
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
    def slow_matmul(self) -> float:
        """FLOPs that whole matrix products have in the time of these."""
        return self.matmul + self.grouped * (1 / GROUPED - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step of all ranks.

    Attributes:
        seconds: of the step.
        model_flops: of the step, recomputed ones not counted.
        recomputed_flops: of the step.
        tokens: of the step.
        peak_flops: of all cards; None where it is not known.
        parts: seconds by what takes them.
        sent: bytes a rank sends to its host in a step, and as many come back.
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
        """Of all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs in those that the cards could do."""
        return self.model_flops / self.seconds / self.peak_flops


# ---------------------------------------------------------------- FLOPs


def visible_pairs(attention: AttentionSlice, queries: int, keys: int) -> float:
    """Pairs of a query and a key that a sample's attention computes, causal ones counted at half."""
    if attention.causal:
        left = -1 if attention.window is None else attention.window[0]
        width = keys if left < 0 else min(left + 1, keys)
        return queries * (2 * width - width**2 / keys) / 2
    pairs = float(queries * keys)
    for side in attention.window or ():
        beyond = keys - 1 - side if 0 <= side < keys else 0
        pairs -= beyond * (beyond + 1) / 2
    return pairs


def attention_forward(attention: AttentionSlice, decision: Decision, batch: int, queries: int, keys: int) -> Work:
    """Scores and values of a micro batch; unfused attention multiplies and moves all pairs."""
    width = attention.heads * attention.head_dim
    if not decision.keeps_scores:
        return Work(attention=4.0 * width * batch * visible_pairs(attention, queries, keys))
    pairs = float(batch * queries * keys)
    passes = PASSES_OF_SCORES / 3
    return Work(matmul=4.0 * width * pairs, moved=decision.call.score_bytes * passes)


def projections_forward(facts: StackFacts, *, experts: bool) -> tuple[float, float]:
    """FLOPs of the matrix products of a layer in a forward pass, and of the last of them."""
    stack, tokens = facts.stack, facts.tokens
    hidden = stack.hidden_size
    total = tokens * _attention_weights(stack, stack.attention)
    if facts.cross is not None:
        query, key = facts.cross.heads * facts.cross.head_dim, facts.cross.groups * facts.cross.head_dim
        total += 2 * tokens * hidden * query + facts.memory_tokens * hidden * 2 * key
    ups, moe = (2 if stack.mlp.gated else 1), stack.moe if experts else None
    if moe is None:
        last = tokens * hidden * stack.mlp.ffn_hidden_size
        total += last * (ups + 1)
    else:
        last = 0.0
        total += rows_of(moe, tokens) * (ups + 1) * hidden * moe.ffn_hidden_size + tokens * hidden * moe.experts
        total += tokens * (ups + 1) * hidden * (moe.shared_ffn_hidden_size or 0)
    return 2.0 * total, 2.0 * last


def _attention_weights(stack: StackSlice, attention: AttentionSlice) -> int:
    query, key = attention.heads * attention.head_dim, attention.groups * attention.head_dim
    return stack.hidden_size * (2 * query + 2 * key)


def grouped_forward(facts: StackFacts) -> float:
    """FLOPs of the grouped matrix products of a layer with experts in a forward pass."""
    stack, moe = facts.stack, facts.stack.moe
    assert moe is not None
    return 2.0 * rows_of(moe, facts.tokens) * (3 if stack.mlp.gated else 2) * stack.hidden_size * moe.ffn_hidden_size


def experts_forward(facts: StackFacts) -> float:
    """FLOPs of the experts of a layer, its router and shared expert in a forward pass."""
    with_experts, _ = projections_forward(facts, experts=True)
    attention_alone = 2.0 * facts.tokens * _attention_weights(facts.stack, facts.stack.attention)
    if facts.cross is not None:
        query, key = facts.cross.heads * facts.cross.head_dim, facts.cross.groups * facts.cross.head_dim
        attention_alone += 2.0 * facts.stack.hidden_size * (2 * facts.tokens * query + 2 * facts.memory_tokens * key)
    return with_experts - attention_alone


# ---------------------------------------------------------------- a micro batch


def _attentions(facts: StackFacts) -> Iterator[tuple[AttentionSlice, Decision, Work]]:
    """The attentions of a layer, with what the core of each does in a forward pass."""
    stack, own, across, decision = facts.stack, facts.attention, facts.cross, facts.cross_attention
    yield stack.attention, own, attention_forward(stack.attention, own, facts.batch, facts.length, facts.length)
    if across is not None and decision is not None:
        yield across, decision, attention_forward(across, decision, facts.batch, facts.length, facts.memory_length)


def core_forward(facts: StackFacts, *, again: bool = False) -> Work:
    """The core of all attentions of a layer in a forward pass; `again`: the backward makes the scores again."""
    total = Work()
    for attention, decision, work in _attentions(facts):
        from_sums = again and decision.keeps_scores and scores_come_from_sums(attention, decision)
        total += replace(work, moved=work.moved * PASSES_FROM_SUMS / PASSES_OF_SCORES) if from_sums else work
    return total


def scores_again(facts: StackFacts) -> Work:
    """What it takes to make the scores of attentions again, of those that keep any."""
    again = Work()
    for attention, decision, work in _attentions(facts):
        if decision.keeps_scores:
            # from log-sum-exps two products are added, and nothing moves but what `core_forward` has counted
            again += replace(work, moved=0.0) if scores_come_from_sums(attention, decision) else work
    return again


def layer_work(layer: PlacedLayer, *, frozen: bool = False) -> Work:
    """Forward and backward of a layer but for what is recomputed; frozen weights have no gradients."""
    facts, experts = layer.stack, _has_experts(layer)
    matmul, _ = projections_forward(facts, experts=experts)
    core = core_forward(facts, again="core_attention" in layer.modules)
    passes = PASSES_COMPILED if facts.compiled else PASSES_AS_WRITTEN
    kept = sum(each.size for each in layer.memory.kept if each.part not in ("scores", "weights"))
    if layer.is_idle:
        moved = passes * (kept + layer.memory.boundary) / 3
        return Work(matmul=matmul, grouped=grouped_forward(facts) if experts else 0.0, moved=moved) + core
    return Work(
        matmul=(2 if frozen else 3) * matmul + 3 * core.matmul,
        grouped=(2 if frozen else 3) * grouped_forward(facts) if experts else 0.0,
        attention=(1 + BACKWARD_OF_ATTENTION) * core.attention,
        moved=passes * (kept + layer.memory.boundary) + 3 * core.moved,
    )


def recomputed_work(layer: PlacedLayer) -> Work:
    """What the backward pass of a layer does again."""
    if layer.is_idle:
        return Work()
    facts, experts = layer.stack, _has_experts(layer)
    core = core_forward(facts)
    if layer.is_recomputed:
        matmul, last = projections_forward(facts, experts=experts)
        spared = last if facts.compiled and layer.recompute.chunk == 1 else 0.0
        moved = layer_work(layer).moved - 3 * core.moved
        grouped = grouped_forward(facts) if experts else 0.0
        return Work(matmul=matmul - spared, grouped=grouped, moved=moved / 3) + core
    modules = layer.modules
    again = Work(moved=2.0 * recomputed(layer.memory.kept, modules - {"core_attention"}))
    if "core_attention" in modules:
        again += scores_again(facts)
    if "moe" in modules and experts:
        again += Work(matmul=experts_forward(facts), grouped=grouped_forward(facts))
    return again


def _has_experts(layer: PlacedLayer) -> bool:
    moe = layer.stack.stack.moe
    return moe is not None and moe.layers[layer.number]


def ends_work(facts: RunFacts) -> Work:
    """Embeddings, head and loss of a micro batch."""
    vocab, hidden = facts.family.padded_vocab_size, facts.stacks[-1].stack.hidden_size
    e = facts.widths.compute
    logits = facts.out_tokens * vocab
    moved = logits * e * 4 + sum(stack.tokens * stack.stack.hidden_size for stack in facts.stacks) * e * 8
    return Work(matmul=(4.0 if facts.keys.peft.is_on else 6.0) * logits * hidden, moved=moved)


def updates_work(facts: RunFacts) -> Work:
    """What LoRA adds to a micro batch: three narrow products for each of its matrices, that move what they read.

    A linear layer's input is read twice and its gradient written once more, its result written and the gradient of
    that read once more (`kernels.lora_linear`); between the projections of an MLP that is one operation, only the last.
    """
    peft = peft_slice(facts.keys.peft)
    if not isinstance(peft, LoRASlice):
        return Work()
    tokens, trained = max(stack.tokens for stack in facts.stacks), trained_of(facts)
    passes = 1.5 if all(stack.low_rank_mlp for stack in facts.stacks) else 2.0
    return Work(matmul=6.0 * tokens * trained, moved=passes * tokens * facts.widths.compute * trained / peft.rank)


# ---------------------------------------------------------------- bytes over links


def _messages(facts: RunFacts) -> float:
    """Bytes over the link between cards in a step, as sums count them."""
    layout = facts.layout
    if layout is None:
        return 0.0
    part = (facts.ranks - 1) / facts.ranks
    weights, summed = parameters_of(facts) * facts.widths.weights, trained_of(facts) * facts.reduce_width
    if layout.whole_weights:
        weights = trained_of(facts) * facts.widths.weights
        return part * (2 * summed if layout.shards == 1 else summed + weights)
    gathers = 2 if layout.reshard_after_forward else 1
    return part * facts.micro_batches * (gathers * weights + summed)


def _update_bytes(facts: RunFacts) -> float:
    """Bytes that the update of a step moves in the memory of the card."""
    main = main_weight_bytes(facts.precision) or facts.widths.weights
    state = state_of(facts) / trained_of(facts)
    gradient = facts.widths.weights
    each = main * 2 + state * main * 2 + gradient * 2 + facts.widths.weights
    sums = (2 * 4 + gradient) * facts.micro_batches if facts.micro_batches > 1 else 0
    return trained_of(facts) / facts.shards * each + trained_of(facts) * sums


def _orthogonalised(facts: RunFacts, memory: MemoryPlan) -> float:
    """FLOPs of Muon's iterations: 4 m^2 n + 2 m^3 each for an m x n matrix, m <= n."""
    if optimizer_kind(facts.keys.optim.name) != "muon" or facts.keys.peft.is_on:
        return 0.0
    steps, total = optimizer_settings(facts.keys.optim)["ns_steps"], 0.0
    for layer in memory.layers:
        stack = layer.stack.stack
        hidden, mlp = stack.hidden_size, stack.mlp
        number = stack.moe.experts if stack.moe and stack.moe.layers[layer.number] else 1
        width = stack.moe.ffn_hidden_size if number > 1 and stack.moe else mlp.ffn_hidden_size
        heads = stack.attention.heads * stack.attention.head_dim
        shapes = [(hidden, width)] * number * (3 if mlp.gated else 2) + [(hidden, heads)] * 3
        total += sum(4.0 * min(a, b) ** 2 * max(a, b) + 2.0 * min(a, b) ** 3 for a, b in shapes)
    return total * steps / facts.shards


def _averaging(facts: RunFacts, memory: MemoryPlan, card: Card) -> float:
    """Seconds that the moving average of the weights takes: read, mixed, written; copied where its source is elsewhere.

    What a host takes to mix one that lies there is not known.
    """
    size = trained_of(facts) / facts.shards * facts.average_width
    from_host = memory.held.on_host > 0 and main_weight_bytes(facts.precision) > 0
    copied = size / card.host_link if facts.average_on_host != from_host else 0.0
    mixed = 0.0 if facts.average_on_host else 3 * size / (card.bandwidth * card.bandwidth_part)
    return (copied + mixed) / facts.average_every


# ---------------------------------------------------------------- time


def step_time(facts: RunFacts, memory: MemoryPlan) -> StepTime | None:
    """The time of a step on the card of the target; None where its peak is not known.

    The peaks are those of 16-bit numbers; fp32 and fp64 are calculated as such, at a small part of them.
    """
    card = facts.target.card
    if card is None or card.peak is None or facts.widths.compute != 2:
        return None
    plain, again = ends_work(facts) + updates_work(facts), Work()
    for layer in memory.layers:
        plain += layer_work(layer, frozen=facts.keys.peft.is_on)
        again += recomputed_work(layer)
    micro = facts.micro_batches
    fused = card.peak * _attention_speed(facts) * card.attention_part
    products = card.peak * card.matmul_part * _filled(facts)
    parts = {
        "matrix products": micro * plain.slow_matmul / products,
        "attention": micro * plain.attention / fused,
        "pointwise": micro * plain.moved / (card.bandwidth * card.bandwidth_part),
        "recomputed": micro * _seconds(again, card, products, fused),
    }
    computing = sum(parts.values())

    def times(layer: PlacedLayer) -> tuple[float, float]:
        plain = _seconds(layer_work(layer, frozen=facts.keys.peft.is_on), card, products, fused)
        if layer.is_idle:
            return plain, 0.0
        return plain / 3, plain * 2 / 3 + _seconds(recomputed_work(layer), card, products, fused)

    host = HOST_SECONDS_OF_LAYER if facts.compiled else HOST_SECONDS_AS_WRITTEN
    layers = micro * len(memory.layers)
    parts["starting kernels"] = max(0.0, layers * CARD_SECONDS_OF_LAYER - computing)
    parts["waiting for the host"] = 0.0
    if not facts.is_recorded:
        parts["waiting for the host"] = max(0.0, layers * host - computing - parts["starting kernels"])
    parts["copies not hidden"] = micro * waited_for_copies(memory.layers, times, card.host_link)
    update = _update_bytes(facts) / (card.bandwidth * card.bandwidth_part)
    update += _orthogonalised(facts, memory) / products
    parts["update"] = max(update, memory.held.on_host / card.host_link) + _averaging(facts, memory, card)
    parts["messages"] = _messages(facts) / card.peer_link
    samples = facts.keys.global_batch_size
    return StepTime(
        seconds=sum(parts.values()),
        model_flops=samples
        * training_flops_per_sample(
            facts.keys, facts.family.padded_vocab_size, facts.form, frozen=facts.keys.peft.is_on
        ),
        recomputed_flops=facts.ranks * micro * (again.matmul + again.attention),
        tokens=samples * (facts.form.length + facts.form.decoder_length),
        peak_flops=card.peak * facts.ranks,
        parts=parts,
        sent=micro * sum(map(sent_by, memory.layers)) + memory.held.on_host,
    )


def _attention_speed(facts: RunFacts) -> float:
    """The speed of the attention that was chosen, in that of the best for the card over many keys."""
    slow = ("sdpa_flash", "sdpa_efficient", "flash_attn")
    capability = facts.target.capability or (0, 0)
    last = facts.stacks[-1]
    speed = SLOW_ATTENTION if capability >= (9, 0) and last.attention.backend in slow else 1.0
    keys = max(stack.length for stack in facts.stacks)
    return speed * (NARROW if last.stack.attention.head_dim <= NARROW_HEADS else 1.0) * keys / (keys + FILLING_KEYS)


def _filled(facts: RunFacts) -> float:
    """The speed of matrix products of a micro batch, in that of the measured one."""

    def speed(tokens: int) -> float:
        return tokens / (tokens + FILLING_TOKENS)

    return speed(max(stack.tokens for stack in facts.stacks)) / speed(MEASURED_TOKENS)


def _seconds(work: Work, card: Card, products: float, attention: float) -> float:
    """Of some work on a card whose matrix products and attention have these FLOP/s."""
    moving = work.moved / (card.bandwidth * card.bandwidth_part)
    return work.slow_matmul / products + work.attention / attention + moving
