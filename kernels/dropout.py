"""Dropout whose mask is a hash of a key, the row and the channel, so that each rank draws its slice of the whole mask.

Nothing is drawn from an RNG state and no mask is saved: the backward pass and recomputation regenerate it, and a rank
that holds some of the rows or channels passes their places in the whole tensor (counter-based random numbers, Salmon et
al., SC 2011). The hash is two rounds of a 32-bit finalizer with little bias (`lowbias32`, C. Wellons, 2018), keyed by
two words for each row. Compiled layers trace the plain operations, which the compiler fuses with their neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .launch import jit, next_power_of_2, tl, triton, triton_runs_on

_SECOND = 0x3C6EF372  # tells the second word of a derived key from the first
_TILE, _MIN_BLOCK, _MAX_BLOCK = 2048, 256, 1024


def dropout_threshold(p: float) -> int:
    """Return the int32 threshold below which a random word means that its element is dropped."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def draw_keys(*shape: int, device: torch.device) -> Tensor:
    """Draw keys, int64 (*shape, 2), from the default generator of the device."""
    return torch.randint(-(2**31), 2**31, (*shape, 2), dtype=torch.int64, device=device)


# ---------------------------------------------------------------- reference


def _mixed(word: Tensor) -> Tensor:
    """Mix the bits of int32 words, a bijection; masks make the arithmetic shifts logical."""
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * 0x7FEB352D
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * (0x846CA68B - 2**32)
    return word ^ ((word >> 16) & 0xFFFF)


def _random_word(low: Tensor, high: Tensor, number: Tensor) -> Tensor:
    return _mixed(_mixed(number + low) ^ high)


def _derived_key(low: Tensor, high: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    return _random_word(low, high, number), _random_word(high ^ _SECOND, low, number)


def _row_keys(key: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _derived_key(key[0], key[1], (rows >> 32).to(torch.int32))
    return _derived_key(low, high, rows.to(torch.int32))


def keep_mask(key: Tensor, rows: Tensor, channels: int, p: float) -> Tensor:
    """Return the keep mask of rows, in plain PyTorch.

    Args:
        key: int64 (2,), of which the low 32 bits count; or (3,), with the place of the first channel.
        rows: int64 (R,), place of each row in the whole tensor.
        channels: number of channels.
        p: probability of dropping an element.

    Returns:
        bool (R, channels), True for kept elements.
    """
    words = key.to(torch.int32)
    low, high = _row_keys(words, rows)
    channel = torch.arange(channels, dtype=torch.int32, device=rows.device)
    channel = channel if len(key) == 2 else channel + words[2]
    return _random_word(low[:, None], high[:, None], channel) >= dropout_threshold(p)


def uniform_noise(key: Tensor, rows: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Return numbers uniform from -1 to 1, (R, channels), of the same random words as `keep_mask`, without gradient."""
    low, high = _row_keys(key.to(torch.int32), rows)
    channel = torch.arange(channels, dtype=torch.int32, device=rows.device)
    return _random_word(low[:, None], high[:, None], channel).to(dtype) * 2.0**-31


def derived_rows(key: Tensor, rows: Tensor) -> Tensor:
    """Return hashes of rows under a key, int64, places that need no key: of rows that move to ranks with other keys."""
    low, high = _row_keys(key.to(torch.int32), rows)
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)


def reference_dropout(values: Tensor, residual: Tensor | None, key: Tensor, rows: Tensor, p: float) -> Tensor:
    """Return `residual` + `values` with dropped elements at 0 and the others scaled."""
    if torch.compiler.is_compiling():  # an annotation: the backward graph recomputes the mask
        mask = checkpoint(keep_mask, key, rows, values.shape[-1], p, use_reentrant=False, preserve_rng_state=False)
    else:
        mask = keep_mask(key, rows, values.shape[-1], p)
    kept = mask.view(values.shape)
    dropped = torch.where(kept, values * (1 / (1 - p)), 0.0)
    return dropped if residual is None else residual + dropped


# ---------------------------------------------------------------- Triton


@jit
def _mixed_word(word):
    """`_mixed` for uint32."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@jit
def random_word(low, high, number):
    """Return the random words (int32) of `number`, uint32, under a key of two uint32 words."""
    return _mixed_word(_mixed_word(number + low) ^ high).to(tl.int32, bitcast=True)


@jit
def derived_key(low, high, number):
    """Return the key of `number`, uint32, under a key of two uint32 words."""
    second = _mixed_word(_mixed_word(number + (high ^ 0x3C6EF372)) ^ low)
    return _mixed_word(_mixed_word(number + low) ^ high), second


@jit
def _dropout_kernel(
    values_pointer, residual_pointer, out_pointer, key_pointer, rows_pointer, rows, channels, threshold, scale,
    HAS_RESIDUAL: tl.constexpr, HAS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS rows and BLOCK channels per program. values, residual, out: (rows, channels)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(rows_pointer + row, mask=row < rows, other=0)
    low, high = tl.load(key_pointer).to(tl.uint32), tl.load(key_pointer + 1).to(tl.uint32)
    low, high = derived_key(low, high, (place >> 32).to(tl.uint32))
    low, high = derived_key(low, high, place.to(tl.uint32))
    number = channel.to(tl.uint32)
    if HAS_FIRST:
        number += tl.load(key_pointer + 2).to(tl.uint32)
    kept = random_word(low[:, None], high[:, None], number[None, :]) >= threshold
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    result = tl.where(kept, tl.load(values_pointer + offset, mask=inside, other=0.0).to(tl.float32) * scale, 0.0)
    if HAS_RESIDUAL:
        result += tl.load(residual_pointer + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_pointer + offset, result.to(out_pointer.dtype.element_ty), mask=inside)


def launch_dropout(
    values: Tensor, residual: Tensor | None, key: Tensor, rows: Tensor, p: float, *, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel; return its result in `dtype`."""
    channels, out = values.shape[-1], torch.empty(values.shape, dtype=dtype, device=values.device)
    if not out.numel():
        return out
    block = next_power_of_2(channels)
    if block > _MIN_BLOCK:  # of the usual widths a divisor, so that no program is partly idle
        block = min(max(channels & -channels, _MIN_BLOCK), _MAX_BLOCK)
    tile = _TILE // block
    _dropout_kernel[triton.cdiv(len(rows), tile), triton.cdiv(channels, block)](
        values.contiguous(), None if residual is None else residual.contiguous(), out, key.contiguous(),
        rows.contiguous(), len(rows), channels, dropout_threshold(p), 1 / (1 - p),
        HAS_RESIDUAL=residual is not None, HAS_FIRST=len(key) > 2, ROWS=tile, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- autograd


def _compute(
    values: Tensor, residual: Tensor | None, key: Tensor, rows: Tensor, p: float, dtype: torch.dtype
) -> Tensor:
    if triton_runs_on(values):
        return launch_dropout(values, residual, key, rows, p, dtype=dtype)
    return reference_dropout(values, residual, key, rows, p).to(dtype)


class _Dropout(torch.autograd.Function):
    """Saves the key and the places of the rows only."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, residual: Tensor | None, key: Tensor, rows: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(key, rows)
        ctx.p, ctx.dtype = p, values.dtype
        ctx.residual_dtype = dtype = values.dtype if residual is None else residual.dtype
        return _compute(values, residual, key, rows, p, torch.promote_types(values.dtype, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        key, rows = ctx.saved_tensors
        needs_values, needs_residual = ctx.needs_input_grad[:2]
        values_gradient = _compute(gradient, None, key, rows, ctx.p, ctx.dtype) if needs_values else None
        return values_gradient, gradient.to(ctx.residual_dtype) if needs_residual else None, None, None, None


# ---------------------------------------------------------------- public function


def dropout(values: Tensor, p: float, key: Tensor, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return `values` with elements dropped with probability p and the others scaled by 1 / (1 - p).

    The mask is a function of `key` and the places of row and channel.

    Args:
        values: (..., channels), R rows; computed in fp32 on a GPU, except fp64.
        p: probability, at least 0 and below 1.
        key: int64 (2,) from `draw_keys`, another for each call that shall have another mask; or (3,), with the place
            of the first channel in the whole tensor.
        rows: int64 (R,), place of each row in the whole tensor.
        residual: tensor like `values` that the result is added to, which saves a pass over memory; None without.

    Returns:
        Shaped like `values`, in its dtype, or with `residual` in the wider of both; differentiable once on a GPU.

    Raises:
        ValueError: `p` is out of range, or `rows` does not match.
    """
    if not 0 <= p < 1:
        raise ValueError(f"`p` ({p}) must be at least 0 and less than 1.")
    if rows.shape[0] * values.shape[-1] != values.numel():
        raise ValueError(f"`rows` ({rows.shape[0]}) must be the places of the rows of {tuple(values.shape)}.")
    if torch.compiler.is_compiling():  # the partitioner recomputes the mask, which depends on nothing that is large
        return reference_dropout(values, residual, key, rows, p)
    return _Dropout.apply(values, residual, key, rows, p)
