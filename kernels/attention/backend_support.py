"""Limits of each attention backend: a table of pure functions, no torch, no device.

Each `why_not_*` function returns the reason why its backend does not support a call, or None if it does. The limits of
PyTorch's SDPA backends are those its own dispatcher checks (aten/src/ATen/native/transformers: cuda/sdp_utils.cpp and
sdp_utils_cpp.cpp), plus cases with known wrong results; the tests compare the CPU rows with PyTorch's behaviour.
Those of TransformerEngine and flash-attn are in `te_support.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .call_spec import AttentionCall, InstalledSoftware
from .support_checks import MAX_SM, MIN_SM, architecture, format_version, why_not_flash_2_head_dim, why_not_on_gpu
from .te_support import why_not_flash_attn, why_not_te_flash, why_not_te_fused, why_not_te_unfused

BackendFamily = Literal["flash", "fused", "unfused", "named"]
BackendName = Literal[
    "triton",
    "triton_atomic",
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

MIN_TRITON = (3, 6)
HOPPER_HEAD_DIMS = (64, 128, 256)
# the diagonal sums of a tile of keys have 2 R / 64 bands; for a larger R they are not small compared to K and V
MAX_HOPPER_REACH = 512
# the fewest keys, by head width and causal mask, from which one backward kernel is faster than two on an H100
FUSED_BACKWARD_FROM = {(64, True): 4096, (64, False): 16384, (128, False): 16384}
# the fewest keys of that kernel where it adds up dQ in the order of arrival
ATOMIC_BACKWARD_FROM = dict.fromkeys(itertools.product((64, 128), (False, True)), 1024)
# the fewest and most keys, by head width and causal mask, between which forward and backward of the Hopper kernels took
# less time together than cuDNN's (docs/benchmarks.md): 1.00 to 1.57 times as fast on an H200, from 1,024 on an H100 too
FASTER_THAN_CUDNN = {
    (64, True): (256, 4096),
    (64, False): (256, 512),
    (128, True): (256, 3072),
    (128, False): (256, 1024),
    (256, True): (256, 16384),
    (256, False): (256, 16384),
}
MIN_FORWARD_FASTER_THAN_CUDNN = 1024  # keys; with fewer, only the backward is faster
# likewise those between which `triton_atomic` took less time than cuDNN's on an H200, and `triton` did not with 1 query
# head of a group, with 4, or with either
ATOMIC_IS_FASTEST = {(64, False): (1024, 16384), (128, True): (4096, 4096)}
MAX_SHORT_QUERIES = 128
# calls of `short_backward_support` too, 1.01 to 1.36 times as fast on an H200: fewest queries, fewest and most keys,
# and fewest heads times sequences; measured with 32, 114 and 128 queries, 128 to 2,048 keys and 72 to 768 heads
_SHORT_FASTER_THAN_CUDNN = (32, 128, 2048, 132)


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


def why_not_sdpa_flash(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check PyTorch's FlashAttention 2 on CUDA, its blocked kernel on CPU."""
    if call.device == "cpu":
        return _sdpa_shape(call) or _why_not_flash_on_cpu(call)
    if reason := why_not_on_gpu(call) or _sdpa_shape(call) or _sdpa_determinism(call, installed):
        return reason
    if call.bias != "none":
        return "does not support a bias"
    if call.packed:
        return "does not support a mask, which packed documents need"
    if call.padding:
        return "does not support a mask, which padding needs"
    return why_not_flash_2_head_dim(call)


def why_not_sdpa_efficient(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check PyTorch's memory-efficient attention (CUTLASS), CUDA only."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not (5, 0) <= call.capability <= MAX_SM:
        return f"needs sm_50 to sm_121, not {architecture(call)}"
    if call.dtype == "fp64" or (call.dtype == "bf16" and call.capability < MIN_SM):
        return f"does not support {call.dtype} on {architecture(call)}"
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
    if reason := why_not_on_gpu(call):
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
        return f"needs sm_80 or later, not {architecture(call)}"
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


def why_not_triton_atomic(call: AttentionCall, installed: InstalledSoftware) -> str | None:
    """Check the Hopper kernels with all gradients in one kernel that adds up dQ in the order of arrival."""
    if reason := why_not_triton(call, installed):
        return reason
    if not uses_hopper_kernels(call, installed):
        return "needs a call that triton's Hopper kernels support"
    options = {"a bias": call.bias != "none", "packed documents": call.packed, "attention sinks": call.sinks}
    if unsupported := [name for name, given in options.items() if given]:
        return f"does not support {' or '.join(unsupported)}"
    if not call.training:
        return None
    if call.deterministic:
        return "adds up the gradient of the queries in the order of arrival: not deterministic"
    fewest = ATOMIC_BACKWARD_FROM.get((call.head_dim, call.causal))
    if fewest is None:
        return f"needs head width 64 or 128, not {call.head_dim}"
    if not fused_backward_support(
        call.head_dim, call.queries, call.keys, causal=call.causal, relative_bias=False, atomic=True
    ):
        multiple = ", a multiple of 256 and as many queries" if call.causal else ""
        return f"needs at least {fewest} keys{multiple}, not {call.queries} queries of {call.keys} keys"
    return None


def hopper_kernels_support(head_dim: int, *, options: tuple[object, ...], relative_bias: bool, reach: int) -> bool:
    """True if the sm_90 kernels support a call, apart from device and dtype.

    Args:
        head_dim: width of a head.
        options: window, softcap, dropout, packed documents but those of `hopper_kernels_support_documents`, padding,
            dense bias, sinks beside a relative bias, values of another width and chunks; none may be given.
        relative_bias: the call has a distance bias or ALiBi slopes.
        reach: R of the distance bias.
    """
    widths = HOPPER_HEAD_DIMS[:2] if relative_bias else HOPPER_HEAD_DIMS
    return head_dim in widths and reach <= MAX_HOPPER_REACH and not any(options)


def hopper_kernels_support_documents(head_dim: int, rows: int, *, causal: bool, bias: bool) -> bool:
    """True if the sm_90 kernels support packed documents, of as many keys as queries.

    Args:
        head_dim: width of a head.
        rows: tokens of all documents; one program sorts their tiles.
        causal: with a causal mask.
        bias: with a bias of any kind, or sinks.
    """
    return head_dim <= 128 and rows <= 1 << 18 and causal and not bias


def fused_backward_support(
    head_dim: int, queries: int, keys: int, *, causal: bool, relative_bias: bool, atomic: bool = False
) -> bool:
    """True if the sm_90 kernels, where they run, compute all gradients in one kernel, with sums of dQ in fp32.

    With a causal mask, for as many queries as keys and a multiple of 256 of them; `pair_tiles` may still decline.
    With `atomic` these are added up in the order of arrival.
    """
    shortest = (ATOMIC_BACKWARD_FROM if atomic else FUSED_BACKWARD_FROM).get((head_dim, causal))
    return not (
        shortest is None or keys < shortest or relative_bias or (causal and (queries != keys or keys % 256 != 0))
    )


def short_backward_support(
    head_dim: int, queries: int, batch: int, heads: int, groups: int, *, causal: bool, relative_bias: bool
) -> bool:
    """True if the sm_90 kernels, where they run, compute all gradients of a head's queries in one program.

    A program takes a head of a sequence, of which there must be at least half as many as multiprocessors of an H100.
    `fused_backward_support` comes first.
    """
    few = head_dim == 64 and queries <= MAX_SHORT_QUERIES and heads == groups and batch * heads >= 66
    return few and not causal and not relative_bias


def uses_hopper_kernels(call: AttentionCall, installed: InstalledSoftware) -> bool:
    """True if `triton` runs the call with its sm_90 kernels, as `flash/hopper/supported_calls.py` decides later."""
    own_documents = call.queries == call.keys and hopper_kernels_support_documents(
        call.head_dim, call.batch * call.queries, causal=call.causal, bias=call.bias != "none" or call.sinks
    )
    options = (
        call.window, call.softcap, call.dropout, call.packed and not own_documents, call.padding,
        call.bias.startswith("dense"),
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


def is_faster_than_cudnn(call: AttentionCall, installed: InstalledSoftware) -> bool:
    """True if the sm_90 kernels run the call and are measured to be faster than cuDNN's."""
    fewest, most = FASTER_THAN_CUDNN.get((call.head_dim, call.causal), (1, 0))
    if not call.training or call.queries != call.keys:  # measured with as many queries
        fewest = max(fewest, MIN_FORWARD_FASTER_THAN_CUDNN)
    is_faster = fewest <= call.keys <= most and not call.bias_is_relative
    return (is_faster or _few_queries_are_faster(call)) and uses_hopper_kernels(call, installed)


def atomic_is_fastest(call: AttentionCall, installed: InstalledSoftware) -> bool:
    """True if `triton_atomic` supports the training call and is measured to be faster than `triton` and cuDNN."""
    fewest, most = ATOMIC_IS_FASTEST.get((call.head_dim, call.causal), (1, 0))
    is_measured = call.training and call.queries == call.keys and fewest <= call.keys <= most
    return is_measured and why_not_triton_atomic(call, installed) is None


def _few_queries_are_faster(call: AttentionCall) -> bool:
    queries, fewest, most, heads = _SHORT_FASTER_THAN_CUDNN
    is_measured = call.queries >= queries and fewest <= call.keys <= most and call.batch * call.heads >= heads
    return is_measured and call.training and short_backward_support(
        call.head_dim, call.queries, call.batch, call.heads, call.groups, causal=call.causal,
        relative_bias=call.bias_is_relative,
    )  # fmt: skip


_FP32_DQ_ACCUMULATOR = (
    "triton_atomic", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flash_attn", "te_flash", "te_fused",
)  # fmt: skip


def accumulates_dq(backend: str, call: AttentionCall) -> bool:
    """True if the backward pass of a backend accumulates dQ in a separate fp32 buffer."""
    if backend != "triton":
        return backend in _FP32_DQ_ACCUMULATOR
    is_fused = not call.packed and fused_backward_support(
        call.head_dim, call.queries, call.keys, causal=call.causal, relative_bias=call.bias_is_relative
    )
    return is_fused and uses_hopper_kernels(call, InstalledSoftware(torch=(2, 11), triton=MIN_TRITON))


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
    Backend("triton_atomic", "flash", why_not_triton_atomic),
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
