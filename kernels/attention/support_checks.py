"""Limits that several attention backends share; see `backend_support.py`."""

from __future__ import annotations

from .call_spec import AttentionCall

MIN_SM: tuple[int, int] = (8, 0)
MAX_SM: tuple[int, int] = (12, 1)  # architectures that PyTorch builds its flash and cuDNN kernels for


def format_version(version: tuple[int, ...]) -> str:
    """Format a version: (2, 11) as 2.11."""
    return ".".join(map(str, version))


def architecture(call: AttentionCall) -> str:
    """Return the architecture of the call's GPU, as sm_90."""
    major, minor = call.capability or (0, 0)
    return f"sm_{major}{minor}"


def why_not_on_gpu(call: AttentionCall) -> str | None:
    """Require a CUDA device and dtype with the 16-bit tensor cores that the fast kernels are written for."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not MIN_SM <= call.capability <= MAX_SM:
        return f"needs sm_80 to sm_121, not {architecture(call)}"
    if call.dtype not in ("bf16", "fp16"):
        return f"supports bf16 and fp16, not {call.dtype}"
    return None


def why_not_flash_2_head_dim(call: AttentionCall) -> str | None:
    """Check the head width for FlashAttention 2, which PyTorch's flash backend is as well."""
    if call.has_other_values:
        return f"supports value heads of the keys' width ({call.head_dim}) only, not {call.value_dim}"
    if call.head_dim > 256:
        return f"supports head widths up to 256, not {call.head_dim}"
    sm = call.capability or MIN_SM
    little_shared_memory = (8, 6) <= sm <= (8, 9) or sm >= (12, 0)
    if little_shared_memory and call.training and call.head_dim > 192 and (call.dropout or call.head_dim <= 224):
        return f"has no backward pass for head width {call.head_dim} on {architecture(call)}"
    return None
