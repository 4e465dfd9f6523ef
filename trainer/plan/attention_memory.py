"""Activation memory of attention, by backend: bytes saved for backward, and working memory of the backward pass.

The main difference between backends is whether they save the scores of shape (batch, heads, queries, keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.attention.backend_support import BACKENDS_BY_NAME
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.recompute_scores import supports_call
from ...models.config.memory import RecomputeModule
from ...models.config.stack import AttentionSlice, StackSlice
from .inputs import ByteWidths

_FP32_DQ_ACCUMULATOR = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flash_attn", "te_flash", "te_fused")
"""Backends whose backward pass accumulates dQ in a separate fp32 buffer."""


class SavedTensors(NamedTuple):
    """Tensors a layer saves for its backward pass.

    Attributes:
        part: of the layer: `stream`, `norm`, `attention`, `scores`, `mlp`, `activation`, `experts`, `dropout`,
            `weights`.
        num_bytes: bytes per micro batch.
        module: entry of `activations_checkpoint_modules` that recomputes it; None if no entry does.
        also_requires: a second entry that is required as well; None without.
        alternative_module: another entry that recomputes it by itself; None without.
    """

    part: str
    num_bytes: int
    module: RecomputeModule | None = None
    also_requires: RecomputeModule | None = None
    alternative_module: RecomputeModule | None = None

    def is_recomputed(self, modules: frozenset[RecomputeModule]) -> bool:
        """True if it is recomputed, and so not saved, with these `modules`."""
        return self.alternative_module in modules or (
            self.module in modules and (self.also_requires is None or self.also_requires in modules)
        )


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Memory of one attention.

    Attributes:
        saved: tensors saved for the backward pass, except the input of the first projection.
        working: peak working memory of the backward pass in bytes: gradients and accumulators.
        working_recomputed: the same if its scores are recomputed.
        scores_recompute_bytes: bytes saved additionally (or fewer, if negative) then: inputs of the scores instead of
            copies.
    """

    saved: tuple[SavedTensors, ...]
    working: int
    working_recomputed: int
    scores_recompute_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTokens:
    """Tokens per micro batch on the query and key sides of an attention.

    Attributes:
        queries: tokens projected to queries.
        keys: tokens projected to keys and values.
        is_cross: cross-attention, with a separate projection for keys and values.
    """

    queries: int
    keys: int
    is_cross: bool = False


def attention_memory(
    attention: AttentionSlice,
    stack: StackSlice,
    decision: BackendSelection,
    sides: AttentionTokens,
    widths: ByteWidths,
    *,
    compiled: bool,
) -> AttentionMemory:
    """Return the memory of one attention of a layer.

    Args:
        attention: its configuration.
        stack: configuration of the stack.
        decision: backend chosen for its training calls.
        sides: tokens per micro batch.
        widths: bytes per element.
        compiled: the layer is compiled.
    """
    e = widths.compute
    q_width = attention.heads * attention.head_dim
    kv_width = attention.groups * attention.head_dim
    q_bytes, k_bytes = sides.queries * q_width * e, sides.keys * kv_width * e
    projected, transformed = _projections(attention, stack, q_bytes, k_bytes, sides)
    qk_norms = _qk_norms(stack, attention, q_bytes, k_bytes, widths, compiled=compiled)
    scores = beside_scores = freed = 0
    if decision.saves_scores:
        inputs, core, scores = _unfused(attention, decision, q_bytes, k_bytes, e, compiled=compiled)
        if attention.qk_norm and (compiled or _qk_norm_saves_input(stack, widths)):
            inputs += projected  # input of the QK norm; the copies in matmul layout are of its output
        # recomputed from q, k and v as projected, not from the copies in the layout and dtype of the matmuls
        beside_scores = projected + transformed - inputs
        freed = min(beside_scores, 0)  # these copies exist again in the backward pass
        if recomputes_from_log_sum_exp(attention, decision):
            beside_scores += sides.queries * attention.heads * 4  # log-sum-exp
            freed = scores // 2  # the gradient of the attention weights is never materialized
    else:
        inputs, core = _fused(attention, decision, e)
        if inputs is None:
            inputs = projected + transformed
        elif transformed:
            inputs += transformed
    kept = [SavedTensors("attention", inputs + qk_norms), *core, SavedTensors("attention", q_bytes)]
    if attention.head_scale:
        kept.append(SavedTensors("attention", q_bytes))
    gradients = 2 * q_bytes + 2 * k_bytes + q_bytes
    if decision.saves_scores:
        working = gradients + scores
    else:
        accumulator = sides.queries * q_width * 4 if decision.backend in _FP32_DQ_ACCUMULATOR else 0
        working = gradients + accumulator + _bias_bytes(decision)
    return AttentionMemory(tuple(each for each in kept if each.num_bytes), working, working - freed, beside_scores)


def recomputes_from_log_sum_exp(attention: AttentionSlice, decision: BackendSelection) -> bool:
    """True if recomputed scores are restored from log-sum-exps (`kernels.attention.recompute_scores`)."""
    return decision.backend == "unfused" and attention.masked_softmax_fusion and supports_call(decision.call)


def _projections(
    attention: AttentionSlice, stack: StackSlice, q_bytes: int, k_bytes: int, sides: AttentionTokens
) -> tuple[int, int]:
    """Bytes saved of the projections' outputs, and of queries and keys after rotary embedding or QK norm.

    Values are a view of the projection's output, or a copy where nothing else of that output is needed.
    """
    if attention.qk_norm:
        return q_bytes + 2 * k_bytes, q_bytes + k_bytes
    has_rotary = not sides.is_cross and stack.rotary is not None
    return (k_bytes, q_bytes + k_bytes) if has_rotary else (q_bytes + 2 * k_bytes, 0)


def _qk_norms(
    stack: StackSlice, attention: AttentionSlice, q_bytes: int, k_bytes: int, widths: ByteWidths, *, compiled: bool
) -> int:
    """Bytes that QK norms save besides their outputs."""
    if not attention.qk_norm:
        return 0
    elements = (q_bytes + k_bytes) // widths.compute
    if compiled:
        return elements // attention.head_dim * 4
    copies = 0 if _qk_norm_saves_input(stack, widths) else 1
    if stack.norm.kind == "rmsnorm":
        copies += 1  # the normalized input
    return copies * elements * 4


def _qk_norm_saves_input(stack: StackSlice, widths: ByteWidths) -> bool:
    """True if an eager QK norm saves the projection's output itself instead of an fp32 copy."""
    if widths.compute >= 4:
        return True
    return stack.norm.kind == "layernorm" and not (stack.norm.zero_centered or widths.casts_weights)


def _fused(
    attention: AttentionSlice, decision: BackendSelection, e: int
) -> tuple[int | None, tuple[SavedTensors, ...]]:
    """Bytes of inputs (None if these are the projections' outputs), and tensors saved by the fused kernel.

    The kernel saves one fp32 log-sum-exp for each row of scores.
    """
    call = decision.call
    log_sum_exp = call.batch * call.queries * attention.heads * 4
    core = (SavedTensors("attention", log_sum_exp), SavedTensors("scores", _bias_bytes(decision)))
    if decision.backend == "sdpa_efficient" and attention.groups < attention.heads:
        repeated = 2 * call.batch * call.keys * attention.heads * attention.head_dim * e
        return repeated, core  # keys and values repeated for all heads, so that the projections are not needed
    return None, core


def _bias_bytes(decision: BackendSelection) -> int:
    """Bytes of a relative position bias if the backend needs it as a dense tensor."""
    return decision.call.dense_bias_bytes if BACKENDS_BY_NAME[decision.backend].needs_dense_bias(decision.call) else 0


def _unfused(
    attention: AttentionSlice, decision: BackendSelection, q_bytes: int, k_bytes: int, e: int, *, compiled: bool
) -> tuple[int, tuple[SavedTensors, ...], int]:
    """Bytes of inputs copied to matmul layout, tensors saved by the scores, and bytes of the scores' gradients.

    The probabilities are saved once or several times. Scores with a bias or a softcap are in fp32, and so are the
    probabilities that the softmax saves then; a low-precision copy is multiplied with the values.
    """
    call, backend = decision.call, decision.backend
    pairs = call.batch * attention.heads * call.queries * call.keys
    if backend in ("sdpa_math", "reference"):  # in fp32, with keys and values repeated for all heads
        per_head = call.batch * attention.heads * attention.head_dim * 4
        inputs = per_head * (call.queries + 2 * call.keys)
        # the reference also saves the scores and, in eager mode, probabilities before and after masking empty rows
        copies = 1 if backend == "sdpa_math" else 2 if compiled else 3
        scores = pairs * (4 * copies + _dropout_mask_bytes(decision) * 5)
        return inputs, (SavedTensors("scores", scores, "core_attention"),), 8 * pairs
    needs_fp32 = call.bias_is_relative or bool(call.softcap) or not attention.masked_softmax_fusion
    probabilities = 4 if needs_fp32 and e < 4 else e
    copy = e if (needs_fp32 and e < 4) or call.dropout else 0
    capped = (e if compiled else 4) if call.softcap else 0  # the scores; in eager mode the tanh in fp32
    distances = call.queries * call.keys * 8 if call.bias_is_distance_table else 0
    scores = pairs * (probabilities + copy + capped + _dropout_mask_bytes(decision)) + distances
    return q_bytes + 2 * k_bytes, (SavedTensors("scores", scores, "core_attention"),), pairs * (e + probabilities)


def _dropout_mask_bytes(decision: BackendSelection) -> int:
    """Bytes per score of the mask of attention dropout: 1, or 0 without dropout."""
    return 1 if decision.call.dropout else 0
