"""Cost of the core of an attention (scores and weighted values) by backend: FLOPs, and what its backward pass needs.

The main difference between backends is whether they save the scores of shape (batch, heads, queries, keys).
"""

from __future__ import annotations

from typing import NamedTuple

from ...kernels.attention.backend_support import BACKENDS_BY_NAME, accumulates_dq
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.recompute_scores import supports_call
from ..config.dense_stack import AttentionSlice


class CoreMemory(NamedTuple):
    """Memory of the core of an attention, in bytes per micro batch.

    Attributes:
        inputs: saved copies of queries, keys and values; None if it saves these as projected.
        output: saved copy of the output; 0 if it saves the output itself, or none.
        log_sum_exp: saved log-sum-exps of the scores.
        scores: saved scores, or bias of the scores.
        working: working memory of the backward pass besides the gradients of its inputs.
    """

    inputs: int | None
    log_sum_exp: int
    scores: int
    working: int
    output: int = 0

    def shared_by(self, ranks: int) -> CoreMemory:
        """Return the share of one of these context-parallel ranks, each with its queries or its heads."""
        inputs = None if self.inputs is None else self.inputs // ranks
        others = self.log_sum_exp, self.scores, self.working, self.output
        return CoreMemory(inputs, *(each // ranks for each in others))


def attended_pairs(attention: AttentionSlice, queries: int, keys: int) -> float:
    """Return the (query, key) pairs that are not masked in one sample; a causal mask counts half of all pairs."""
    if attention.causal:
        left = -1 if attention.window is None else attention.window[0]
        width = keys if left < 0 else min(left + 1, keys)
        return queries * (2 * width - width**2 / keys) / 2
    pairs = float(queries * keys)
    for side in attention.window or ():
        beyond = keys - 1 - side if 0 <= side < keys else 0
        pairs -= beyond * (beyond + 1) / 2
    return pairs


def recomputes_from_log_sum_exp(attention: AttentionSlice, decision: BackendSelection) -> bool:
    """True if recomputed scores are restored from log-sum-exps (`kernels.attention.recompute_scores`)."""
    return decision.backend == "unfused" and attention.masked_softmax_fusion and supports_call(decision.call)


def core_memory(attention: AttentionSlice, decision: BackendSelection, itemsize: int, *, compiled: bool) -> CoreMemory:
    """Return the memory of the core of an attention with operands of `itemsize` bytes."""
    if decision.saves_scores:
        return _unfused(attention, decision, itemsize, compiled=compiled)
    call = decision.call
    bias = call.dense_bias_bytes if BACKENDS_BY_NAME[decision.backend].needs_dense_bias(call) else 0
    accumulator = call.batch * call.queries * attention.heads * attention.head_dim * 4
    inputs, output = None, 0
    if call.fp8:  # gradients and those of the inputs leave the kernels in fp8
        output = call.batch * call.queries * attention.heads * attention.head_dim
        inputs = output + 2 * call.batch * call.keys * attention.groups * attention.head_dim
        accumulator += inputs + output
    elif decision.backend == "sdpa_efficient" and attention.groups < attention.heads:
        # keys and values repeated for all heads, so that the projections are not needed
        inputs = 2 * call.batch * call.keys * attention.heads * attention.head_dim * itemsize
    return CoreMemory(
        inputs=inputs,
        log_sum_exp=call.batch * call.queries * attention.heads * 4,
        scores=bias,
        working=bias + (accumulator if accumulates_dq(decision.backend, call) else 0),
        output=output,
    )


def _unfused(attention: AttentionSlice, decision: BackendSelection, itemsize: int, *, compiled: bool) -> CoreMemory:
    """Return the memory of attention that saves its scores, once or several times.

    Scores with a bias or a softcap are in fp32, and so are the probabilities that the softmax saves then; a
    low-precision copy is multiplied with the values.
    """
    call, backend, e = decision.call, decision.backend, itemsize
    pairs = call.batch * attention.heads * call.queries * call.keys
    if backend in ("sdpa_math", "reference"):  # in fp32, with keys and values repeated for all heads
        per_head = call.batch * attention.heads * attention.head_dim * 4
        inputs = per_head * (call.queries + 2 * call.keys)
        # the reference also saves the scores and, in eager mode, probabilities before and after masking empty rows
        copies = 1 if backend == "sdpa_math" else 2 if compiled else 3
        masked = 5 if call.dropout else 0  # a mask, and what it leaves
        return CoreMemory(inputs, 0, pairs * (4 * copies + masked), 8 * pairs)
    needs_fp32 = call.bias_is_relative or bool(call.softcap) or not attention.masked_softmax_fusion
    probabilities = 4 if needs_fp32 and e < 4 else e
    copy = e if (needs_fp32 and e < 4) or call.dropout else 0
    capped = (e if compiled else 4) if call.softcap else 0  # the scores; in eager mode the tanh in fp32
    distances = call.queries * call.keys * 8 if call.bias_is_distance_table else 0
    rows = call.queries * attention.heads + 2 * call.keys * attention.groups
    return CoreMemory(
        inputs=call.batch * rows * attention.head_dim * e,
        log_sum_exp=0,
        scores=pairs * (probabilities + copy + capped) + distances,
        working=pairs * (e + probabilities),
    )
