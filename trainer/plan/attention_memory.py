"""What an attention keeps for its backward pass, and what that pass needs besides, by backend.

The families differ in one thing above all: whether the scores of a layer, (batch, heads, queries, keys), are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.attention.backend_support import BY_NAME
from ...kernels.attention.dispatch import Decision
from ...kernels.attention.recompute_scores import serves_call
from ...models.config.memory import RecomputeModule
from ...models.config.slices import AttentionSlice, StackSlice
from .inputs import Widths

_SUMS_IN_FP32 = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flash_attn", "te_flash", "te_fused")
"""Their backward pass adds up the gradient of the queries in fp32 beside the result."""


class Kept(NamedTuple):
    """Something a layer keeps for its backward pass.

    Attributes:
        part: of the layer: `stream`, `norm`, `attention`, `scores`, `mlp`, `activation`, `experts`, `dropout`,
            `weights`.
        size: bytes of a micro batch.
        module: what `activations_checkpoint_modules` calls it; None for what no module recomputes.
        also: another module without which that one does not recompute it; None without.
        within: another module that recomputes it too, by itself; None without.
    """

    part: str
    size: int
    module: RecomputeModule | None = None
    also: RecomputeModule | None = None
    within: RecomputeModule | None = None

    def is_made_again(self, modules: frozenset[RecomputeModule]) -> bool:
        """Whether it is not kept where these modules are recomputed."""
        return self.within in modules or (self.module in modules and (self.also is None or self.also in modules))


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """What an attention needs of memory.

    Attributes:
        kept: for the backward pass, but for the input of its first projection.
        working: bytes of the backward pass besides, at most: gradients and accumulators.
        working_again: the same where its scores are made again.
        beside_scores: bytes that are kept more then, or less: what they are made from, in place of copies of it.
    """

    kept: tuple[Kept, ...]
    working: int
    working_again: int
    beside_scores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Tokens of a micro batch on both sides of an attention.

    Attributes:
        queries: that ask.
        keys: that are asked.
        across: keys are of another text, with a projection of their own.
    """

    queries: int
    keys: int
    across: bool = False


def attention_memory(
    attention: AttentionSlice, stack: StackSlice, decision: Decision, sides: Sides, widths: Widths, *, compiled: bool
) -> AttentionMemory:
    """What an attention of a layer keeps and needs.

    Args:
        attention: what it is.
        stack: of the layer.
        decision: the choice for its training calls.
        sides: tokens of a micro batch.
        widths: bytes of its numbers.
        compiled: whether the layer is compiled.
    """
    e = widths.compute
    query = attention.heads * attention.head_dim
    key = attention.groups * attention.head_dim
    asked, read = sides.queries * query * e, sides.keys * key * e
    projected, turned = _projections(attention, stack, asked, read, sides)
    normed = _norms_of_heads(stack, attention, asked, read, widths, compiled=compiled)
    scores = beside_scores = spared = 0
    if decision.keeps_scores:
        inputs, core, scores = _written_out(attention, decision, asked, read, e, compiled=compiled)
        if attention.qk_norm and (compiled or _head_norms_keep_input(stack, widths)):
            inputs += projected  # which the norms over heads read; what is copied is their result
        # made again from queries, keys and values as they come, not in the order or in the width of the products
        beside_scores = projected + turned - inputs
        spared = min(beside_scores, 0)  # such copies are there again then
        if scores_come_from_sums(attention, decision):
            beside_scores += sides.queries * attention.heads * 4  # the log-sum-exps
            spared = scores // 2  # the gradient of the weights, which is never written
    else:
        inputs, core = _fused(attention, decision, asked, read, e)
        if inputs is None:
            inputs = projected + turned
        elif turned:
            inputs += turned
    kept = [Kept("attention", inputs + normed), *core, Kept("attention", asked)]
    if attention.head_scale:
        kept.append(Kept("attention", asked))
    gradients = 2 * asked + 2 * read + asked
    if decision.keeps_scores:
        working = gradients + scores
    else:
        sums = sides.queries * query * 4 if decision.backend in _SUMS_IN_FP32 else 0
        working = gradients + sums + _bias_bytes(decision)
    return AttentionMemory(tuple(each for each in kept if each.size), working, working - spared, beside_scores)


def scores_come_from_sums(attention: AttentionSlice, decision: Decision) -> bool:
    """Whether scores that are recomputed come from log-sum-exps (`kernels.attention.scores_again`)."""
    return decision.backend == "unfused" and attention.masked_softmax_fusion and serves_call(decision.call)


def _projections(attention: AttentionSlice, stack: StackSlice, asked: int, read: int, sides: Sides) -> tuple[int, int]:
    """Bytes that are kept of what the projections give, and of queries and keys once turned or normed.

    Values are a view of what was projected, but for a copy where nothing else of it is needed.
    """
    if attention.qk_norm:
        return asked + 2 * read, asked + read
    turns = not sides.across and stack.rotary is not None
    return (read, asked + read) if turns else (asked + 2 * read, 0)


def _norms_of_heads(
    stack: StackSlice, attention: AttentionSlice, asked: int, read: int, widths: Widths, *, compiled: bool
) -> int:
    """Bytes that norms over heads keep besides their results."""
    if not attention.qk_norm:
        return 0
    numbers = (asked + read) // widths.compute
    if compiled:
        return numbers // attention.head_dim * 4
    copies = 0 if _head_norms_keep_input(stack, widths) else 1
    if stack.norm.kind == "rmsnorm":
        copies += 1  # the quotient by the root
    return copies * numbers * 4


def _head_norms_keep_input(stack: StackSlice, widths: Widths) -> bool:
    """Whether a norm over heads, as written, keeps what was projected rather than a copy in fp32."""
    if widths.compute >= 4:
        return True
    return stack.norm.kind == "layernorm" and not (stack.norm.zero_centered or widths.casts_weights)


def _fused(
    attention: AttentionSlice, decision: Decision, asked: int, read: int, e: int
) -> tuple[int | None, tuple[Kept, ...]]:
    """Inputs, None where they are the projections as they are, and what the core keeps: a number for each row."""
    call = decision.call
    rows = call.batch * call.queries * attention.heads * 4
    core = (Kept("attention", rows), Kept("scores", _bias_bytes(decision)))
    if decision.backend == "sdpa_efficient" and attention.groups < attention.heads:
        repeated = 2 * call.batch * call.keys * attention.heads * attention.head_dim * e
        return repeated, core  # keys and values as wide as all heads, so that the projections are not needed
    return None, core


def _bias_bytes(decision: Decision) -> int:
    """Bytes of a bias by distance that a backend takes written out."""
    return decision.call.bias_bytes if BY_NAME[decision.backend].writes_bias_out_for(decision.call) else 0


def _written_out(
    attention: AttentionSlice, decision: Decision, asked: int, read: int, e: int, *, compiled: bool
) -> tuple[int, tuple[Kept, ...], int]:
    """Inputs, copied to the order of the products; what the core keeps; bytes of the gradients of scores.

    The probabilities are kept, once or several times. Scores with a bias or a bound are in fp32, and so are the
    probabilities that a softmax keeps then; what is multiplied with the values is a narrow copy.
    """
    call, backend = decision.call, decision.backend
    pairs = call.batch * attention.heads * call.queries * call.keys
    if backend in ("sdpa_math", "reference"):  # in fp32, with keys and values as wide as all heads
        per_head = call.batch * attention.heads * attention.head_dim * 4
        inputs = per_head * (call.queries + 2 * call.keys)
        # the reference keeps the scores too, and as written probabilities before and after rows that see nothing
        times = 1 if backend == "sdpa_math" else 2 if compiled else 3
        scores = pairs * (4 * times + call_drops(decision) * 5)
        return inputs, (Kept("scores", scores, "core_attention"),), 8 * pairs
    wide = call.bias_goes_by_distance or bool(call.softcap) or not attention.masked_softmax_fusion
    probabilities = 4 if wide and e < 4 else e
    copy = e if (wide and e < 4) or call.dropout else 0
    capped = (e if compiled else 4) if call.softcap else 0  # the scores, or as written the tangent in fp32
    places = call.queries * call.keys * 8 if call.bias_is_distance else 0
    scores = pairs * (probabilities + copy + capped + call_drops(decision)) + places
    return asked + 2 * read, (Kept("scores", scores, "core_attention"),), pairs * (e + probabilities)


def call_drops(decision: Decision) -> int:
    """1 where attention weights are dropped, a byte of mask for each."""
    return 1 if decision.call.dropout else 0
