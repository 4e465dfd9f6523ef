"""TransformerEngine's environment variables for attention: read here, once, and nowhere else.

A flag can only take backends away, as in TransformerEngine; the names and defaults are those of its docs. The scope in
which its adapter sets them is here too, so that no other file touches `os.environ`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

FAMILY_FLAGS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
VERSION_FLAGS = ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
ACTING_FLAGS = (
    *FAMILY_FLAGS,
    *VERSION_FLAGS,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_MASKED_SOFTMAX_FUSION",
    "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
)
"""Switches that do here what they do in TransformerEngine; all but the last two are on unless set to 0."""

_IN_TE = "only TransformerEngine's own backends (te_flash, te_fused, te_unfused) read it"
_FP8 = "it is about attention in fp8, which no backend here computes"
_LAYERS = "it is about TransformerEngine's layers, of which only the attention is used"
_INERT_FLAGS = {
    "NVTE_FUSED_ATTN_BACKEND": "TransformerEngine itself no longer reads it since 2.16",
    "NVTE_FUSED_ATTN_USE_FAv2_BWD": _IN_TE,
    "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT": "TransformerEngine itself read it with cuDNN 8 only",
    "NVTE_APPLY_QK_LAYER_SCALING": "an fp16 trick; the softmax here is in fp32 and does not need it",
    "NVTE_FP8_DPA_BWD": _FP8,
    "NVTE_DPA_FP8CS_O_in_F16": _FP8,
    "NVTE_DPA_FP8_RECIPE": _FP8,
    "NVTE_DPA_FP8_FORMAT": _FP8,
    "NVTE_DPA_FP8DS_AMAX_ALGO": _FP8,
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": _FP8,
    "NVTE_DPA_FP8DS_REDUCE_AMAX": _FP8,
    "NVTE_UnfusedDPA_Emulate_FP8": _FP8,
    "NVTE_BIAS_GELU_NVFUSION": _LAYERS,
    "NVTE_BIAS_DROPOUT_FUSION": _LAYERS,
    "NVTE_TORCH_COMPILE": _LAYERS,
    "NVTE_BATCH_MHA_P2P_COMM": "it is about context parallelism, which no backend here does",
    "NVTE_CPU_OFFLOAD_V1": _LAYERS,
}
KNOWN_FLAGS = (*ACTING_FLAGS, *_INERT_FLAGS)
_OFF_UNLESS_SET = ("NVTE_DEBUG", "NVTE_DEBUG_LEVEL")


@dataclass(frozen=True, slots=True)
class AttentionFlags:
    """What the environment says about attention.

    Attributes:
        flash: NVTE_FLASH_ATTN; False removes the flash family.
        fused: NVTE_FUSED_ATTN; False removes the fused (cuDNN) family.
        unfused: NVTE_UNFUSED_ATTN; False removes the unfused family.
        allow_nondeterministic: NVTE_ALLOW_NONDETERMINISTIC_ALGO; False asks for equal bits from equal calls.
        flash_v2: NVTE_FLASH_ATTN_V2; False keeps `flash_attn` and `te_flash` from FlashAttention 2.
        flash_v3: NVTE_FLASH_ATTN_V3; False keeps `te_flash` from FlashAttention 3.
        flash_v4: NVTE_FLASH_ATTN_V4; False keeps `te_flash` from FlashAttention 4.
        masked_softmax_fusion: NVTE_MASKED_SOFTMAX_FUSION; False keeps `unfused` from the fused softmax.
        debug: NVTE_DEBUG times NVTE_DEBUG_LEVEL; from 1 on the reasons are printed, not only written to the log.
        given: every NVTE_* variable that is set, name and value, sorted.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    allow_nondeterministic: bool = True
    flash_v2: bool = True
    flash_v3: bool = True
    flash_v4: bool = True
    masked_softmax_fusion: bool = True
    debug: int = 0
    given: tuple[tuple[str, str], ...] = ()

    def notes(self) -> tuple[str, ...]:
        """One line for each variable that is set and does not do what its reader may expect."""
        lines: list[str] = []
        if not self.flash and self.fused:
            lines.append(
                "NVTE_FLASH_ATTN=0 removes the flash family only; cuDNN stays (NVTE_FUSED_ATTN=0 removes that too)."
            )
        names = [name for name, _ in self.given]
        for name, partner in (_OFF_UNLESS_SET, _OFF_UNLESS_SET[::-1]):
            if name in names and partner not in names:
                lines.append(f"{name} has no effect without {partner}: their product is the level.")
        for name, value in self.given:
            if name in _INERT_FLAGS:
                lines.append(f"{name}={value} has no effect on the choice: {_INERT_FLAGS[name]}.")
            elif name not in ACTING_FLAGS:
                close = difflib.get_close_matches(name, KNOWN_FLAGS, n=1, cutoff=0.75)
                hint = f"; did you mean {close[0]}?" if close else "."
                lines.append(f"{name}={value} is not a variable of TransformerEngine's attention{hint}")
        return tuple(lines)


def read_flags(environment: Mapping[str, str] | None = None) -> AttentionFlags:
    """Read the NVTE_* variables.

    Args:
        environment: where to read; None is this process's environment.

    Raises:
        ValueError: a switch is neither 0 nor 1, or a level not a whole number.
    """
    environment = os.environ if environment is None else environment

    def switch(name: str) -> bool:
        value = environment.get(name, "1").strip()
        if value not in ("0", "1"):
            raise ValueError(f"`{name}` ({value}) must be 0 or 1; unset it for the default, 1.")
        return value == "1"

    def level(name: str) -> int:
        value = environment.get(name, "0").strip()
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"`{name}` ({value}) must be 0, 1 or 2; unset it for the default, 0.")
        return int(value)

    return AttentionFlags(
        flash=switch("NVTE_FLASH_ATTN"),
        fused=switch("NVTE_FUSED_ATTN"),
        unfused=switch("NVTE_UNFUSED_ATTN"),
        allow_nondeterministic=switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        flash_v2=switch("NVTE_FLASH_ATTN_V2"),
        flash_v3=switch("NVTE_FLASH_ATTN_V3"),
        flash_v4=switch("NVTE_FLASH_ATTN_V4"),
        masked_softmax_fusion=switch("NVTE_MASKED_SOFTMAX_FUSION"),
        debug=level("NVTE_DEBUG") * level("NVTE_DEBUG_LEVEL"),
        given=tuple(sorted((name, value) for name, value in environment.items() if name.startswith("NVTE_"))),
    )


def cudnn_is_named() -> bool:
    """Whether the caller has told TransformerEngine where cuDNN is."""
    return "CUDNN_HOME" in os.environ or "CUDNN_PATH" in os.environ


@contextmanager
def environment_override(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables within a scope and put back what was there: TransformerEngine reads NVTE_* while it runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
