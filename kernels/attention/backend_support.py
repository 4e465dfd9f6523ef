"""Why each backend cannot run a call: a table of pure functions, no torch, no device.

The limits of PyTorch's SDPA backends are those its own dispatcher checks (aten/src/ATen/native/transformers:
cuda/sdp_utils.cpp and sdp_utils_cpp.cpp), with known wrong results added; the tests compare the CPU rows with what
PyTorch does. The limits of TransformerEngine and flash-attn are those of TransformerEngine's selection
(transformer_engine/pytorch/attention/dot_product_attention/utils.py, 2.20) and of flash-attn's README.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .call_spec import AttentionCall, Installed

Family = Literal["flash", "fused", "unfused", "named"]
WhyNot = Callable[[AttentionCall, Installed], "str | None"]

FIRST_SM, LAST_SM = (8, 0), (12, 1)  # what PyTorch builds its flash and cuDNN kernels for
OLDEST_TRITON = (3, 6)
OLDEST_TE, TE_TOO_NEW = (2, 18), (3, 0)  # 2.18 brought NVTE_FLASH_ATTN_V2, _V3 and _V4
OLDEST_FLASH_ATTN, FLASH_ATTN_TOO_NEW = (2, 7, 3), (2, 9, 0)  # 2.7.3 brought Blackwell, and is TransformerEngine's
LARGEST_HOPPER_REACH = 512  # of a distance bias in our kernels for sm_90, see flash/hopper/gate.py
INSTALL_TE = "pip install 'stoker[te]'"
INSTALL_FLASH_ATTN = "pip install 'stoker[flash]'"


def dotted(version: tuple[int, ...]) -> str:
    """(2, 11) as 2.11."""
    return ".".join(map(str, version))


def _sm(call: AttentionCall) -> str:
    major, minor = call.capability or (0, 0)
    return f"sm_{major}{minor}"


def _gpu(call: AttentionCall) -> str | None:
    """A CUDA device with the 16-bit tensor cores that the fast kernels are written for."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not FIRST_SM <= call.capability <= LAST_SM:
        return f"needs sm_80 to sm_121, not {_sm(call)}"
    if call.dtype not in ("bf16", "fp16"):
        return f"takes bf16 and fp16, not {call.dtype}"
    return None


# ---------------------------------------------------------------- PyTorch's SDPA


def _sdpa_shape(call: AttentionCall) -> str | None:
    if call.window is not None:
        return "SDPA knows no window"
    if call.softcap:
        return "SDPA knows no softcap"
    if call.causal and call.queries != call.keys:
        return f"SDPA aligns the causal mask top-left, wrong for {call.queries} queries of {call.keys} keys"
    return None


def _sdpa_determinism(call: AttentionCall, installed: Installed) -> str | None:
    if call.device == "cuda" and call.training and call.deterministic and not installed.deterministic_algorithms:
        return "its backward pass is deterministic only under torch.use_deterministic_algorithms(True)"
    return None


def _why_not_flash_on_cpu(call: AttentionCall) -> str | None:
    refused = [f"dropout ({call.dropout:g})"] if call.dropout else []
    if call.bias_has_gradient:
        refused.append("bias with gradient")
    return f"SDPA flash on a CPU takes no {' and no '.join(refused)}" if refused else None


def _flash_2_head_dim(call: AttentionCall) -> str | None:
    """Head widths of FlashAttention 2, which PyTorch's flash backend is too."""
    if call.head_dim > 256:
        return f"takes heads up to 256 wide, not {call.head_dim}"
    sm = call.capability or FIRST_SM
    little_shared_memory = (8, 6) <= sm <= (8, 9) or sm >= (12, 0)
    if little_shared_memory and call.training and call.head_dim > 192 and (call.dropout or call.head_dim <= 224):
        return f"cannot train heads {call.head_dim} wide on {_sm(call)}"
    return None


def why_not_sdpa_flash(call: AttentionCall, installed: Installed) -> str | None:
    """PyTorch's FlashAttention 2 on CUDA, its blocked kernel on CPU."""
    if call.device == "cpu":
        return _sdpa_shape(call) or _why_not_flash_on_cpu(call)
    if reason := _gpu(call) or _sdpa_shape(call) or _sdpa_determinism(call, installed):
        return reason
    if call.bias != "none":
        return "takes no bias"
    if call.packed:
        return "takes no mask, which packed documents need"
    if call.padding:
        return "takes no mask, which padding needs"
    return _flash_2_head_dim(call)


def why_not_sdpa_efficient(call: AttentionCall, installed: Installed) -> str | None:
    """PyTorch's memory-efficient attention (CUTLASS), CUDA only."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not (5, 0) <= call.capability <= LAST_SM:
        return f"needs sm_50 to sm_121, not {_sm(call)}"
    if call.dtype == "fp64" or (call.dtype == "bf16" and call.capability < FIRST_SM):
        return f"does not take {call.dtype} on {_sm(call)}"
    if reason := _sdpa_shape(call) or _sdpa_determinism(call, installed):
        return reason
    tensor_cores = call.capability >= FIRST_SM or (call.capability >= (7, 0) and call.dtype == "fp16")
    multiple = (4 if call.dtype == "fp32" else 8) if tensor_cores else 1
    if call.head_dim % multiple:
        return f"needs a head width that is a multiple of {multiple}, not {call.head_dim}"
    return None


def why_not_sdpa_cudnn(call: AttentionCall, installed: Installed) -> str | None:
    """Fused attention of cuDNN through SDPA, CUDA only."""
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
        return "PyTorch refuses it under torch.use_deterministic_algorithms(True), its forward pass too"
    # PyTorch admits 256 on sm_90 from cuDNN 9.10 on. Whether the backward pass can be had also depends on the cuDNN
    # frontend compiled into PyTorch, which nothing shows at run time: 2.11 is the oldest in which both passes were run
    # (on an H200). TransformerEngine refuses 9.10.0 and 9.10.1.
    wide = call.capability == (9, 0) and cudnn >= 91002 and installed.torch >= (2, 11)
    widest = 256 if wide else 128
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head widths up to {widest} that are multiples of 8, not {call.head_dim}"
    if call.bias_has_gradient:
        return "gives no gradient for a bias"
    if call.dropout:
        if call.dropout * 16 != int(call.dropout * 16):
            return f"resolves dropout in sixteenths, not {call.dropout:g}"
        if 91100 < cudnn < 91400:
            return f"cuDNN {cudnn} has no dropout (9.11 to 9.13)"
    if call.keys == 1 or (call.dropout and call.queries == 1):
        return "does not take a single token"
    if cudnn < 91501 and (call.any_length or call.queries % 128 or call.keys % 128):
        return f"cuDNN {cudnn} reads out of bounds unless lengths are multiples of 128 (pytorch #169849)"
    if call.capability is not None and call.capability[0] == 10 and call.groups < min(8, call.heads):
        return f"gives wrong results for {call.groups} groups on sm_10x (pytorch #193893)"
    return None


def why_not_sdpa_math(call: AttentionCall, installed: Installed) -> str | None:
    """SDPA's own composition of the three steps."""
    return _sdpa_shape(call)


# ---------------------------------------------------------------- our own


def runs_always(call: AttentionCall, installed: Installed) -> str | None:
    """Plain torch, on every device and with every option."""
    return None


def _why_not_own_kernels(call: AttentionCall, installed: Installed) -> str | None:
    """What all Triton kernels here need."""
    if installed.triton is None:
        return "Triton is not installed"
    if installed.triton < OLDEST_TRITON:
        return f"needs Triton {dotted(OLDEST_TRITON)} or later, found {dotted(installed.triton)}"
    if call.device == "cpu":
        if not installed.interpreted:
            return "needs a CUDA device (on a CPU only in Triton's interpreter, TRITON_INTERPRET=1)"
    elif call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    elif installed.interpreted:
        return "Triton interprets its kernels in this process (TRITON_INTERPRET=1), which a GPU has no part in"
    elif call.capability < FIRST_SM:
        return f"needs sm_80 or later, not {_sm(call)}"
    elif call.dtype == "fp64":
        return "takes bf16, fp16 and fp32, not fp64"
    return _own_head_dim(call)


def _own_head_dim(call: AttentionCall) -> str | None:
    if not 16 <= call.head_dim <= 256 or call.head_dim % 8:
        return f"takes heads 16 to 256 wide that are multiples of 8, not {call.head_dim}"
    return None


def why_not_triton(call: AttentionCall, installed: Installed) -> str | None:
    """Our flash kernels: every option but one combination, and always deterministic."""
    if reason := _why_not_own_kernels(call, installed):
        return reason
    if call.packed and call.bias.startswith("dense"):
        return "packed documents have no common matrix that a dense bias could be added to"
    return None


def takes_hopper_kernels(call: AttentionCall, installed: Installed) -> bool:
    """Whether `triton` serves a call with its kernels for sm_90: the questions of `flash/hopper/gate.py`, as facts."""
    options = (call.window, call.softcap, call.dropout, call.packed, call.padding, call.bias.startswith("dense"))
    widths = (64, 128) if call.bias_goes_by_distance else (64, 128, 256)
    return (
        call.capability == (9, 0)
        and installed.triton is not None
        and installed.triton >= (3, 6)
        and call.dtype in ("bf16", "fp16")
        and call.head_dim in widths
        and call.reach <= LARGEST_HOPPER_REACH
        and not any(options)
    )


def why_not_lse_first(call: AttentionCall, installed: Installed) -> str | None:
    """Our three-stage kernels, plain torch where there is no GPU: causal or full attention and nothing else."""
    if reason := _why_not_own_kernels(call, installed) if call.device == "cuda" else _own_head_dim(call):
        return reason
    extras = {
        "window": call.window is not None,
        "packed documents": call.packed,
        "padding": call.padding,
        "bias": call.bias != "none",
        "softcap": bool(call.softcap),
        "dropout": bool(call.dropout),
    }
    given = [name for name, there in extras.items() if there]
    return f"takes no {' and no '.join(given)}" if given else None


# ---------------------------------------------------------------- TransformerEngine


def why_no_te(installed: Installed) -> str | None:
    """Why TransformerEngine cannot be used here at all, whatever the call."""
    if installed.te is None:
        return f"TransformerEngine is not installed ({INSTALL_TE})"
    if not OLDEST_TE <= installed.te < TE_TOO_NEW:
        wanted = f"from {dotted(OLDEST_TE)} up to {dotted(TE_TOO_NEW)}"
        return f"needs TransformerEngine {wanted}, found {dotted(installed.te)}"
    return installed.te_problem or None


def _why_not_in_te(call: AttentionCall, installed: Installed) -> str | None:
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if reason := why_no_te(installed):
        return reason
    if call.padding:
        return "TransformerEngine takes padding as lengths, not as a mask that may have holes"
    return "TransformerEngine caps scores in some versions only" if call.softcap else None


def why_not_te_fused(call: AttentionCall, installed: Installed) -> str | None:
    """Fused attention of cuDNN through TransformerEngine."""
    if reason := _why_not_in_te(call, installed) or _gpu(call):
        return reason
    cudnn, sm = installed.cudnn or 0, call.capability or FIRST_SM
    needed = 90700 if sm >= (10, 0) else 90300
    if cudnn < needed or cudnn in (91000, 91001):
        return f"needs cuDNN {needed} or later and neither 91000 nor 91001, found {installed.cudnn or 'none'}"
    widest = 256 if sm == (9, 0) and cudnn >= 90500 else 128
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head widths up to {widest} that are multiples of 8, not {call.head_dim}"
    if call.causal and call.queries > call.keys:
        return f"takes no causal mask over more queries ({call.queries}) than keys ({call.keys})"
    if call.causal and call.queries != call.keys:
        if cudnn < 90700:
            return f"needs cuDNN 90700 for a causal mask over unequal lengths, found {cudnn}"
        if call.dropout or call.bias != "none":
            return "takes a causal mask over unequal lengths only without dropout and without bias"
    return _why_not_te_fused_options(call, cudnn, sm)


def _why_not_te_fused_options(call: AttentionCall, cudnn: int, sm: tuple[int, int]) -> str | None:
    """Windows, packed documents, biases and determinism of `te_fused`."""
    if call.window is not None:
        if call.dropout or call.bias != "none" or call.queries > call.keys:
            return "takes a window only without dropout, without bias and with no more queries than keys"
        if call.window[1] > 0 and cudnn < 90600:
            return f"needs cuDNN 90600 for a window to the right, found {cudnn}"
    if call.packed:
        if call.bias != "none":
            return "takes no bias with packed documents"
        if sm < (9, 0) or cudnn < 90600:
            return f"takes packed documents from sm_90 and cuDNN 90600 on, not {_sm(call)} and {cudnn}"
        if sm >= (12, 0) and cudnn < 91801:
            return f"needs cuDNN 91801 for packed documents on {_sm(call)}, found {cudnn}"
    if call.training and call.deterministic:
        if sm < (9, 0) or sm >= (12, 0):
            return f"its backward pass is not deterministic on {_sm(call)}"
        if call.bias_has_gradient:
            return "its gradient of a bias is not deterministic"
        if sm >= (10, 0) and (cudnn < 91801 or call.dropout or call.bias != "none"):
            return f"its backward pass is deterministic on {_sm(call)} from cuDNN 91801 on, without dropout and bias"
        documents = call.batch * call.queries  # at most; how many there are is known on the device only
        if call.packed and documents * call.heads * call.queries * call.keys >= 1 << 30:
            return "its deterministic backward pass needs too much workspace for the documents that rows may hold"
    return None


def _why_not_flash_kernels(call: AttentionCall) -> str | None:
    if reason := _gpu(call):
        return reason
    if call.head_dim % 8:
        return f"takes head widths that are multiples of 8, not {call.head_dim}"
    return None


def why_not_te_flash(call: AttentionCall, installed: Installed) -> str | None:
    """The flash-attn packages through TransformerEngine: version 4 or 3 before 2, where they serve the call."""
    if reason := _why_not_in_te(call, installed) or _why_not_flash_kernels(call):
        return reason
    if call.bias != "none":
        return "takes no bias"
    sm, wide = call.capability or FIRST_SM, call.head_dim
    newer = (installed.flash_attn_3 and sm == (9, 0)) or (installed.flash_attn_4 and sm >= (9, 0))
    too_wide = wide > 256 or (wide == 256 and call.deterministic and call.training)
    if newer and not call.dropout and not too_wide:
        return None
    refusal = f"FlashAttention 3 and 4 take no {'dropout' if call.dropout else f'heads {wide} wide here'}; "
    if reason := _why_not_flash_2_in_te(call, installed, sm):
        return (refusal if newer else "") + reason
    return None


def _why_not_flash_2_in_te(call: AttentionCall, installed: Installed, sm: tuple[int, int]) -> str | None:
    if installed.flash_attn is None:
        return f"flash-attn is not installed ({INSTALL_FLASH_ATTN})"
    if not OLDEST_FLASH_ATTN <= installed.flash_attn < (2, 8, 4):
        return f"TransformerEngine takes flash-attn 2.7.3 to 2.8.3, found {dotted(installed.flash_attn)}"
    if 192 < call.head_dim <= 256 and sm not in ((8, 0), (9, 0), (10, 0), (12, 0)):
        return f"takes heads up to 192 wide on {_sm(call)}, not {call.head_dim}"
    return _flash_2_head_dim(call)


def why_not_te_unfused(call: AttentionCall, installed: Installed) -> str | None:
    """TransformerEngine's explicit attention."""
    if reason := _why_not_in_te(call, installed):
        return reason
    if call.dtype == "fp64" or (call.capability is not None and call.dtype == "bf16" and call.capability < FIRST_SM):
        return f"does not take {call.dtype} on {_sm(call)}"
    if (call.causal or call.window is not None) and call.queries > call.keys:
        return "gives queries that see no key the mean of all values"
    return None


# ---------------------------------------------------------------- flash-attn


def why_not_flash_attn(call: AttentionCall, installed: Installed) -> str | None:
    """The flash-attn package, FlashAttention 2."""
    if call.device != "cuda":
        return f"needs a CUDA device, not {call.device}"
    if installed.flash_attn is None:
        return f"flash-attn is not installed ({INSTALL_FLASH_ATTN})"
    if not OLDEST_FLASH_ATTN <= installed.flash_attn < FLASH_ATTN_TOO_NEW:
        wanted = f"from {dotted(OLDEST_FLASH_ATTN)} up to {dotted(FLASH_ATTN_TOO_NEW)}"
        return f"needs flash-attn {wanted}, found {dotted(installed.flash_attn)}"
    if reason := _why_not_flash_kernels(call):
        return reason
    if call.bias not in ("none", "slopes"):
        return "gives no gradient for ALiBi slopes" if call.bias_is_slopes else "takes no bias but ALiBi slopes"
    if call.padding:
        return "takes no mask, which padding needs"
    if call.softcap and call.dropout:
        return "takes no dropout with a softcap"
    return _flash_2_head_dim(call)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table.

    Attributes:
        name: as `attention_backend` names it.
        family: what the flags switch.
        why_not: why it cannot run a call (None: it can).
        takes_documents: packed documents come to it as lengths; without, as a mask of queries x keys.
        takes_distances: a distance bias comes to it as it is; without, written out as queries x keys.
        takes_slopes: likewise slopes.
        compiles: torch.compile takes it into its graph.
        keeps_scores: it keeps a number for each query and key for the backward pass.
    """

    name: str
    family: Family
    why_not: WhyNot
    takes_documents: bool = False
    takes_distances: bool = False
    takes_slopes: bool = False
    compiles: bool = True
    keeps_scores: bool = False

    def needs_mask_for(self, call: AttentionCall) -> bool:
        """Whether it takes the packed documents of a call as a mask of queries x keys."""
        return call.packed and not self.takes_documents

    def writes_bias_out_for(self, call: AttentionCall) -> bool:
        """Whether the bias of a call comes to it as queries x keys although it goes by distance."""
        taken = self.takes_distances if call.bias_is_distance else self.takes_slopes
        return call.bias_goes_by_distance and not taken


BACKENDS = (
    Backend("triton", "flash", why_not_triton, takes_documents=True, takes_distances=True, takes_slopes=True),
    Backend("sdpa_flash", "flash", why_not_sdpa_flash),
    Backend("flash_attn", "flash", why_not_flash_attn, takes_documents=True, takes_slopes=True, compiles=False),
    Backend("te_flash", "flash", why_not_te_flash, takes_documents=True, compiles=False),
    Backend("sdpa_efficient", "flash", why_not_sdpa_efficient),
    Backend("sdpa_cudnn", "fused", why_not_sdpa_cudnn),
    Backend("te_fused", "fused", why_not_te_fused, takes_documents=True, compiles=False),
    Backend("unfused", "unfused", runs_always, keeps_scores=True),
    Backend("sdpa_math", "unfused", why_not_sdpa_math, keeps_scores=True),
    Backend("te_unfused", "unfused", why_not_te_unfused, compiles=False, keeps_scores=True),
    Backend("lse_first", "named", why_not_lse_first),
    Backend(
        "reference",
        "named",
        runs_always,
        takes_documents=True,
        takes_distances=True,
        takes_slopes=True,
        keeps_scores=True,
    ),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}
