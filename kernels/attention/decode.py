"""Decoding attention: one query per sequence over the keys and values of a KV cache.

A decoding step is bound by reading the cache, so its load is spread over the whole GPU: the keys of a sequence are
split among programs, each computes a partial output and its log-sum-exp, and a second kernel combines them (flash
decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). All query heads of a group share a program, which
reads the group's keys once. Sequence lengths are read on the device: a step needs no synchronization, and a CUDA graph
of it stays valid while sequences grow.
"""

# Triton resolves constexpr conditions at compile time, which type checkers do not know:
# pyrefly: ignore-errors[unbound-name]

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..custom_op import custom_op
from ..launch import INTERPRETED, jit, next_power_of_2, pdl_options, pdl_wait, rounded, tl, triton_runs_on
from .flash.portable.tile import LOG2E, dot

MAX_SPLITS = 64
"""Maximum splits of a sequence; the combining kernel loads all of them at once."""
LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
MAX_INT = (1 << 31) - 1
_MAX_TILE_KEYS = 64
"""Maximum keys of a tile."""


class DecodeInputs(NamedTuple):
    """Inputs of softmax(cap(scale * q k^T) + bias) v for one query per row over a KV cache.

    Without `lengths` the cache is a ring buffer for self-attention: slot s holds the newest token whose position is s
    modulo the number of slots, including the query's own token, and the query attends to all cached tokens. With
    `lengths` it is an encoder memory for cross-attention: slot s holds token s.

    Attributes:
        query: (rows, heads, head_dim); bf16, fp16, fp32 or fp64.
        key: (memories, groups, slots, head_dim), contiguous, dtype of `query`; query head h uses group
            h // (heads / groups). `rows` is a multiple of `memories`; consecutive rows share a memory.
        value: like `key`, of any head width, which is that of the output.
        positions: int64 (rows,), positions of the queries.
        scale: factor of the scores.
        lengths: int64 (memories,), tokens of each memory; None for self-attention.
        distance_bias: (heads, 2 R + 1), fp32 or fp64; entry [h, R + d] is added for a key at distance d (key position
            minus query position), clipped to [-R, R].
        alibi_slopes: (heads,), fp32 or fp64; -slope |d| is added.
        sinks: (heads,), fp32 or fp64; each adds exp(sink) to the denominator of its head's softmax.
        left_window: visible tokens before the query's own, -1 for all; self-attention only.
        attention_chunk: the query sees tokens of its own chunk of so many, counted from the first; 0 for one chunk;
            self-attention only.
        softcap: scaled scores become cap * tanh(score / cap); 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    scale: float
    lengths: Tensor | None = None
    distance_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    left_window: int = -1
    attention_chunk: int = 0
    softcap: float = 0.0


class Append(NamedTuple):
    """One new token per sequence, which the kernel appends to the cache before it attends.

    `DecodeInputs.query` is then its projection (rows, heads + 2 groups, head_dim): all query heads, then all key
    groups, then all value groups, before the rotary embedding. It gets the slot position % slots.

    Attributes:
        cos_sin: see `kv_append.apply_rotary_and_append_kv`.
        interleaved: likewise.
    """

    cos_sin: tuple[Tensor, Tensor, Tensor, Tensor] | None
    interleaved: bool


# ---------------------------------------------------------------- reference


def reference_decode_attention(inputs: DecodeInputs) -> Tensor:
    """Reference of `decode_attention` in plain PyTorch, for any device and floating dtype; computed in fp32 or fp64."""
    query, key, value, positions, scale, lengths, distance_bias, alibi_slopes, sinks, left_window, _, softcap = inputs
    memories, groups, slots, width = key.shape
    rows, heads, _ = query.shape
    accumulate = torch.promote_types(query.dtype, torch.float32)
    slot = torch.arange(slots, device=query.device)
    position = positions[:, None]
    if lengths is None:
        distance = -((position - slot) % slots)
        visible = -distance <= position
        if left_window >= 0:
            visible = visible & (distance >= -left_window)
        if inputs.attention_chunk:
            visible = visible & (distance >= -(position % inputs.attention_chunk))
    else:
        distance = slot - position
        visible = (slot < lengths[:, None]).repeat_interleave(rows // memories, dim=0)
    grouped = query.to(accumulate).reshape(memories, rows // memories, groups, heads // groups, width)
    scores = torch.einsum("mrghd,mgsd->mrghs", grouped, key.to(accumulate)).reshape(rows, heads, slots) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        scores = scores + distance_bias[:, distance.clamp(-reach, reach) + reach].transpose(0, 1).to(accumulate)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None].to(accumulate) * distance.abs()[:, None]
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    empty = ~visible.any(dim=1)[:, None, None]
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(accumulate)[:, None].expand(rows, heads, 1)), dim=-1)
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)[..., :slots]
    # unused slots may hold anything, including NaN
    used = visible.view(memories, -1, slots).any(dim=1)[:, None, :, None]
    weights = weights.view(memories, rows // memories, groups, heads // groups, slots)
    context = torch.einsum("mrghs,mgsd->mrghd", weights, torch.where(used, value, 0).to(accumulate))
    return context.reshape(rows, heads, value.shape[3]).to(query.dtype)


# ---------------------------------------------------------------- Triton


@jit
def load_rotated(
    head_pointers, channel, mask, cosine_pointer, sine_pointer, angle, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return channels of heads after the rotary embedding of the first 2 HALF, whose angles start at `angle`."""
    values = tl.load(head_pointers + channel, mask=mask, other=0.0)
    if HALF > 0:
        rotated = channel < 2 * HALF
        if INTERLEAVED:
            pair, first = channel // 2, channel % 2 == 0
            other_channel = tl.where(first, channel + 1, channel - 1)
        else:
            pair, first = channel % HALF, channel < HALF
            other_channel = tl.where(first, channel + HALF, channel - HALF)
        cosine = tl.load(cosine_pointer + angle + pair, mask=rotated, other=1.0)
        sine = tl.load(sine_pointer + angle + pair, mask=rotated, other=0.0)
        other = tl.load(head_pointers + other_channel, mask=mask & rotated, other=0.0)
        rotation = values.to(cosine.dtype) * cosine + tl.where(first, -sine, sine) * other.to(cosine.dtype)
        # channels without rotary embedding keep their bits: no round trip through another dtype
        values = tl.where(rotated, rounded(rotation, values.dtype), values)
    return values


@jit
def score_exponent(product, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the exponent in base 2 of scaled and capped scores."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) needs no library call and saturates at -1 and 1 without overflow
        tanh = 1.0 - 2.0 / (tl.exp2(product * (scale / softcap * 2.0 * LOG2E)) + 1.0)
        exponent = tanh * (softcap * LOG2E)
    else:
        exponent = product * (scale * LOG2E)
    return exponent


@jit
def split_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer,
    positions_pointer, lengths_pointer, distance_pointer, slopes_pointer, sinks_pointer,
    cosine_pointer, sine_pointer, key_cosine_pointer, key_sine_pointer,
    stride_qr, stride_qh, heads, groups, heads_per_group, rows_per_memory, slots, left_window, chunk, reach,
    scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_SINK: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, APPEND: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program processes the query heads of one group of one row over one of SPLITS parts of its keys.

    q: (rows, heads, HEAD_DIM). k, v: (memories, groups, slots, HEAD_DIM or VALUE_DIM). out: (rows, heads, VALUE_DIM),
    or with SPLITS > 1 fp32 (rows, heads, SPLITS, VALUE_DIM), with lse: fp32 (rows, heads, SPLITS), base 2. positions:
    int64 (rows,). lengths: int64 (memories,). distance: (heads, 2 reach + 1). slopes, sinks: (heads,).

    APPEND: q is the projection of one token per row, (rows, heads + 2 groups, HEAD_DIM), its queries, keys and values
    before the rotary embedding with the angles cosine, sine, key_cosine, key_sine: (rows, HALF). The program whose part
    contains the token's slot writes it to the cache.
    """
    pdl_wait(PDL)
    row = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    split = tl.program_id(1)
    memory = row // rows_per_memory
    position = tl.load(positions_pointer + row).to(tl.int32)
    keys = tl.load(lengths_pointer + memory).to(tl.int32) if HAS_LENGTHS else tl.minimum(position + 1, slots)
    first = 0
    if HAS_CHUNK:
        left_window = tl.minimum(left_window, position % chunk)
        # a ring buffer that has not wrapped around holds the chunk in order: skip what comes before
        first = tl.where(position < slots, position - left_window, 0)
        keys = keys - first
    split_keys = (keys + BLOCK_N * SPLITS - 1) // (BLOCK_N * SPLITS) * BLOCK_N
    begin = first + split * split_keys
    end = tl.minimum(begin + split_keys, first + keys)

    member = tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    head_mask = member < heads_per_group
    head = group * heads_per_group + member
    channel_mask = channel < HEAD_DIM
    q_row = q_pointer + row.to(tl.int64) * stride_qr
    q_mask = head_mask[:, None] & channel_mask[None, :]
    q_heads, q_channel = q_row + head[:, None] * stride_qh, channel[None, :]
    q = load_rotated(q_heads, q_channel, q_mask, cosine_pointer, sine_pointer, row * HALF, HALF, INTERLEAVED)
    if HAS_SLOPE:
        slope = tl.load(slopes_pointer + head, mask=head_mask, other=0.0).to(ACCUMULATE) * LOG2E
    cache_row = (memory.to(tl.int64) * groups + group) * slots
    value_channel = tl.arange(0, BLOCK_V)
    value_mask = value_channel < VALUE_DIM
    if APPEND:
        new_key = load_rotated(
            q_row + (heads + group) * stride_qh, channel, channel_mask, key_cosine_pointer, key_sine_pointer,
            row * HALF, HALF, INTERLEAVED,
        )  # fmt: skip
        new_value = tl.load(q_row + (heads + groups + group) * stride_qh + value_channel, mask=value_mask, other=0.0)

    maximum = tl.full((BLOCK_H,), float("-inf"), ACCUMULATE)
    total = tl.zeros((BLOCK_H,), ACCUMULATE)
    if HAS_SINK:  # the online softmax of the first part starts as if it had seen a key with this score and value 0
        sink = tl.load(sinks_pointer + head, mask=head_mask, other=0.0).to(ACCUMULATE) * LOG2E
        maximum = tl.where(split == 0, sink, maximum)
        total = tl.where(split == 0, 1.0, total)
    accumulator = tl.zeros((BLOCK_H, BLOCK_V), ACCUMULATE)
    if APPEND:  # from registers: the slot may be read before it is written
        new_slot = position % slots
        if (begin <= new_slot) & (new_slot < end):
            tl.store(k_pointer + (cache_row + new_slot) * HEAD_DIM + channel, new_key, mask=channel_mask)
            tl.store(v_pointer + (cache_row + new_slot) * VALUE_DIM + value_channel, new_value, mask=value_mask)
            own_exponent = score_exponent(
                tl.sum(q.to(ACCUMULATE) * new_key.to(ACCUMULATE)[None, :], 1), scale, softcap, HAS_SOFTCAP
            )
            if HAS_DISTANCE:
                own_bias = tl.load(distance_pointer + head * (2 * reach + 1) + reach, mask=head_mask, other=0.0)
                own_exponent += own_bias.to(ACCUMULATE) * LOG2E
            own_maximum = tl.maximum(maximum, own_exponent)
            own_weight = tl.exp2(own_exponent - own_maximum)
            total = total * tl.exp2(maximum - own_maximum) + own_weight
            accumulator += own_weight[:, None] * new_value.to(ACCUMULATE)[None, :]
            maximum = own_maximum
    for start in tl.range(begin, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        visible = slot < end
        if APPEND:
            visible = visible & (slot != new_slot)
        if HAS_LENGTHS:
            distance = slot - position
        else:
            # ring buffer: slot s holds the newest token whose position is s modulo the number of slots
            distance = -((position - slot) % slots)
            if HAS_LEFT:
                visible = visible & (distance >= -left_window)
        k_offset = cache_row * HEAD_DIM + slot[:, None] * HEAD_DIM + channel[None, :]
        v_offset = cache_row * VALUE_DIM + slot[:, None] * VALUE_DIM + value_channel[None, :]
        k = tl.load(k_pointer + k_offset, mask=visible[:, None] & channel_mask[None, :], other=0.0)
        v = tl.load(v_pointer + v_offset, mask=visible[:, None] & value_mask[None, :], other=0.0)
        product = dot(q, tl.trans(k), tl.zeros((BLOCK_H, BLOCK_N), ACCUMULATE), PRECISION)
        exponent = score_exponent(product, scale, softcap, HAS_SOFTCAP)
        if HAS_DISTANCE:
            clipped = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            bias_offset = head[:, None] * (2 * reach + 1) + clipped[None, :]
            bias = tl.load(distance_pointer + bias_offset, mask=head_mask[:, None] & visible[None, :], other=0.0)
            exponent = exponent + bias.to(ACCUMULATE) * LOG2E
        if HAS_SLOPE:
            exponent = exponent - slope[:, None] * tl.abs(distance).to(ACCUMULATE)[None, :]
        exponent = tl.where(visible[None, :], exponent, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(exponent, 1))
        # -inf until the first visible key, and -inf - -inf would be NaN
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(exponent - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weight, 1)
        accumulator = dot(rounded(weight, v.dtype), v, accumulator * rescale[:, None], PRECISION)
        maximum = new_maximum

    empty = total == 0.0
    result = accumulator / tl.where(empty, 1.0, total)[:, None]
    out_row = row.to(tl.int64) * heads + head
    if SPLITS > 1:
        lse = tl.where(empty, float("-inf"), maximum + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse_pointer + out_row * SPLITS + split, lse, mask=head_mask)
        out_row = out_row * SPLITS + split
    out_pointers = out_pointer + (out_row[:, None] * VALUE_DIM + value_channel[None, :])
    out_mask = head_mask[:, None] & value_mask[None, :]
    tl.store(out_pointers, rounded(result, out_pointer.dtype.element_ty), mask=out_mask)


@jit
def combine_kernel(
    parts_pointer, lse_pointer, out_pointer,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits; each program processes one head of one row.

    parts: fp32 (rows * heads, SPLITS, HEAD_DIM); lse: (rows * heads, SPLITS), base 2.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, BLOCK_D)
    channel_mask = channel < HEAD_DIM
    lse = tl.load(lse_pointer + row * SPLITS + split)
    maximum = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    offset = (row * SPLITS + split[:, None]) * HEAD_DIM + channel[None, :]
    parts = tl.load(parts_pointer + offset, mask=channel_mask[None, :], other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_pointer + row * HEAD_DIM + channel, rounded(result, out_pointer.dtype.element_ty), mask=channel_mask)


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU; a small constant in interpreter mode."""
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(programs: int, slots: int, processors: int) -> int:
    """Return the number of splits of the keys, a power of two: about two programs per processor, each at least a tile.

    Args:
        programs: rows * groups.
        slots: maximum number of keys.
        processors: streaming multiprocessors of the GPU.
    """
    splits = min(2 * processors // programs, -(-slots // _MAX_TILE_KEYS), MAX_SPLITS)
    return next_power_of_2(splits + 1) // 2 if splits > 1 else 1


def triton_decode_attention(inputs: DecodeInputs, splits: int | None = None, append: Append | None = None) -> Tensor:
    """Launch the kernels; `splits` is a power of two, None for the number that fills the GPU."""
    out, lse = launch_split_kernel(inputs, splits, append)
    return out if lse is None else combine(out, lse, inputs.query.dtype)


def launch_split_kernel(
    inputs: DecodeInputs, splits: int | None = None, append: Append | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the output of `decode_attention` and None, or outputs of parts of the keys and their log-sum-exp.

    Args:
        inputs: inputs of the attention; with `append` as described there.
        splits: number of parts, a power of two; None for the number that fills the GPU.
        append: the tokens that the kernel appends to the cache first; None if it contains them.

    Returns:
        The output (rows, heads, value_dim) and None; or in fp32 (fp64) the outputs of the parts, (rows, heads, splits,
        value_dim), and their log-sum-exp in base 2, (rows, heads, splits).
    """
    query, key, value, positions, scale, lengths, distance_bias, alibi_slopes, sinks, left_window, chunk, softcap = (
        inputs
    )
    rows, heads, head_dim = query.shape
    memories, groups, slots, _ = key.shape
    heads -= 0 if append is None else 2 * groups
    value_dim = value.shape[3]
    tables = (None,) * 4 if append is None or append.cos_sin is None else append.cos_sin
    cosine, sine, key_cosine, key_sine = (None if table is None else table.contiguous() for table in tables)
    accumulate = torch.promote_types(query.dtype, torch.float32)
    if splits is None:
        splits = num_splits(rows * groups, slots, _multiprocessors(query.device))
    query = query if query.stride(-1) == 1 else query.contiguous()
    parts, lse = query.new_empty(rows, heads, value_dim), None
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, value_dim, dtype=accumulate)
        lse = query.new_empty(rows, heads, splits, dtype=accumulate)
    exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    block_d, block_v = (max(16, next_power_of_2(width)) for width in (head_dim, value_dim))
    split_kernel[(rows * groups, splits)](
        q_pointer=query,
        k_pointer=key,
        v_pointer=value,
        out_pointer=parts,
        lse_pointer=lse,
        positions_pointer=positions,
        lengths_pointer=lengths,
        distance_pointer=None if distance_bias is None else distance_bias.contiguous(),
        slopes_pointer=None if alibi_slopes is None else alibi_slopes.contiguous(),
        sinks_pointer=None if sinks is None else sinks.contiguous(),
        cosine_pointer=cosine,
        sine_pointer=sine,
        key_cosine_pointer=key_cosine,
        key_sine_pointer=key_sine,
        stride_qr=query.stride(0),
        stride_qh=query.stride(1),
        heads=heads,
        groups=groups,
        heads_per_group=heads // groups,
        rows_per_memory=rows // memories,
        slots=slots,
        left_window=MAX_INT if left_window < 0 else left_window,
        chunk=chunk,
        reach=0 if distance_bias is None else distance_bias.shape[1] // 2,
        scale=scale,
        softcap=softcap,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        VALUE_DIM=value_dim,
        BLOCK_V=block_v,
        BLOCK_H=max(16, next_power_of_2(heads // groups)),
        BLOCK_N=keys_per_tile(max(head_dim, value_dim), query.dtype),
        SPLITS=splits,
        HAS_LENGTHS=lengths is not None,
        HAS_LEFT=left_window >= 0 or chunk > 0,
        HAS_CHUNK=chunk > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_DISTANCE=distance_bias is not None,
        HAS_SLOPE=alibi_slopes is not None,
        HAS_SINK=sinks is not None,
        ACCUMULATE=tl.float64 if accumulate == torch.float64 else tl.float32,
        PRECISION="ieee" if exact else "tf32",
        APPEND=append is not None,
        HALF=0 if cosine is None else cosine.shape[1],
        INTERLEAVED=append is not None and append.interleaved,
        **LAUNCH_OPTIONS,
        **pdl_options(query.device),
        num_stages=2,
    )
    return parts, lse


def combine(parts: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Combine what `launch_split_kernel` returns to the output (rows, heads, value_dim) of `dtype`."""
    rows, heads, splits, value_dim = parts.shape
    out = parts.new_empty(rows, heads, value_dim, dtype=dtype)
    combine_kernel[(rows * heads,)](
        parts,
        lse,
        out,
        HEAD_DIM=value_dim,
        BLOCK_D=max(16, next_power_of_2(value_dim)),
        SPLITS=splits,
        **LAUNCH_OPTIONS,
        **pdl_options(parts.device),
    )
    return out


def keys_per_tile(width: int, dtype: torch.dtype) -> int:
    """Return the keys per tile for heads of `width`, so that two stages of keys and values fit into 99 KB."""
    wide_head, wide_dtype = width > 128, dtype.itemsize >= 4
    if wide_head and wide_dtype:
        return 16
    return _MAX_TILE_KEYS // 2 if wide_head or wide_dtype else _MAX_TILE_KEYS


# ---------------------------------------------------------------- operation


@custom_op(
    "stoker::decode_attention",
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor positions, float scale, Tensor? lengths, "
        "Tensor? distance_bias, Tensor? alibi_slopes, Tensor? sinks, SymInt left_window, "
        "SymInt attention_chunk, float softcap) -> Tensor"
    ),
)
def _decode_attention(*fields: Tensor | float | None) -> Tensor:
    return triton_decode_attention(DecodeInputs._make(fields))


@torch.library.register_fake("stoker::decode_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[3])


# ---------------------------------------------------------------- public function


def decode_attention(inputs: DecodeInputs) -> Tensor:
    """Compute attention of one query per row over a KV cache; no gradient.

    Returns:
        Like `query`, with the head width of `value`. A fully masked row has output 0; unused slots have no effect, even
        if they hold NaN.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    _check(inputs)
    return _decode_attention(*inputs) if triton_runs_on(inputs.query) else reference_decode_attention(inputs)


def _check(inputs: DecodeInputs) -> None:
    query, key, value, positions, _, lengths, distance_bias, _, _, left_window, chunk, _ = inputs
    if query.ndim != 3 or not query.is_floating_point():
        raise ValueError(f"`query` {tuple(query.shape)} of {query.dtype} must be (rows, heads, head_dim), floating.")
    rows, heads, head_dim = query.shape
    if key.ndim != 4 or key.shape[3] != head_dim or heads % key.shape[1] or rows % key.shape[0]:
        raise ValueError(
            f"`key` {tuple(key.shape)} must be (memories, groups, slots, {head_dim}), memories dividing the {rows} "
            f"rows and groups the {heads} heads of `query`."
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[:-1] != key.shape[:-1] or tensor.dtype != query.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"`{name}` {tuple(tensor.shape)} of {tensor.dtype} must be {(*key.shape[:3], 'width')} of "
                f"{query.dtype}, contiguous."
            )
    for name, tensor, length in (("positions", positions, rows), ("lengths", lengths, key.shape[0])):
        if tensor is not None and (tensor.shape != (length,) or tensor.dtype != torch.int64):
            raise ValueError(f"`{name}` {tuple(tensor.shape)} of {tensor.dtype} must be ({length},) of torch.int64.")
    if distance_bias is not None and (distance_bias.ndim != 2 or len(distance_bias) != heads):
        raise ValueError(f"`distance_bias` {tuple(distance_bias.shape)} must be ({heads}, 2 R + 1).")
    for name, per_head in (("alibi_slopes", inputs.alibi_slopes), ("sinks", inputs.sinks)):
        if per_head is not None and per_head.shape != (heads,):
            raise ValueError(f"`{name}` {tuple(per_head.shape)} must be ({heads},).")
    if left_window >= 0 and lengths is not None:
        raise ValueError(f"`left_window` ({left_window}) must be -1 with `lengths`: cross-attention has no window.")
    if chunk < 0 or (chunk and lengths is not None):
        raise ValueError(f"`attention_chunk` ({chunk}) must be 0, for one chunk, or positive without `lengths`.")
