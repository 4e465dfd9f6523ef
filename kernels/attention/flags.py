"""TransformerEngine's environment variables for attention: read here, once, and nowhere else.

A flag can only take a family of backends away, as in TransformerEngine; the names and defaults are those of its docs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

ACTING_FLAGS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")

_WITHOUT_TE = "read by TransformerEngine, which takes no part in this run"
_INERT_FLAGS = {
    "NVTE_FLASH_ATTN_V2": "chooses among the versions of the flash-attn package, which takes no part in this run",
    "NVTE_FLASH_ATTN_V3": "chooses among the versions of the flash-attn package, which takes no part in this run",
    "NVTE_FLASH_ATTN_V4": "chooses among the versions of the flash-attn package, which takes no part in this run",
    "NVTE_FUSED_ATTN_BACKEND": "TransformerEngine itself no longer reads it since 2.16",
    "NVTE_FUSED_ATTN_USE_FAv2_BWD": _WITHOUT_TE,
    "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT": _WITHOUT_TE,
    "NVTE_APPLY_QK_LAYER_SCALING": "an fp16 trick; the softmax here is in fp32 and does not need it",
    "NVTE_FP8_DPA_BWD": _WITHOUT_TE,
    "NVTE_DPA_FP8CS_O_in_F16": _WITHOUT_TE,
    "NVTE_DPA_FP8_RECIPE": _WITHOUT_TE,
    "NVTE_DPA_FP8_FORMAT": _WITHOUT_TE,
    "NVTE_DPA_FP8DS_AMAX_ALGO": _WITHOUT_TE,
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": _WITHOUT_TE,
    "NVTE_DPA_FP8DS_REDUCE_AMAX": _WITHOUT_TE,
    "NVTE_UnfusedDPA_Emulate_FP8": _WITHOUT_TE,
    "NVTE_MASKED_SOFTMAX_FUSION": _WITHOUT_TE,
    "NVTE_BIAS_GELU_NVFUSION": _WITHOUT_TE,
    "NVTE_BIAS_DROPOUT_FUSION": _WITHOUT_TE,
    "NVTE_TORCH_COMPILE": _WITHOUT_TE,
    "NVTE_DEBUG": "the choice of backend and its reasons are always logged here",
    "NVTE_DEBUG_LEVEL": "the choice of backend and its reasons are always logged here",
    "NVTE_BATCH_MHA_P2P_COMM": _WITHOUT_TE,
    "NVTE_CPU_OFFLOAD_V1": _WITHOUT_TE,
}
KNOWN_FLAGS = (*ACTING_FLAGS, *_INERT_FLAGS)


@dataclass(frozen=True, slots=True)
class AttentionFlags:
    """What the environment says about attention.

    Attributes:
        flash: NVTE_FLASH_ATTN; False removes the flash family.
        fused: NVTE_FUSED_ATTN; False removes the fused (cuDNN) family.
        unfused: NVTE_UNFUSED_ATTN; False removes the unfused family.
        allow_nondeterministic: NVTE_ALLOW_NONDETERMINISTIC_ALGO; False asks for equal bits from equal calls.
        given: every NVTE_* variable that is set, name and value, sorted.
    """

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    allow_nondeterministic: bool = True
    given: tuple[tuple[str, str], ...] = ()

    def notes(self) -> tuple[str, ...]:
        """One line for each variable that is set and does not do what its reader may expect."""
        lines: list[str] = []
        if not self.flash and self.fused:
            lines.append(
                "NVTE_FLASH_ATTN=0 removes the flash family only; cuDNN stays (NVTE_FUSED_ATTN=0 removes that too)."
            )
        for name, value in self.given:
            if name in _INERT_FLAGS:
                lines.append(f"{name}={value} has no effect here: {_INERT_FLAGS[name]}.")
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
        ValueError: a flag is neither 0 nor 1.
    """
    environment = os.environ if environment is None else environment
    switches: list[bool] = []
    for name in ACTING_FLAGS:
        value = environment.get(name, "1").strip()
        if value not in ("0", "1"):
            raise ValueError(f"`{name}` ({value}) must be 0 or 1; unset it for the default, 1.")
        switches.append(value == "1")
    flash, fused, unfused, allow_nondeterministic = switches
    given = tuple(sorted((name, value) for name, value in environment.items() if name.startswith("NVTE_")))
    return AttentionFlags(flash, fused, unfused, allow_nondeterministic, given)
