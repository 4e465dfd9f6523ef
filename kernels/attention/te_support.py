"""Limits of TransformerEngine's attention backends and of flash-attn, see `backend_support.py`.

They are those of TransformerEngine's backend selection (transformer_engine/pytorch/attention/dot_product_attention/
utils.py, 2.20) and of flash-attn's README.
"""

from __future__ import annotations

from .call_spec import AttentionCall, InstalledSoftware
from .support_checks import MIN_SM, architecture, format_version, why_not_flash_2_head_dim, why_not_on_gpu

MIN_TE, TE_UPPER_BOUND = (2, 18), (3, 0)  # 2.18 brought NVTE_FLASH_ATTN_V2, _V3 and _V4
MIN_TE_FP8 = (2, 20)  # first release whose quantizers, GEMM and fp8 attention are known to take these arguments
MIN_FLASH_ATTN, FLASH_ATTN_UPPER_BOUND = (2, 7, 3), (2, 9, 0)  # 2.7.3 brought Blackwell; TransformerEngine needs it too
INSTALL_TE = "pip install 'stoker[te]'"
INSTALL_FLASH_ATTN = "pip install 'stoker[flash]'"


def why_not_te(installed: InstalledSoftware) -> str | None:
    """Return why TransformerEngine cannot be used for any call, or None."""
    if installed.te is None:
        return f"TransformerEngine is not installed ({INSTALL_TE})"
    if not MIN_TE <= installed.te < TE_UPPER_BOUND:
        supported = f"from {format_version(MIN_TE)} up to {format_version(TE_UPPER_BOUND)}"
        return f"needs TransformerEngine {supported}, found {format_version(installed.te)}"
    return installed.te_problem or None


def _why_not_in_te(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if reason := why_not_te(installed):
        return reason
    if call.padding:
        return "TransformerEngine supports padding as lengths only, not as an arbitrary mask"
    if call.has_other_values:
        return "stoker calls TransformerEngine with one head width for keys and values"
    if call.attention_chunk:
        return "TransformerEngine does not support chunked attention"
    if call.sinks:
        return "TransformerEngine supports attention sinks only as a parameter of its own module"
    return "TransformerEngine supports a softcap in some versions only" if call.softcap else None


def why_not_te_fused(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check cuDNN's fused attention through TransformerEngine."""
    if reason := _why_not_in_te(call, installed) or why_not_on_gpu(call):
        return reason
    if call.fp8:
        return _why_not_te_fp8(call, installed)
    cudnn, sm = installed.cudnn or 0, call.capability or MIN_SM
    needed = 90700 if sm >= (10, 0) else 90300
    if cudnn < needed or cudnn in (91000, 91001):
        return f"needs cuDNN {needed} or later and neither 91000 nor 91001, found {installed.cudnn or 'none'}"
    widest = 256 if sm == (9, 0) and cudnn >= 90500 else 128
    if call.head_dim > widest or call.head_dim % 8:
        return f"supports head widths up to {widest} that are multiples of 8, not {call.head_dim}"
    if call.causal and call.queries > call.keys:
        return f"does not support a causal mask over more queries ({call.queries}) than keys ({call.keys})"
    if call.causal and call.queries != call.keys:
        if cudnn < 90700:
            return f"needs cuDNN 90700 for a causal mask over unequal lengths, found {cudnn}"
        if call.dropout or call.bias != "none":
            return "supports a causal mask over unequal lengths only without dropout and without bias"
    return _why_not_te_fused_options(call, cudnn, sm)


def _why_not_te_fused_options(call: AttentionCall, cudnn: int, sm: tuple[int, int]) -> str | None:
    """Check windows, packed documents, biases and determinism for `te_fused`."""
    if call.window is not None:
        if call.dropout or call.bias != "none" or call.queries > call.keys:
            return "supports a window only without dropout, without bias and with no more queries than keys"
        if call.window[1] > 0 and cudnn < 90600:
            return f"needs cuDNN 90600 for a window to the right, found {cudnn}"
    if call.packed:
        if call.bias != "none":
            return "does not support a bias with packed documents"
        if sm < (9, 0) or cudnn < 90600:
            return f"supports packed documents from sm_90 and cuDNN 90600 on, not {architecture(call)} and {cudnn}"
        if sm >= (12, 0) and cudnn < 91801:
            return f"needs cuDNN 91801 for packed documents on {architecture(call)}, found {cudnn}"
    if call.training and call.deterministic:
        if sm < (9, 0) or sm >= (12, 0):
            return f"its backward pass is not deterministic on {architecture(call)}"
        if call.bias_requires_grad:
            return "its gradient of a bias is not deterministic"
        if sm >= (10, 0) and (cudnn < 91801 or call.dropout or call.bias != "none"):
            where = architecture(call)
            return f"its backward pass is deterministic on {where} from cuDNN 91801 on, without dropout and bias"
        max_documents = call.batch * call.queries  # the actual number is known on the device only
        if call.packed and max_documents * call.heads * call.queries * call.keys >= 1 << 30:
            return "its deterministic backward pass needs too much workspace for this many packed tokens"
    return None


def _why_not_te_fp8(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check `te_fused` in fp8, forward and backward (common/fused_attn/fused_attn.cpp)."""
    cudnn, sm = installed.cudnn or 0, call.capability or MIN_SM
    if installed.te is not None and installed.te < MIN_TE_FP8:
        needed, found = map(format_version, (MIN_TE_FP8, installed.te))
        return f"needs TransformerEngine {needed} for fp8, found {found}"
    if not (9, 0) <= sm < (12, 0):
        return f"multiplies in fp8 on sm_90 to sm_110 (Hopper, Blackwell of data centers), not {architecture(call)}"
    if cudnn < 90700 or cudnn == 91000:
        return f"needs cuDNN 90700 or later and not 91000 for fp8, found {installed.cudnn or 'none'}"
    if call.head_dim != 128 and (sm < (10, 0) or call.head_dim > 128 or call.head_dim % 16):
        widths = "heads 128 wide" if sm < (10, 0) else "head widths up to 128 that are multiples of 16"
        return f"supports {widths} in fp8 on {architecture(call)}, not {call.head_dim}"
    options = {
        "a bias": call.bias != "none",
        "packed documents": call.packed,
        "a window": call.window is not None,
        "dropout": bool(call.dropout),
        "a causal mask over unequal lengths": call.causal and call.queries != call.keys,
    }
    if unsupported := [name for name, used in options.items() if used]:
        return f"does not support {' or '.join(unsupported)} in fp8"
    if call.deterministic and cudnn < (needed := 91900 if sm < (10, 0) else 91800):
        return f"its backward pass in fp8 is deterministic from cuDNN {needed} on, found {cudnn}"
    return None


def _why_not_flash_kernels(call: AttentionCall) -> str | None:
    if reason := why_not_on_gpu(call):
        return reason
    if call.head_dim % 8:
        return f"supports head widths that are multiples of 8, not {call.head_dim}"
    return None


def why_not_te_flash(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check the flash-attn packages through TransformerEngine, which prefers versions 4 and 3 over 2."""
    if reason := _why_not_in_te(call, installed) or _why_not_flash_kernels(call):
        return reason
    if call.bias != "none":
        return "does not support a bias"
    sm, head_dim = call.capability or MIN_SM, call.head_dim
    newer = (installed.flash_attn_3 and sm == (9, 0)) or (installed.flash_attn_4 and sm >= (9, 0))
    too_wide = head_dim > 256 or (head_dim == 256 and call.deterministic and call.training)
    if newer and not call.dropout and not too_wide:
        return None
    if reason := _why_not_flash_2_in_te(call, installed, sm):
        unsupported = "dropout" if call.dropout else f"head width {head_dim} here"
        return (f"FlashAttention 3 and 4 do not support {unsupported}; " if newer else "") + reason
    return None


def _why_not_flash_2_in_te(call: AttentionCall, installed: InstalledSoftware, sm: tuple[int, int]) -> str | None:
    if installed.flash_attn is None:
        return f"flash-attn is not installed ({INSTALL_FLASH_ATTN})"
    if not MIN_FLASH_ATTN <= installed.flash_attn < (2, 8, 4):
        return f"TransformerEngine supports flash-attn 2.7.3 to 2.8.3, found {format_version(installed.flash_attn)}"
    if 192 < call.head_dim <= 256 and sm not in ((8, 0), (9, 0), (10, 0), (12, 0)):
        return f"supports head widths up to 192 on {architecture(call)}, not {call.head_dim}"
    return why_not_flash_2_head_dim(call)


def why_not_te_unfused(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check TransformerEngine's unfused attention."""
    if reason := _why_not_in_te(call, installed):
        return reason
    if call.dtype == "fp64" or (call.capability is not None and call.dtype == "bf16" and call.capability < MIN_SM):
        return f"does not support {call.dtype} on {architecture(call)}"
    if (call.causal or call.window is not None) and call.queries > call.keys:
        return "returns the mean of all values for queries that see no key"
    return None


# ---------------------------------------------------------------- flash-attn


def why_not_flash_attn(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check the flash-attn package, FlashAttention 2."""
    if call.device != "cuda":
        return f"needs a CUDA device, not {call.device}"
    if installed.flash_attn is None:
        return f"flash-attn is not installed ({INSTALL_FLASH_ATTN})"
    if not MIN_FLASH_ATTN <= installed.flash_attn < FLASH_ATTN_UPPER_BOUND:
        supported = f"from {format_version(MIN_FLASH_ATTN)} up to {format_version(FLASH_ATTN_UPPER_BOUND)}"
        return f"needs flash-attn {supported}, found {format_version(installed.flash_attn)}"
    if reason := _why_not_flash_kernels(call):
        return reason
    if call.bias not in ("none", "slopes"):
        problem = "a gradient for" if call.bias_is_alibi else "a bias other than"
        return f"does not support {problem} ALiBi slopes"
    if call.padding:
        return "does not support a mask, which padding needs"
    if call.attention_chunk:
        return "does not support chunked attention, which FlashAttention 3 brought"
    if call.sinks:
        return "does not support attention sinks"
    if call.softcap and call.dropout:
        return "does not support dropout with a softcap"
    return why_not_flash_2_head_dim(call)
