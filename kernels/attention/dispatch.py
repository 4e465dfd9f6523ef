"""Which backend runs an attention call, and why not the others: a table of pure functions, no torch, no device.

The limits of PyTorch's SDPA backends are those its own dispatcher checks (aten/src/ATen/native/transformers:
cuda/sdp_utils.cpp and sdp_utils_cpp.cpp), with known wrong results added. The tests compare
the CPU rows with what PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .call import AttentionCall, Installed
from .flags import AttentionFlags

Family = Literal["flash", "fused", "unfused", "named"]
WhyNot = Callable[[AttentionCall, Installed], "str | None"]

FIRST_SM, LAST_SM = (8, 0), (12, 1)  # what PyTorch builds its flash and cuDNN kernels for
LONG_SCORES_BYTES = 1 << 30


class NoBackendError(ValueError):
    """No backend may or can run a call; the message holds the reason of every row."""


# ---------------------------------------------------------------- why a backend cannot run a call


def _sdpa_shape(call: AttentionCall) -> str | None:
    if call.window is not None:
        return "SDPA knows no window"
    if call.causal and call.queries != call.keys:
        return f"SDPA aligns the causal mask top-left, wrong for {call.queries} queries of {call.keys} keys"
    return None


def _gpu(call: AttentionCall) -> str | None:
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not FIRST_SM <= call.capability <= LAST_SM:
        return f"needs sm_80 to sm_121, not sm_{call.capability[0]}{call.capability[1]}"
    if call.dtype not in ("bf16", "fp16"):
        return f"takes bf16 and fp16, not {call.dtype}"
    return None


def _sdpa_determinism(call: AttentionCall, installed: Installed) -> str | None:
    if call.device == "cuda" and call.training and call.deterministic and not installed.deterministic_algorithms:
        return "its backward pass is deterministic only under torch.use_deterministic_algorithms(True)"
    return None


def _why_not_flash_on_cpu(call: AttentionCall) -> str | None:
    refused = [f"dropout ({call.dropout:g})"] if call.dropout else []
    if call.bias == "dense_with_gradient":
        refused.append("a bias with gradient")
    return f"SDPA flash on a CPU takes no {' and no '.join(refused)}" if refused else None


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
    if call.head_dim > 256:
        return f"takes heads up to 256 wide, not {call.head_dim}"
    sm = call.capability or FIRST_SM
    little_shared_memory = (8, 6) <= sm <= (8, 9) or sm >= (12, 0)
    if little_shared_memory and call.training and call.head_dim > 192 and (call.dropout or call.head_dim <= 224):
        return f"cannot train heads {call.head_dim} wide on sm_{sm[0]}{sm[1]}"
    return None


def why_not_sdpa_efficient(call: AttentionCall, installed: Installed) -> str | None:
    """PyTorch's memory-efficient attention (CUTLASS), CUDA only."""
    if call.device != "cuda" or call.capability is None:
        return f"needs a CUDA device, not {call.device}"
    if not (5, 0) <= call.capability <= LAST_SM:
        return f"needs sm_50 to sm_121, not sm_{call.capability[0]}{call.capability[1]}"
    if call.dtype == "fp64" or (call.dtype == "bf16" and call.capability < FIRST_SM):
        return f"does not take {call.dtype} on sm_{call.capability[0]}{call.capability[1]}"
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
    if call.head_dim > 128 or call.head_dim % 8:
        return f"takes head widths up to 128 that are multiples of 8, not {call.head_dim}"
    if call.bias == "dense_with_gradient":
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


def runs_always(call: AttentionCall, installed: Installed) -> str | None:
    """Plain torch, on every device and with every option."""
    return None


def why_not_sdpa_math(call: AttentionCall, installed: Installed) -> str | None:
    """SDPA's own composition of the three steps."""
    return _sdpa_shape(call)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of the table: a name, its family, and why it cannot run a call (None: it can)."""

    name: str
    family: Family
    why_not: WhyNot


BACKENDS = (
    Backend("sdpa_flash", "flash", why_not_sdpa_flash),
    Backend("sdpa_efficient", "flash", why_not_sdpa_efficient),
    Backend("sdpa_cudnn", "fused", why_not_sdpa_cudnn),
    Backend("unfused", "unfused", runs_always),
    Backend("sdpa_math", "unfused", why_not_sdpa_math),
    Backend("reference", "named", runs_always),
)
FAMILIES: tuple[Family, ...] = ("flash", "fused", "unfused")
_FAMILY_OF: dict[str, Family] = {backend.name: backend.family for backend in BACKENDS}


@dataclass(frozen=True, slots=True)
class Row:
    """One backend in a decision: accepted or refused, and the reason in words."""

    backend: str
    family: Family
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend chosen for one kind of call, with the reason of every row, in the order of preference."""

    call: AttentionCall
    backend: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Plain text for the log: the call, one line per backend, then the notes."""
        return "\n".join(
            [f"{self.call}: {self.backend}", *_lines(self.rows), *(f"  note: {note}" for note in self.notes)]
        )


def _lines(rows: tuple[Row, ...]) -> list[str]:
    name_width = max(len(row.backend) for row in rows)
    family_width = max(len(row.family) for row in rows)
    return [
        f"  {'yes' if row.accepted else 'no ':3} {row.backend:{name_width}}  {row.family:{family_width}}  {row.reason}"
        for row in rows
    ]


# ---------------------------------------------------------------- the choice


def preference(call: AttentionCall) -> tuple[tuple[Family, ...], str]:
    """Families in the order they are tried, and why in that order."""
    if call.device == "cuda" and call.capability is not None and call.capability >= (9, 0):
        if call.any_length:
            return ("flash", "fused", "unfused"), "cuDNN prepares every length anew"
        return ("fused", "flash", "unfused"), "Hopper and later: fused > flash > unfused"
    return ("flash", "fused", "unfused"), "before Hopper: flash > fused > unfused"


def _removals(use_flash_attention: bool | None, flags: AttentionFlags) -> dict[Family, str]:
    """Families that may not be used, each with what removed it."""
    removed: dict[Family, str] = {}
    if use_flash_attention is False:
        removed["flash"] = "removed by `use_flash_attention: False`"
    if use_flash_attention is True:
        removed["unfused"] = "removed by `use_flash_attention: True`"
    switches: tuple[tuple[Family, bool, str], ...] = (
        ("flash", flags.flash, "NVTE_FLASH_ATTN"),
        ("fused", flags.fused, "NVTE_FUSED_ATTN"),
        ("unfused", flags.unfused, "NVTE_UNFUSED_ATTN"),
    )
    for family, on, name in switches:
        if not on:
            removed[family] = f"removed by {name}=0"
    return removed


def _row(backend: Backend, call: AttentionCall, installed: Installed, wish: str, removed: dict[Family, str]) -> Row:
    """Judge one backend: the wish first, then what was removed, then what it can do."""
    name, family = backend.name, backend.family
    if wish != "auto" and wish not in (name, family):
        return Row(name, family, False, f"`attention_backend` asks for {wish}")
    if family == "named" and wish != name:
        return Row(name, family, False, "only by name, as `attention_backend`")
    if family in removed:
        return Row(name, family, False, removed[family])
    reason = backend.why_not(call, installed)
    return Row(name, family, reason is None, reason or "can run")


def choose(
    call: AttentionCall,
    *,
    use_flash_attention: bool | None = None,
    attention_backend: str = "auto",
    flags: AttentionFlags,
    installed: Installed,
) -> Decision:
    """Choose the backend for one kind of call.

    Args:
        call: the facts of the call.
        use_flash_attention: None keeps every family, True removes unfused, False removes flash.
        attention_backend: `auto`, one family or one backend; never overruled.
        flags: what the environment removes.
        installed: the software at hand.

    Raises:
        NoBackendError: nothing is left, or what `attention_backend` asks for was removed or cannot run.
    """
    names = ("auto", *FAMILIES, *_FAMILY_OF)
    if attention_backend not in names:
        raise ValueError(f"`attention_backend` ({attention_backend}) must be one of {', '.join(names)}.")
    removed = _removals(use_flash_attention, flags)
    wished_family = _FAMILY_OF.get(attention_backend, attention_backend)
    if (reason := removed.get(wished_family)) is not None:  # pyright: ignore[reportArgumentType]
        raise NoBackendError(
            f"`attention_backend` ({attention_backend}) is of the {wished_family} family, which is {reason}; "
            "drop one of the two."
        )
    order, why = preference(call)
    ranked = sorted(BACKENDS, key=lambda backend: (*order, "named").index(backend.family))
    rows = tuple(_row(backend, call, installed, attention_backend, removed) for backend in ranked)
    chosen = next((row for row in rows if row.accepted), None)
    if chosen is None:
        raise NoBackendError("\n".join([f"no attention backend for {call}:", *_lines(rows)]))
    explained = why if attention_backend == "auto" else f"`attention_backend` asks for {attention_backend}"
    rows = tuple(Row(row.backend, row.family, True, f"chosen ({explained})") if row is chosen else row for row in rows)
    return Decision(call, chosen.backend, rows, _memory_notes(call, chosen))


def _memory_notes(call: AttentionCall, chosen: Row) -> tuple[str, ...]:
    notes: list[str] = []
    if call.packed:
        notes.append(
            f"one mask of {call.mask_bytes / 2**30:.2f} GiB for all layers keeps packed documents apart; the scores "
            "between them are computed and thrown away."
        )
    if chosen.family == "unfused" and call.score_bytes >= LONG_SCORES_BYTES:
        gibibytes = call.score_bytes / 2**30
        notes.append(f"{chosen.backend} holds the whole score matrix: {gibibytes:.1f} GiB per layer and copy.")
    return tuple(notes)
