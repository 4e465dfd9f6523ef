"""TransformerEngine's environment variables for attention (NVTE_*), parsed in this file only.

A flag can only remove backends, as in TransformerEngine; names and defaults are those of its docs. The context manager
that sets variables temporarily is here as well, so that no other attention file accesses `os.environ`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

FAMILY_FLAGS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
VERSION_FLAGS = ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
SUPPORTED_FLAGS = (
    *FAMILY_FLAGS,
    *VERSION_FLAGS,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_MASKED_SOFTMAX_FUSION",
    "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
)
"""Flags with the same effect as in TransformerEngine; all but the last two are on unless set to 0."""

_IN_TE = "only TransformerEngine's own backends (te_flash, te_fused, te_unfused) read it"
_FP8 = "attention in fp8 (`fp8_dot_product_attention`) is forward and backward, with the scales of `model.fp8_*`"
_LAYERS = "it configures TransformerEngine's layers, of which only the attention is used"
_IGNORED_FLAGS = {
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
    "NVTE_BATCH_MHA_P2P_COMM": "`model.context_parallel_size` and `model.cp_comm_type` set context parallelism",
    "NVTE_CPU_OFFLOAD_V1": _LAYERS,
}
KNOWN_FLAGS = (*SUPPORTED_FLAGS, *_IGNORED_FLAGS)
_DEBUG_FLAGS = ("NVTE_DEBUG", "NVTE_DEBUG_LEVEL")


@dataclass(frozen=True, slots=True)
class AttentionFlags:
    """Parsed NVTE_* environment variables.

    Attributes:
        flash: NVTE_FLASH_ATTN; False removes the flash family.
        fused: NVTE_FUSED_ATTN; False removes the fused (cuDNN) family.
        unfused: NVTE_UNFUSED_ATTN; False removes the unfused family.
        allow_nondeterministic: NVTE_ALLOW_NONDETERMINISTIC_ALGO; False requires bitwise reproducible backends.
        flash_v2: NVTE_FLASH_ATTN_V2; False disables FlashAttention 2 in `flash_attn` and `te_flash`.
        flash_v3: NVTE_FLASH_ATTN_V3; False disables FlashAttention 3 in `te_flash`.
        flash_v4: NVTE_FLASH_ATTN_V4; False disables FlashAttention 4 in `te_flash`.
        masked_softmax_fusion: NVTE_MASKED_SOFTMAX_FUSION; False disables the fused softmax of `unfused`.
        debug: NVTE_DEBUG times NVTE_DEBUG_LEVEL; from 1 on the reasons are printed as well as logged.
        set_variables: name and value of every NVTE_* variable that is set, sorted.
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
    set_variables: tuple[tuple[str, str], ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Return one line for each set variable whose effect may differ from what is expected."""
        lines: list[str] = []
        if not self.flash and self.fused:
            lines.append(
                "NVTE_FLASH_ATTN=0 removes the flash family only; cuDNN stays (NVTE_FUSED_ATTN=0 removes that too)."
            )
        names = [name for name, _ in self.set_variables]
        for name, partner in (_DEBUG_FLAGS, _DEBUG_FLAGS[::-1]):
            if name in names and partner not in names:
                lines.append(f"{name} has no effect without {partner}: their product is the level.")
        for name, value in self.set_variables:
            if name in _IGNORED_FLAGS:
                lines.append(f"{name}={value} has no effect on backend selection: {_IGNORED_FLAGS[name]}.")
            elif name not in SUPPORTED_FLAGS:
                close = difflib.get_close_matches(name, KNOWN_FLAGS, n=1, cutoff=0.75)
                hint = f"; did you mean {close[0]}?" if close else "."
                lines.append(f"{name}={value} is not a variable of TransformerEngine's attention{hint}")
        return tuple(lines)


def read_flags(environment: Mapping[str, str] | None = None) -> AttentionFlags:
    """Read the NVTE_* variables.

    Args:
        environment: variables to read; None for `os.environ`.

    Raises:
        ValueError: a switch is neither 0 nor 1, or a level is not a non-negative integer.
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
        set_variables=tuple(sorted((name, value) for name, value in environment.items() if name.startswith("NVTE_"))),
    )


def cudnn_path_is_set() -> bool:
    """True if CUDNN_HOME or CUDNN_PATH is set, from which TransformerEngine loads cuDNN."""
    return "CUDNN_HOME" in os.environ or "CUDNN_PATH" in os.environ


@contextmanager
def override_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily; needed because TransformerEngine reads NVTE_* at run time."""
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
