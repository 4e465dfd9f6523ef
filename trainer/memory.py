"""Whether a run can fit at all: a lower bound of its memory in closed form, before anything is built."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from ..models.build import plan_gpt
from ..models.config.counting import count_parameters
from ..models.config.slices import gpt_slice
from .config.schema import RootBlock
from .data.build import sequence_length
from .determinism import attention_flags
from .distributed.layout import DataLayout
from .errors import UserError
from .feed import BATCHES_AHEAD
from .optim.build import count_state
from .precision import PrecisionPlan

_GIB = 2**30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(
    root: RootBlock, precision: PrecisionPlan, device: torch.device, layout: DataLayout | None = None
) -> None:
    """Refuse a run that needs more memory than its device, or its host, has.

    The bound holds for any run: weights, gradients and the optimizer's state; the input of each layer, which the
    backward pass needs; the mask that keeps packed documents apart; the prepared batches. A run that passes may still
    be too large.

    Args:
        root: the keys.
        precision: of the run.
        device: of this process.
        layout: what each process holds; None for one process.

    Raises:
        UserError: it cannot fit; names the keys that decide it.
    """
    keys = root.model
    length = sequence_length(root)
    parameters = count_parameters(keys, keys.override_vocab_size or 1)
    rotary = gpt_slice(keys, vocab_size=keys.override_vocab_size or 1).stack.rotary
    table = rotary.positions * rotary.dim * 4 if rotary else 0
    width = precision.weights.itemsize
    main = 4 if precision.main_weights else 0
    kept = count_state(keys, keys.override_vocab_size or 1)
    average = root.exp_manager.ema
    averaged = parameters * max(width, 4) if average.enable and not average.cpu_offload else 0
    shards = layout.shards if layout else 1
    ranks = layout.replicas * shards if layout else 1
    weights = parameters * 2 * width // (1 if layout is None or layout.whole_weights else shards)
    state = weights + (parameters * main + kept * (main or width) + averaged) // shards + table
    narrow = (precision.autocast or precision.weights).itemsize
    activations = keys.micro_batch_size * length * keys.hidden_size * keys.num_layers * narrow
    mask = _mask_bytes(root, precision, device)
    numbered = keys.data.reset_attention_mask or keys.data.reset_position_ids
    batches = keys.global_batch_size // ranks * length * (2 * 8 + 4 * numbered) * BATCHES_AHEAD
    host = host_memory()
    if host is not None:
        host //= max(1, ranks // root.trainer.num_nodes)
    available = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    each = " in each process" if ranks > 1 else ""
    for need, has, what, names in (
        (
            state,
            available,
            f"{parameters:,} parameters with their gradients and optimizer state need{each}",
            "num_layers hidden_size ffn_hidden_size encoder_seq_length max_position_embeddings override_vocab_size "
            "make_vocab_size_divisible_by",
        ),
        (
            state + activations,
            available,
            "the model and the activations of one micro batch need",
            "micro_batch_size encoder_seq_length num_layers hidden_size",
        ),
        (
            state + activations + mask,
            available,
            "the model, the activations of one micro batch and the mask of `data.reset_attention_mask` need",
            "micro_batch_size encoder_seq_length",
        ),
        (batches, host, "the batches prepared ahead need", "global_batch_size encoder_seq_length"),
    ):
        if has is not None and need > has:
            values = ", ".join(f"`{name}` ({value})" for name in names.split() if (value := getattr(keys, name)))
            raise UserError(
                [
                    f"out of memory: {what} at least {need / _GIB:,.1f} GiB, of {has / _GIB:,.1f} GiB there are",
                    f"    it follows from {values} below `model`; use smaller ones",
                ]
            )


def _mask_bytes(root: RootBlock, precision: PrecisionPlan, device: torch.device) -> int:
    """Bytes of the mask that keeps packed documents apart, 0 where the attention backends need none."""
    if not root.model.data.reset_attention_mask:
        return 0
    try:
        decisions, _ = plan_gpt(
            gpt_slice(root.model, vocab_size=1),
            device=device,
            dtype=precision.autocast or precision.weights,
            flags=attention_flags(root),
            micro_batch_size=root.model.micro_batch_size,
            seq_length=sequence_length(root),
            packed=True,
        )
    except ValueError:  # no backend may run, which is told next, with its reasons
        return 0
    return max(decision.mask_bytes for decision in decisions.values())


def host_memory() -> int | None:
    """Bytes of memory this process may use: the machine's, or its container's limit; None where unknown."""
    limits: list[int] = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max` is no number: no limit
            limits.append(int(Path(path).read_text()))
    return min(limits, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, as Python, numpy or torch tell it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in said or "out of memory" in said)
