"""Limits of each attention backend: a table of pure functions, no torch, no device.

Each `why_not_*` function returns the reason why its backend does not support a call, or None if it does. The limits of
PyTorch's SDPA backends are those its own dispatcher checks (aten/src/ATen/native/transformers: cuda/sdp_utils.cpp and
sdp_utils_cpp.cpp), plus cases with known wrong results; the tests compare the CPU rows with PyTorch's behaviour. The
limits of TransformerEngine and flash-attn are those of TransformerEngine's backend selection
(transformer_engine/pytorch/attention/dot_product_attention/utils.py, 2.20) and of flash-attn's README.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .call_spec import AttentionCall, InstalledSoftware

BackendFamily = Literal["flash", "fused", "unfused", "named"]
BackendName = Literal[
    "triton",
    "sdpa_flash",
    "sdpa_efficient",
    "sdpa_cudnn",
    "sdpa_math",
    "unfused",
    "flash_attn",
    "te_flash",
    "te_fused",
    "te_unfused",
    "lse_first",
    "reference",
]
SupportCheck = Callable[[AttentionCall, InstalledSoftware], "str | None"]

MIN_SM, MAX_SM = (8, 0), (12, 1)  # architectures that PyTorch builds its flash and cuDNN kernels for
MIN_TRITON = (3, 6)
MIN_TE, TE_UPPER_BOUND = (2, 18), (3, 0)  # 2.18 brought NVTE_FLASH_ATTN_V2, _V3 and _V4
MIN_TE_FP8 = (2, 20)  # first release whose quantizers, GEMM and fp8 attention are known to take these arguments
MIN_FLASH_ATTN, FLASH_ATTN_UPPER_BOUND = (2, 7, 3), (2, 9, 0)  # 2.7.3 brought Blackwell; TransformerEngine needs it too
HOPPER_HEAD_DIMS = (64, 128, 256)
# the diagonal sums of a tile of keys have 2 R / 64 bands; for a larger R they are not small compared to K and V
MAX_HOPPER_REACH = 512
# the fewest keys, by head width and causal mask, from which one backward kernel is faster than two on an H100
FUSED_BACKWARD_FROM = {(64, True): 4096, (64, False): 16384, (128, False): 16384}
INSTALL_TE = "pip install 'stoker[te]'"
INSTALL_FLASH_ATTN = "pip install 'stoker[flash]'"


def format_version(version: tuple[int, ...]) -> str:
    """Format a version: (2, 11) as 2.11."""
    return ".".join(map(str, version))


def _sm(call: AttentionCall) -> str:
    major, minor = call.capability or (0, 0)
    return f"sm_{major}{minor}"


def _gpu(call: AttentionCall) -> str | None:
    """Require a CUDA device and dtype with the 16-bit tensor cores that the fast kernels are written for."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not MIN_SM <= call.capability <= MAX_SM:
        return f"needs sm_80 to sm_121, not {_sm(call)}"
    if call.dtype not in ("bf16", "fp16"):
        return f"supports bf16 and fp16, not {call.dtype}"
    return None


# ---------------------------------------------------------------- PyTorch's SDPA


def _sdpa_shape(call: AttentionCall) -> str | None:
    if call.window is not None:
        return "SDPA does not support a window"
    if call.attention_chunk:
        return "SDPA does not support chunked attention"
    if call.softcap:
        return "SDPA does not support a softcap"
    if call.sinks:
        return "SDPA does not support attention sinks"
    if call.causal and call.queries != call.keys:
        return f"SDPA aligns the causal mask top-left, wrong for {call.queries} queries of {call.keys} keys"
    return None


def _sdpa_determinism(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    if call.device == "cuda" and call.training and call.deterministic and not installed.deterministic_algorithms:
        return "its backward pass is deterministic only under torch.use_deterministic_algorithms(True)"
    return None


def _why_not_flash_on_cpu(call: AttentionCall) -> str | None:
    unsupported = [f"dropout ({call.dropout:g})"] if call.dropout else []
    if call.bias_requires_grad:
        unsupported.append("a bias with gradient")
    if call.has_other_values:
        unsupported.append(f"value heads {call.value_dim} wide with keys {call.head_dim} wide")
    return f"SDPA flash on a CPU does not support {' or '.join(unsupported)}" if unsupported else None


def _flash_2_head_dim(call: AttentionCall) -> str | None:
    """Check the head width for FlashAttention 2, which PyTorch's flash backend is as well."""
    if call.has_other_values:
        return f"supports value heads of the keys' width ({call.head_dim}) only, not {call.value_dim}"
    if call.head_dim > 256:
        return f"supports head widths up to 256, not {call.head_dim}"
    sm = call.capability or MIN_SM
    little_shared_memory = (8, 6) <= sm <= (8, 9) or sm >= (12, 0)
    if little_shared_memory and call.training and call.head_dim > 192 and (call.dropout or call.head_dim <= 224):
        return f"has no backward pass for head width {call.head_dim} on {_sm(call)}"
    return None


def why_not_sdpa_flash(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check PyTorch's FlashAttention 2 on CUDA, its blocked kernel on CPU."""
    if call.device == "cpu":
        return _sdpa_shape(call) or _why_not_flash_on_cpu(call)
    if reason := _gpu(call) or _sdpa_shape(call) or _sdpa_determinism(call, installed):
        return reason
    if call.bias != "none":
        return "does not support a bias"
    if call.packed:
        return "does not support a mask, which packed documents need"
    if call.padding:
        return "does not support a mask, which padding needs"
    return _flash_2_head_dim(call)


def why_not_sdpa_efficient(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check PyTorch's memory-efficient attention (CUTLASS), CUDA only."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not (5, 0) <= call.capability <= MAX_SM:
        return f"needs sm_50 to sm_121, not {_sm(call)}"
    if call.dtype == "fp64" or (call.dtype == "bf16" and call.capability < MIN_SM):
        return f"does not support {call.dtype} on {_sm(call)}"
    if reason := _sdpa_shape(call) or _sdpa_determinism(call, installed):
        return reason
    tensor_cores = call.capability >= MIN_SM or (call.capability >= (7, 0) and call.dtype == "fp16")
    multiple = (4 if call.dtype == "fp32" else 8) if tensor_cores else 1
    for width in (call.head_dim, call.value_dim or 0):
        if width % multiple:
            return f"needs a head width that is a multiple of {multiple}, not {width}"
    return None


def why_not_sdpa_cudnn(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check cuDNN's fused attention through SDPA, CUDA only."""
    if reason := _gpu(call):
        return reason
    cudnn = installed.cudnn
    if cudnn is None or cudnn < 90000:
        return f"needs cuDNN 9, found {'none' if cudnn is None else cudnn}"
    if reason := _sdpa_shape(call):
        return reason
    if call.deterministic and call.training:
        return "its backward pass is not deterministic"
    if call.deterministic and installed.deterministic_algorithms:
        return "PyTorch rejects it under torch.use_deterministic_algorithms(True), the forward pass too"
    # PyTorch accepts 256 on sm_90 from cuDNN 9.10 on. Support in the backward pass also depends on the cuDNN frontend
    # compiled into PyTorch, which cannot be queried at run time: 2.11 is the oldest version in which both passes were
    # tested (on an H200). TransformerEngine excludes 9.10.0 and 9.10.1.
    wide = call.capability == (9, 0) and cudnn >= 91002 and installed.torch >= (2, 11)
    widest = 256 if wide else 128
    if call.head_dim > widest or call.head_dim % 8:
        return f"supports head widths up to {widest} that are multiples of 8, not {call.head_dim}"
    value_dim = call.value_dim or call.head_dim
    # the widths whose backward pass PyTorch and cuDNN list: any two up to 128, and those of MLA
    if call.has_other_values and (
        value_dim % 8
        or (
            max(call.head_dim, value_dim) > 128
            and not (wide and (call.head_dim, value_dim) == (192, 128) and cudnn >= 91100)
        )
    ):
        return f"supports value heads {value_dim} wide only with keys up to 128, or 128 with keys 192 on sm_90"
    if call.bias_requires_grad:
        return "computes no gradient for a bias"
    if call.dropout:
        if call.dropout * 16 != int(call.dropout * 16):
            return f"supports dropout in multiples of 1/16, not {call.dropout:g}"
        if 91100 < cudnn < 91400:
            return f"cuDNN {cudnn} does not support dropout (9.11 to 9.13)"
    if call.keys == 1 or (call.dropout and call.queries == 1):
        return "does not support a single token"
    if cudnn < 91501 and (call.any_length or call.queries % 128 or call.keys % 128):
        return f"cuDNN {cudnn} reads out of bounds unless lengths are multiples of 128 (pytorch #169849)"
    if call.capability is not None and call.capability[0] == 10 and call.groups < min(8, call.heads):
        return f"gives wrong results for {call.groups} groups on sm_10x (pytorch #193893)"
    return None


def why_not_sdpa_math(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check SDPA's math backend, a composition of the three steps."""
    return _sdpa_shape(call)


# ---------------------------------------------------------------- backends of this package


def always_supported(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Return None: plain PyTorch supports every device and option."""
    return None


def _why_not_own_kernels(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check the common requirements of this package's Triton kernels."""
    if installed.triton is None:
        return "Triton is not installed"
    if installed.triton < MIN_TRITON:
        return f"needs Triton {format_version(MIN_TRITON)} or later, found {format_version(installed.triton)}"
    if call.device == "cpu":
        if not installed.interpreted:
            return "needs a CUDA device (on a CPU only in Triton's interpreter, TRITON_INTERPRET=1)"
    elif call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    elif installed.interpreted:
        return "Triton runs in interpreter mode in this process (TRITON_INTERPRET=1), which does not use the GPU"
    elif call.capability < MIN_SM:
        return f"needs sm_80 or later, not {_sm(call)}"
    elif call.dtype == "fp64":
        return "supports bf16, fp16 and fp32, not fp64"
    return _own_head_dim(call)


def _own_head_dim(call: AttentionCall) -> str | None:
    for width in (call.head_dim, call.value_dim or call.head_dim):
        if not 16 <= width <= 256 or width % 8:
            return f"supports head widths 16 to 256 that are multiples of 8, not {width}"
    return None


def why_not_triton(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check this package's flash kernels: always deterministic, every option, one combination excluded."""
    if reason := _why_not_own_kernels(call, installed):
        return reason
    if call.packed and call.bias.startswith("dense"):
        return "does not support a dense bias with packed documents"
    return None


def hopper_kernels_support(head_dim: int, *, options: tuple[object, ...], relative_bias: bool, reach: int) -> bool:
    """True if the sm_90 kernels support a call, apart from device and dtype.

    Args:
        head_dim: width of a head.
        options: window, softcap, dropout, packed documents, padding, dense bias, sinks beside a relative bias, values
            of another width and chunks; none may be given.
        relative_bias: the call has a distance bias or ALiBi slopes.
        reach: R of the distance bias.
    """
    widths = HOPPER_HEAD_DIMS[:2] if relative_bias else HOPPER_HEAD_DIMS
    return head_dim in widths and reach <= MAX_HOPPER_REACH and not any(options)


def fused_backward_support(head_dim: int, queries: int, keys: int, *, causal: bool, relative_bias: bool) -> bool:
    """True if the sm_90 kernels, where they run, compute all gradients in one kernel, with sums of dQ in fp32.

    With a causal mask, for as many queries as keys and a multiple of 256 of them; `pair_tiles` may still decline.
    """
    shortest = FUSED_BACKWARD_FROM.get((head_dim, causal))
    return not (
        shortest is None or keys < shortest or relative_bias or (causal and (queries != keys or keys % 256 != 0))
    )


def uses_hopper_kernels(call: AttentionCall, installed: InstalledSoftware) -> bool:
    """True if `triton` runs the call with its sm_90 kernels, as `flash/hopper/supported_calls.py` decides later."""
    options = (
        call.window, call.softcap, call.dropout, call.packed, call.padding, call.bias.startswith("dense"),
        call.sinks and call.bias_is_relative, call.has_other_values, call.attention_chunk,
    )  # fmt: skip
    return (
        call.capability == (9, 0)
        and installed.triton is not None
        and installed.triton >= MIN_TRITON
        and call.dtype in ("bf16", "fp16")
        and hopper_kernels_support(
            call.head_dim, options=options, relative_bias=call.bias_is_relative, reach=call.reach
        )
    )


_FP32_DQ_ACCUMULATOR = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flash_attn", "te_flash", "te_fused")


def accumulates_dq(backend: str, call: AttentionCall) -> bool:
    """True if the backward pass of a backend accumulates dQ in a separate fp32 buffer."""
    if backend != "triton":
        return backend in _FP32_DQ_ACCUMULATOR
    return uses_hopper_kernels(call, InstalledSoftware(torch=(2, 11), triton=MIN_TRITON)) and fused_backward_support(
        call.head_dim, call.queries, call.keys, causal=call.causal, relative_bias=call.bias_is_relative
    )


def why_not_lse_first(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check the LSE-first kernels, plain PyTorch without a GPU: causal or full attention without other options."""
    if reason := _why_not_own_kernels(call, installed) if call.device == "cuda" else _own_head_dim(call):
        return reason
    options = {
        "a window": call.window is not None,
        "chunked attention": bool(call.attention_chunk),
        "packed documents": call.packed,
        "padding": call.padding,
        "a bias": call.bias != "none",
        "attention sinks": call.sinks,
        "value heads of another width": call.has_other_values,
        "a softcap": bool(call.softcap),
        "dropout": bool(call.dropout),
    }
    unsupported = [name for name, used in options.items() if used]
    return f"does not support {' or '.join(unsupported)}" if unsupported else None


# ---------------------------------------------------------------- TransformerEngine


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
    if reason := _why_not_in_te(call, installed) or _gpu(call):
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
            return f"supports packed documents from sm_90 and cuDNN 90600 on, not {_sm(call)} and {cudnn}"
        if sm >= (12, 0) and cudnn < 91801:
            return f"needs cuDNN 91801 for packed documents on {_sm(call)}, found {cudnn}"
    if call.training and call.deterministic:
        if sm < (9, 0) or sm >= (12, 0):
            return f"its backward pass is not deterministic on {_sm(call)}"
        if call.bias_requires_grad:
            return "its gradient of a bias is not deterministic"
        if sm >= (10, 0) and (cudnn < 91801 or call.dropout or call.bias != "none"):
            return f"its backward pass is deterministic on {_sm(call)} from cuDNN 91801 on, without dropout and bias"
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
        return f"multiplies in fp8 on sm_90 to sm_110 (Hopper, Blackwell of data centers), not {_sm(call)}"
    if cudnn < 90700 or cudnn == 91000:
        return f"needs cuDNN 90700 or later and not 91000 for fp8, found {installed.cudnn or 'none'}"
    if call.head_dim != 128 and (sm < (10, 0) or call.head_dim > 128 or call.head_dim % 16):
        widths = "heads 128 wide" if sm < (10, 0) else "head widths up to 128 that are multiples of 16"
        return f"supports {widths} in fp8 on {_sm(call)}, not {call.head_dim}"
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
    if reason := _gpu(call):
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
        return f"supports head widths up to 192 on {_sm(call)}, not {call.head_dim}"
    return _flash_2_head_dim(call)


def why_not_te_unfused(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check TransformerEngine's unfused attention."""
    if reason := _why_not_in_te(call, installed):
        return reason
    if call.dtype == "fp64" or (call.capability is not None and call.dtype == "bf16" and call.capability < MIN_SM):
        return f"does not support {call.dtype} on {_sm(call)}"
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
    return _flash_2_head_dim(call)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Backend:
    """One attention backend and its capabilities.

    Attributes:
        name: value of `attention_backend`.
        family: unit that keys and flags enable or disable.
        why_not: function that returns why the backend does not support a call, or None if it does.
        supports_cu_seqlens: packed documents are passed as `cu_seqlens`; otherwise as a (queries, keys) mask.
        supports_distance_bias: a distance bias is passed as a vector per head; otherwise as a dense (queries, keys)
            bias.
        supports_alibi_slopes: ALiBi slopes are passed as such; otherwise as a dense bias.
        supports_compile: torch.compile traces it without a graph break.
        saves_scores: saves a (queries, keys) matrix per head for the backward pass.
        keyed_dropout: the dropout mask is a function of the call's `rng`, which all layouts of ranks draw alike;
            otherwise of PyTorch's generator and of the heads and tokens that the process has.
    """

    name: BackendName
    family: BackendFamily
    why_not: SupportCheck
    supports_cu_seqlens: bool = False
    supports_distance_bias: bool = False
    supports_alibi_slopes: bool = False
    supports_compile: bool = True
    saves_scores: bool = False
    keyed_dropout: bool = False

    def needs_document_mask(self, call: AttentionCall) -> bool:
        """True if the packed documents of a call must be passed as a (queries, keys) mask."""
        return call.packed and not self.supports_cu_seqlens

    def needs_dense_bias(self, call: AttentionCall) -> bool:
        """True if the distance bias or ALiBi slopes of a call must be expanded to a dense bias."""
        supported = self.supports_distance_bias if call.bias_is_distance_table else self.supports_alibi_slopes
        return call.bias_is_relative and not supported


# Measured order within a family (one H200, bf16, causal, forward and backward; docs/benchmarks.md): SDPA's cuDNN is 1
# to 5 % faster than TransformerEngine's at 1k to 16k tokens and works with torch.compile. PyTorch's own kernels come
# before the portable Triton kernels until those are measured to be faster on the device; the Triton kernels for Hopper,
# 0.9 to 1.1 times cuDNN's speed on an H100 from 2k tokens on, come before PyTorch's (see `dispatch.preference_order`).
BACKENDS = (
    Backend("sdpa_flash", "flash", why_not_sdpa_flash),
    Backend(
        "flash_attn",
        "flash",
        why_not_flash_attn,
        supports_cu_seqlens=True,
        supports_alibi_slopes=True,
        supports_compile=False,
    ),
    Backend(
        "triton",
        "flash",
        why_not_triton,
        supports_cu_seqlens=True,
        supports_distance_bias=True,
        supports_alibi_slopes=True,
        keyed_dropout=True,
    ),
    Backend("te_flash", "flash", why_not_te_flash, supports_cu_seqlens=True, supports_compile=False),
    Backend("sdpa_efficient", "flash", why_not_sdpa_efficient),
    Backend("sdpa_cudnn", "fused", why_not_sdpa_cudnn),
    Backend("te_fused", "fused", why_not_te_fused, supports_cu_seqlens=True, supports_compile=False),
    Backend("unfused", "unfused", always_supported, saves_scores=True, keyed_dropout=True),
    Backend("sdpa_math", "unfused", why_not_sdpa_math, saves_scores=True),
    Backend("te_unfused", "unfused", why_not_te_unfused, supports_compile=False, saves_scores=True),
    Backend("lse_first", "named", why_not_lse_first),
    Backend(
        "reference",
        "named",
        always_supported,
        supports_cu_seqlens=True,
        supports_distance_bias=True,
        supports_alibi_slopes=True,
        saves_scores=True,
        keyed_dropout=True,
    ),
)
"""All backends, in order of preference within their family."""
BACKENDS_BY_NAME: dict[str, Backend] = {backend.name: backend for backend in BACKENDS}
