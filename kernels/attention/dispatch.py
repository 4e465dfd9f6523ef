"""Which backend runs an attention call: the choice among the rows of `support.py`. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .backend_support import BY_NAME, INSTALL_TE, Backend, Family, takes_hopper_kernels, why_no_te
from .call_spec import AttentionCall, Installed
from .flags import AttentionFlags

FAMILIES: tuple[Family, ...] = ("flash", "fused", "unfused")
LONG_SCORES_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One backend in a decision: accepted or refused, and the reason in words."""

    backend: str
    family: Family
    accepted: bool
    reason: str


class NoBackendError(ValueError):
    """No backend may or can run a call; the message holds the reason of every row.

    Attributes:
        rows: the table, all of it refused; empty where the wishes contradict each other.
    """

    def __init__(self, message: str, rows: tuple[Row, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend chosen for one kind of call, with the reason of every row, in the order of preference."""

    call: AttentionCall
    backend: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def needs_mask(self) -> bool:
        """Whether packed documents need a mask of queries x keys in the chosen backend."""
        return BY_NAME[self.backend].needs_mask_for(self.call)

    @property
    def mask_bytes(self) -> int:
        """Bytes of that mask, once for all layers; 0 without one."""
        return self.call.mask_bytes if self.needs_mask else 0

    @property
    def keeps_scores(self) -> bool:
        """Whether the chosen backend keeps a number for each query and key for the backward pass."""
        return BY_NAME[self.backend].keeps_scores

    @property
    def compiles(self) -> bool:
        """Whether torch.compile takes the chosen backend into its graph."""
        return BY_NAME[self.backend].compiles

    def table(self) -> str:
        """Plain text for the log: the call, one line per backend, then the notes."""
        return "\n".join([f"{self.call}: {self.backend}", *self._reasons()])

    def _reasons(self) -> tuple[str, ...]:
        return (*table_lines(self.rows), *(f"  note: {note}" for note in self.notes))


def tables(decisions: Mapping[str, Decision]) -> list[str]:
    """The tables of a model for the log, by kind of call; kinds whose reasons are the same words share a table."""
    calls: dict[tuple[str, ...], list[str]] = {}
    for kind, decision in decisions.items():
        calls.setdefault(decision._reasons(), []).append(f"attention, {kind}: {decision.call}: {decision.backend}")
    return ["\n".join([*heads, *reasons]) for reasons, heads in calls.items()]


def table_lines(rows: tuple[Row, ...]) -> list[str]:
    """The rows of a table, one line each."""
    name_width = max(len(row.backend) for row in rows)
    family_width = max(len(row.family) for row in rows)
    return [
        f"  {'yes' if row.accepted else 'no ':3} {row.backend:{name_width}}  {row.family:{family_width}}  {row.reason}"
        for row in rows
    ]


# ---------------------------------------------------------------- the order

# Within a family, by what was measured (one H200, bf16, causal, forward and backward; docs/benchmarks.md): SDPA's cuDNN
# is 1 to 5 % faster than TransformerEngine's at 1k to 16k tokens and compiles. Where PyTorch's own kernels take a call
# they come before Triton's portable ones until those are measured faster on the card; its Hopper kernels, 0.9
# to 1.1 times cuDNN's speed on an H100 from 2k tokens on, come before them.
_IN_FAMILY: dict[Family, tuple[str, ...]] = {
    "flash": ("sdpa_flash", "flash_attn", "triton", "te_flash", "sdpa_efficient"),
    "fused": ("sdpa_cudnn", "te_fused"),
    "unfused": ("unfused", "sdpa_math", "te_unfused"),
    "named": ("lse_first", "reference"),
}


def preference(
    call: AttentionCall, installed: Installed, transformer_engine: bool | None = None
) -> tuple[tuple[str, ...], str]:
    """Backends in the order they are tried, and why in that order."""
    families, why = _families(call)
    names = [name for family in (*families, "named") for name in _IN_FAMILY[family]]
    if transformer_engine:
        names.sort(key=lambda name: ((*families, "named").index(BY_NAME[name].family), not name.startswith("te_")))
        why = f"{why}; `transformer_engine` puts TransformerEngine first in each family"
    if call.device != "cuda":
        return tuple(names), why
    if call.bias_has_gradient or call.bias_goes_by_distance:
        written_out = {name for name in names if BY_NAME[name].writes_bias_out_for(call)}
        names.sort(key=lambda name: (name != "triton", BY_NAME[name].family == "named", name in written_out))
        why = "a bias that is trained or goes by distance: triton takes it as it is"
    elif call.packed:
        names.sort(key=lambda name: (name != "triton", BY_NAME[name].needs_mask_for(call)))
        why = "packed documents: kernels that need no mask come first"
    elif takes_hopper_kernels(call, installed) and not call.any_length:  # which make a plan for every length
        names.remove("triton")
        names.insert(names.index("sdpa_flash"), "triton")
    elif call.dtype == "fp32":  # CUTLASS, tuned for it
        names.remove("triton")
        names.insert(names.index("sdpa_efficient") + 1, "triton")
    return tuple(names), why


def _families(call: AttentionCall) -> tuple[tuple[Family, ...], str]:
    if call.device == "cuda" and call.capability is not None and call.capability >= (9, 0):
        if call.any_length:
            return ("flash", "fused", "unfused"), "cuDNN prepares every length anew"
        return ("fused", "flash", "unfused"), "Hopper and later: fused > flash > unfused"
    return ("flash", "fused", "unfused"), "before Hopper: flash > fused > unfused"


# ---------------------------------------------------------------- what is removed


def _removals(
    use_flash_attention: bool | None, transformer_engine: bool | None, flags: AttentionFlags, installed: Installed
) -> dict[str, str]:
    """Families and backends that may not be used, each with what removed it."""
    removed: dict[str, str] = {}
    if transformer_engine is False:
        removed |= dict.fromkeys(("te_flash", "te_fused", "te_unfused"), "removed by `transformer_engine: False`")
    removed |= _removed_versions(flags, installed)
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


def _removed_versions(flags: AttentionFlags, installed: Installed) -> dict[str, str]:
    """What NVTE_FLASH_ATTN_V2, _V3 and _V4 leave nothing of."""
    versions = (
        ("NVTE_FLASH_ATTN_V2", flags.flash_v2, installed.flash_attn is not None),
        ("NVTE_FLASH_ATTN_V3", flags.flash_v3, installed.flash_attn_3),
        ("NVTE_FLASH_ATTN_V4", flags.flash_v4, installed.flash_attn_4),
    )
    removed: dict[str, str] = {}
    if not flags.flash_v2:
        removed["flash_attn"] = "removed by NVTE_FLASH_ATTN_V2=0"
    there = [(name, on) for name, on, found in versions if found]
    if there and not any(on for _, on in there):
        removed["te_flash"] = f"removed by {' and '.join(f'{name}=0' for name, _ in there)}"
    return removed


def _usable(installed: Installed, flags: AttentionFlags) -> Installed:
    """The software without the versions of flash-attn that the flags take away."""
    return replace(
        installed,
        flash_attn=installed.flash_attn if flags.flash_v2 else None,
        flash_attn_3=installed.flash_attn_3 and flags.flash_v3,
        flash_attn_4=installed.flash_attn_4 and flags.flash_v4,
    )


def _row(backend: Backend, call: AttentionCall, installed: Installed, wish: str, removed: dict[str, str]) -> Row:
    """Judge one backend: the wish first, then what was removed, then what it can do."""
    name, family = backend.name, backend.family
    if wish != "auto" and wish not in (name, family):
        return Row(name, family, False, f"`attention_backend` asks for {wish}")
    if family == "named" and wish != name:
        return Row(name, family, False, "only by name, as `attention_backend`")
    if removal := removed.get(family) or removed.get(name):
        return Row(name, family, False, removal)
    reason = backend.why_not(call, installed)
    if reason is None and name == "triton" and call.device != "cuda" and wish != name:
        # there for tests: right, and a thousand times slower than anything else
        reason = "in Triton's interpreter only by name, as `attention_backend`"
    return Row(name, family, reason is None, reason or "can run")


# ---------------------------------------------------------------- the choice


def choose(
    call: AttentionCall,
    *,
    use_flash_attention: bool | None = None,
    attention_backend: str = "auto",
    transformer_engine: bool | None = None,
    flags: AttentionFlags,
    installed: Installed,
) -> Decision:
    """Choose the backend for one kind of call.

    Args:
        call: the facts of the call.
        use_flash_attention: None keeps every family, True removes unfused, False removes flash.
        attention_backend: `auto`, one family or one backend; never overruled.
        transformer_engine: True puts TransformerEngine first in each family, False takes it out, None leaves it in.
        flags: what the environment removes.
        installed: the software at hand.

    Raises:
        NoBackendError: nothing is left, or what the keys ask for was removed or cannot run.
        ValueError: `attention_backend` is no name of a family or backend.
    """
    wish = attention_backend
    names = ("auto", *FAMILIES, *BY_NAME)
    if wish not in names:
        raise ValueError(f"`attention_backend` ({wish}) must be one of {', '.join(names)}.")
    if transformer_engine and (problem := why_no_te(installed)):
        raise NoBackendError(
            f"`transformer_engine` (True) cannot be had: {problem.removesuffix(f' ({INSTALL_TE})')}; "
            f"use transformer_engine=null, or {INSTALL_TE}."
        )
    removed = _removals(use_flash_attention, transformer_engine, flags, installed)
    family = BY_NAME[wish].family if wish in BY_NAME else wish
    if reason := removed.get(wish) or removed.get(family):
        of = f"`attention_backend` ({wish}) is" + (f" of the {family} family, which is" if family in removed else "")
        raise NoBackendError(f"{of} {reason}; drop one of the two.")
    order, why = preference(call, installed, transformer_engine)
    usable = _usable(installed, flags)
    rows = tuple(_row(BY_NAME[name], call, usable, wish, removed) for name in order)
    chosen = next((row for row in rows if row.accepted), None)
    if chosen is None:
        raise NoBackendError("\n".join([f"no attention backend for {call}:", *table_lines(rows)]), rows)
    explained = why if wish == "auto" else f"`attention_backend` asks for {wish}"
    rows = tuple(replace(row, reason=f"chosen ({explained})") if row is chosen else row for row in rows)
    notes = _memory_notes(call, BY_NAME[chosen.backend])
    if chosen.backend == "triton" and call.device == "cuda":
        kernels = "Hopper" if takes_hopper_kernels(call, usable) else "portable"
        notes = (*notes, f"triton runs its {kernels} kernels here.")
    return Decision(call, chosen.backend, rows, notes)


def _memory_notes(call: AttentionCall, chosen: Backend) -> tuple[str, ...]:
    """What grows with the square of the length in the chosen backend."""
    notes: list[str] = []
    if chosen.needs_mask_for(call):
        notes.append(
            f"one mask of {_gib(call.mask_bytes)} for all layers keeps packed documents apart; the scores "
            "between them are computed and thrown away."
        )
    if chosen.writes_bias_out_for(call):
        what = "ALiBi slopes" if call.bias_is_slopes else "distance bias"
        notes.append(f"{chosen.name} takes the {what} written out: {_gib(call.bias_bytes)} per layer and copy.")
    if chosen.family == "unfused" and call.score_bytes >= LONG_SCORES_BYTES:
        notes.append(f"{chosen.name} holds the whole score matrix: {_gib(call.score_bytes, 1)} per layer and copy.")
    return tuple(notes)


def _gib(count: int, digits: int = 2) -> str:
    return f"{count / 2**30:.{digits}f} GiB"
