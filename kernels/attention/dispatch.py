"""Backend selection for an attention call, from the table in `backend_support.py`. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .backend_support import (
    BACKENDS,
    BACKENDS_BY_NAME,
    Backend,
    BackendFamily,
    atomic_is_fastest,
    is_faster_than_cudnn,
    uses_hopper_kernels,
)
from .call_spec import AttentionCall, InstalledSoftware, MeasuredTimes
from .flags import AttentionFlags
from .te_support import INSTALL_TE, why_not_te

FAMILIES: tuple[BackendFamily, ...] = ("flash", "fused", "unfused")
LARGE_SCORES_BYTES = 1 << 30
FP8_BACKEND = "te_fused"
"""The only backend that multiplies in fp8."""


@dataclass(frozen=True, slots=True)
class BackendCandidate:
    """One backend of a decision: accepted or rejected, with the reason."""

    backend: str
    family: BackendFamily
    accepted: bool
    reason: str


class NoBackendError(ValueError):
    """No backend is allowed or able to run a call; the message gives the reason for each one.

    Attributes:
        rows: all backends, each rejected; empty when the settings contradict each other.
    """

    def __init__(self, message: str, rows: tuple[BackendCandidate, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class BackendSelection:
    """The backend selected for one kind of call, and all candidates with their reasons in order of preference.

    Attributes:
        notes: what the choice costs, for the log.
        warning: a setting that the device cannot meet; empty if there is none.
    """

    call: AttentionCall
    backend: str
    rows: tuple[BackendCandidate, ...]
    notes: tuple[str, ...] = ()
    warning: str = ""

    @property
    def needs_mask(self) -> bool:
        """True if the selected backend needs packed documents as a (queries, keys) mask."""
        return BACKENDS_BY_NAME[self.backend].needs_document_mask(self.call)

    @property
    def mask_bytes(self) -> int:
        """Size of that mask, which all layers share; 0 without one."""
        return self.call.mask_bytes if self.needs_mask else 0

    @property
    def saves_scores(self) -> bool:
        """True if the selected backend saves a (queries, keys) matrix per head for the backward pass."""
        return BACKENDS_BY_NAME[self.backend].saves_scores

    @property
    def supports_compile(self) -> bool:
        """True if torch.compile can trace the selected backend without a graph break."""
        return BACKENDS_BY_NAME[self.backend].supports_compile

    def without_fp8(self) -> BackendSelection:
        """Return the selection of a layer that multiplies in the dtype of the activations, by the same backend."""
        return replace(self, call=replace(self.call, fp8=False)) if self.call.fp8 else self

    def table(self) -> str:
        """Format for the log: the call, one line per backend, then the notes."""
        return "\n".join([f"{self.call}: {self.backend}", *self._reasons()])

    def _reasons(self) -> tuple[str, ...]:
        return (*format_candidates(self.rows), *(f"  note: {note}" for note in self.notes))


def format_selections(decisions: Mapping[str, BackendSelection]) -> list[str]:
    """Format the decisions of a model for the log; kinds of call with identical reasons share one table."""
    calls: dict[tuple[str, ...], list[str]] = {}
    for kind, decision in decisions.items():
        calls.setdefault(decision._reasons(), []).append(f"attention, {kind}: {decision.call}: {decision.backend}")
    return ["\n".join([*heads, *reasons]) for reasons, heads in calls.items()]


def format_candidates(rows: tuple[BackendCandidate, ...]) -> list[str]:
    """Format the rows, one line each, in aligned columns."""
    name_width = max(len(row.backend) for row in rows)
    family_width = max(len(row.family) for row in rows)
    return [
        f"  {'yes' if row.accepted else 'no ':3} {row.backend:{name_width}}  {row.family:{family_width}}  {row.reason}"
        for row in rows
    ]


# ---------------------------------------------------------------- order of preference


def preference_order(
    call: AttentionCall, installed: InstalledSoftware, transformer_engine: bool | None = None
) -> tuple[tuple[str, ...], str]:
    """Return the backends in order of preference, and the reason for that order."""
    families, why = _families(call)
    names = [row.name for family in (*families, "named") for row in BACKENDS if row.family == family]
    if transformer_engine:
        names.sort(
            key=lambda name: ((*families, "named").index(BACKENDS_BY_NAME[name].family), not name.startswith("te_"))
        )
        why = f"{why}; `transformer_engine` puts TransformerEngine first in each family"
    if call.device != "cuda":
        return tuple(names), why
    if call.bias_requires_grad or call.bias_is_relative:
        need_dense_bias = {name for name in names if BACKENDS_BY_NAME[name].needs_dense_bias(call)}
        names.sort(
            key=lambda name: (name != "triton", BACKENDS_BY_NAME[name].family == "named", name in need_dense_bias)
        )
        why = "trained or distance-dependent bias: triton supports it natively"
    elif call.packed:
        names.sort(key=lambda name: (name != "triton", BACKENDS_BY_NAME[name].needs_document_mask(call)))
        why = "packed documents: kernels that need no mask come first"
    elif call.dropout and call.split:
        names.sort(key=lambda name: name != "triton")
        why = "dropout on ranks that share the heads or tokens: triton draws the mask of one process"
    elif uses_hopper_kernels(call, installed) and not call.any_length:  # their tile schedule is built per length
        names.remove("triton")
        if is_faster_than_cudnn(call, installed) and not transformer_engine:
            names.insert(0, "triton")
            why = "measured on Hopper: triton is faster than cuDNN for this head width, mask and length"
        else:
            names.insert(names.index("sdpa_flash"), "triton")
            if atomic_is_fastest(call, installed) and not transformer_engine:
                names.remove("triton_atomic")
                names.insert(0, "triton_atomic")
                why = "measured on Hopper: triton_atomic is fastest for this head width, mask and length"
    elif call.dtype == "fp32":  # the memory-efficient CUTLASS kernels are tuned for fp32
        names.remove("triton")
        names.insert(names.index("sdpa_efficient") + 1, "triton")
    return tuple(names), why


def _families(call: AttentionCall) -> tuple[tuple[BackendFamily, ...], str]:
    if call.device == "cuda" and call.capability is not None and call.capability >= (9, 0):
        if call.any_length:
            return ("flash", "fused", "unfused"), "cuDNN builds a new plan for every length"
        return ("fused", "flash", "unfused"), "Hopper and later: fused > flash > unfused"
    return ("flash", "fused", "unfused"), "before Hopper: flash > fused > unfused"


# ---------------------------------------------------------------- removal by keys and flags


def _removals(
    use_flash_attention: bool | None,
    transformer_engine: bool | None,
    flags: AttentionFlags,
    installed: InstalledSoftware,
) -> dict[str, str]:
    """Return the families and backends that keys and flags disable, each with the reason."""
    removed: dict[str, str] = {}
    if transformer_engine is False:
        removed |= dict.fromkeys(("te_flash", "te_fused", "te_unfused"), "removed by `transformer_engine: False`")
    removed |= _removed_versions(flags, installed)
    if use_flash_attention is False:
        removed["flash"] = "removed by `use_flash_attention: False`"
    if use_flash_attention is True:
        removed["unfused"] = "removed by `use_flash_attention: True`"
    switches: tuple[tuple[BackendFamily, bool, str], ...] = (
        ("flash", flags.flash, "NVTE_FLASH_ATTN"),
        ("fused", flags.fused, "NVTE_FUSED_ATTN"),
        ("unfused", flags.unfused, "NVTE_UNFUSED_ATTN"),
    )
    for family, on, name in switches:
        if not on:
            removed[family] = f"removed by {name}=0"
    return removed


def _removed_versions(flags: AttentionFlags, installed: InstalledSoftware) -> dict[str, str]:
    """Return the backends of which NVTE_FLASH_ATTN_V2, _V3 and _V4 leave no installed version."""
    versions = (
        ("NVTE_FLASH_ATTN_V2", flags.flash_v2, installed.flash_attn is not None),
        ("NVTE_FLASH_ATTN_V3", flags.flash_v3, installed.flash_attn_3),
        ("NVTE_FLASH_ATTN_V4", flags.flash_v4, installed.flash_attn_4),
    )
    removed: dict[str, str] = {}
    if not flags.flash_v2:
        removed["flash_attn"] = "removed by NVTE_FLASH_ATTN_V2=0"
    present = [(name, on) for name, on, found in versions if found]
    if present and not any(on for _, on in present):
        removed["te_flash"] = f"removed by {' and '.join(f'{name}=0' for name, _ in present)}"
    return removed


def _usable(installed: InstalledSoftware, flags: AttentionFlags) -> InstalledSoftware:
    """Return the installed software without the flash-attn versions that the flags disable."""
    return replace(
        installed,
        flash_attn=installed.flash_attn if flags.flash_v2 else None,
        flash_attn_3=installed.flash_attn_3 and flags.flash_v3,
        flash_attn_4=installed.flash_attn_4 and flags.flash_v4,
    )


def _row(
    backend: Backend, call: AttentionCall, installed: InstalledSoftware, requested: str, removed: dict[str, str]
) -> BackendCandidate:
    """Check one backend: against `attention_backend`, then the removals, then its own limits."""
    name, family = backend.name, backend.family
    if requested != "auto" and requested not in (name, family):
        return BackendCandidate(name, family, False, f"not `attention_backend` ({requested})")
    if family == "named" and requested != name:
        return BackendCandidate(name, family, False, "available only by name, with `attention_backend`")
    if removal := removed.get(family) or removed.get(name):
        return BackendCandidate(name, family, False, removal)
    if call.fp8 and name != FP8_BACKEND:
        return BackendCandidate(name, family, False, "does not multiply in fp8 (`fp8_dot_product_attention`)")
    reason = backend.why_not(call, installed)
    if reason is None and name == "triton" and call.device != "cuda" and requested != name:
        # interpreter mode is for tests: correct, but a thousand times slower than any other backend
        reason = "in Triton's interpreter available only by name, with `attention_backend`"
    return BackendCandidate(name, family, reason is None, reason or "can run")


# ---------------------------------------------------------------- measured times

MEASURED_MARGIN = 1.02
"""Ratio of measured times up to which the order of the table stays: times of two measurements differ by as much."""


def _fastest(
    call: AttentionCall,
    rows: tuple[BackendCandidate, ...],
    first: BackendCandidate,
    times: MeasuredTimes,
    *,
    prefers_te: bool,
) -> tuple[BackendCandidate, str]:
    """Choose within the family of the first accepted row what the measured times of the card say is fastest.

    Backends that expand a bias to a dense one, which the first one does not, do not take part.

    Returns:
        the chosen row, and what the times say, to follow the reason of the order.
    """
    if prefers_te:
        return first, f"; {times.source} is not asked, because of `transformer_engine: True`"
    near, why = times.nearest(call)
    if near is None:
        return first, f"; {times.source} decides nothing here: {why}"
    dense = {row: BACKENDS_BY_NAME[row.backend].needs_dense_bias(call) for row in rows}
    family = [row for row in rows if row.accepted and row.family == first.family and dense[row] <= dense[first]]
    found = {row: near.time(row.backend, training=call.training) for row in family}
    measured = {row: time for row, time in found.items() if time is not None}
    if first not in measured:
        return first, f"; {times.source} has no time of it for {near}"
    best = min(measured, key=lambda row: measured[row])
    best = first if measured[first] <= MEASURED_MARGIN * measured[best] else best
    ratios = {row.backend: time / measured[best] for row, time in measured.items() if row != best}
    others = ", ".join(f"{name} takes {ratio:.2f} times as long" for name, ratio in ratios.items())
    return best, f"; by {times.source}, {near}: {others or 'nothing else of its family is measured'}"


# ---------------------------------------------------------------- selection


def select_backend(
    call: AttentionCall,
    *,
    use_flash_attention: bool | None = None,
    attention_backend: str = "auto",
    transformer_engine: bool | None = None,
    flags: AttentionFlags,
    installed: InstalledSoftware,
) -> BackendSelection:
    """Select the backend for one kind of call.

    Args:
        call: specification of the call.
        use_flash_attention: None keeps every family, True removes unfused, False removes flash. On a CPU, whose only
            flash kernel supports neither dropout nor a trained bias, True falls back to unfused, with a warning.
        attention_backend: `auto`, one family or one backend; never overridden.
        transformer_engine: True prefers TransformerEngine within each family, False removes it, None does neither.
        flags: the NVTE_* switches, which can remove backends.
        installed: versions of the installed software, and measured times of the card, which decide within the family
            of the first backend that is left, unless `attention_backend` names one.

    Raises:
        NoBackendError: no backend is left, or the requested one was removed or cannot run the call.
        ValueError: `attention_backend` is not the name of a family or backend.
    """
    requested = attention_backend
    names = ("auto", *FAMILIES, *BACKENDS_BY_NAME)
    if requested not in names:
        raise ValueError(f"`attention_backend` ({requested}) must be one of {', '.join(names)}.")
    if transformer_engine and (problem := why_not_te(installed)):
        raise NoBackendError(
            f"`transformer_engine` (True) is not available: {problem.removesuffix(f' ({INSTALL_TE})')}; "
            f"use transformer_engine=null, or {INSTALL_TE}."
        )
    removed = _removals(use_flash_attention, transformer_engine, flags, installed)
    family = BACKENDS_BY_NAME[requested].family if requested in BACKENDS_BY_NAME else requested
    if reason := removed.get(requested) or removed.get(family):
        subject = f"`attention_backend` ({requested}) is"
        if family in removed:
            subject += f" of the {family} family, which is"
        raise NoBackendError(f"{subject} {reason}; drop one of the two.")
    order, why = preference_order(call, installed, transformer_engine)
    usable = _usable(installed, flags)
    rows = tuple(_row(BACKENDS_BY_NAME[name], call, usable, requested, removed) for name in order)
    chosen, warning = next((row for row in rows if row.accepted), None), ""
    if chosen is None and use_flash_attention and requested == "auto" and call.device == "cpu":
        missing = next(row.reason for row in rows if row.backend == "sdpa_flash")
        if flags.flash and flags.unfused:
            warning = f"`use_flash_attention` (True) cannot be met here: {missing}; attention is unfused"
            del removed["unfused"]
            rows = tuple(_row(BACKENDS_BY_NAME[name], call, usable, requested, removed) for name in order)
            chosen, why = next((row for row in rows if row.accepted), None), f"{why}; {missing}"
    if chosen is None and call.fp8:
        reason = next(row.reason for row in rows if row.backend == FP8_BACKEND)
        raise NoBackendError(
            f"`fp8_dot_product_attention` (True) is not available in {FP8_BACKEND}, its only backend: {reason}; use "
            "model.fp8_dot_product_attention=false.",
            rows,
        )
    if chosen is None:
        raise NoBackendError("\n".join([f"no attention backend for {call}:", *format_candidates(rows)]), rows)
    explained = why if requested == "auto" else f"requested by `attention_backend` ({requested})"
    if installed.measured is not None and requested not in BACKENDS_BY_NAME:
        prefers_te = bool(transformer_engine)
        chosen, measured = _fastest(call, rows, chosen, installed.measured, prefers_te=prefers_te)
        explained += measured
    rows = tuple(replace(row, reason=f"chosen ({explained})") if row is chosen else row for row in rows)
    notes = (
        *_memory_notes(call, BACKENDS_BY_NAME[chosen.backend]),
        *_dropout_notes(call, BACKENDS_BY_NAME[chosen.backend]),
    )
    if chosen.backend == "triton" and call.device == "cuda":
        kernels = "Hopper" if uses_hopper_kernels(call, usable) else "portable"
        notes = (*notes, f"triton runs its {kernels} kernels here.")
    if chosen.backend == "triton_atomic" and call.training:
        notes = (*notes, "triton_atomic adds up the gradients of queries in the order of arrival: not deterministic.")
    return BackendSelection(call, chosen.backend, rows, notes, warning)


def _dropout_notes(call: AttentionCall, chosen: Backend) -> tuple[str, ...]:
    """Return a note if the dropout mask of the selected backend depends on how ranks share heads and tokens."""
    if not call.dropout or chosen.keyed_dropout:
        return ()
    if call.split:
        return (f"ranks that share the heads or tokens drop the same weights of their shares with {chosen.name}.",)
    return (
        f"dropout masks of {chosen.name} differ if several ranks share the heads or tokens; those of triton do not.",
    )


def _memory_notes(call: AttentionCall, chosen: Backend) -> tuple[str, ...]:
    """Return one note per tensor of the selected backend that grows with the square of the sequence length."""
    notes: list[str] = []
    if chosen.needs_document_mask(call):
        notes.append(
            f"one mask of {_gib(call.mask_bytes)} for all layers separates packed documents; the scores "
            "between documents are computed and discarded."
        )
    if chosen.needs_dense_bias(call):
        bias = "ALiBi slopes" if call.bias_is_alibi else "distance bias"
        notes.append(
            f"{chosen.name} expands the {bias} to a dense bias: {_gib(call.dense_bias_bytes)} per layer and copy."
        )
    if chosen.family == "unfused" and call.score_bytes >= LARGE_SCORES_BYTES:
        notes.append(f"{chosen.name} stores the whole score matrix: {_gib(call.score_bytes, 1)} per layer and copy.")
    return tuple(notes)


def _gib(count: int, digits: int = 2) -> str:
    return f"{count / 2**30:.{digits}f} GiB"
