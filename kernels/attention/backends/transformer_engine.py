"""TransformerEngine's DotProductAttention as three attention backends; imported at the first call.

TransformerEngine selects its kernels from NVTE_* at run time. Each call sets these variables temporarily so that only
one family is enabled, and checks afterwards which one ran.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from ...launch import disable_compile
from ..argument_checks import check_same_width
from ..dense_bias import build_mask, combine_biases
from ..flags import cudnn_path_is_set, override_environment
from ..inputs import AttentionInputs
from ..packed_sequences import unpadded_cu_seqlens, unpadded_key_cu_seqlens

TEFamily = Literal["flash", "fused", "unfused"]
_MODULE = "transformer_engine.pytorch.attention.dot_product_attention"
_SWITCHES: dict[TEFamily, str] = {
    "flash": "NVTE_FLASH_ATTN",
    "fused": "NVTE_FUSED_ATTN",
    "unfused": "NVTE_UNFUSED_ATTN",
}


def torch_cudnn_dir() -> Path | None:
    """Return the directory of the cuDNN package installed with torch; None without it or if CUDNN_* is set."""
    if cudnn_path_is_set():
        return None
    try:
        found = find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # no package `nvidia` at all
        return None
    locations = found.submodule_search_locations if found else None
    return Path(locations[0]) if locations else None


def import_transformer_engine() -> ModuleType:
    """Import `transformer_engine.pytorch` with the cuDNN of torch.

    If the system has another cuDNN, TransformerEngine and the dynamic linker would load some of its libraries, which
    fail next to those of the release that torch has loaded. All of torch's cuDNN libraries are therefore loaded first.

    Raises:
        Exception: any error of TransformerEngine, if it does not fit this torch or this machine.
    """
    folder = torch_cudnn_dir()
    if folder is None or "transformer_engine" in sys.modules:
        return import_module("transformer_engine.pytorch")
    for library in sorted((folder / "lib").glob("libcudnn*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    with override_environment({"CUDNN_PATH": str(folder)}):
        return import_module("transformer_engine.pytorch")


@lru_cache(maxsize=64)
def _module(
    family: TEFamily, heads: int, groups: int, head_dim: int, scale: float, dropout: float, deterministic: bool
) -> Any:
    """Build a DotProductAttention without parameters; `family` and `deterministic` act through NVTE_*, set per call."""
    return import_transformer_engine().DotProductAttention(
        heads, head_dim, num_gqa_groups=groups, attention_dropout=dropout, qkv_format="bshd", softmax_scale=scale
    )


def _window_size(window: Sequence[int] | None, causal: bool, queries: int, keys: int) -> tuple[int, int]:
    """Convert a window to TransformerEngine's `window_size`, which cannot be unbounded on one side only.

    Always passed explicitly: its default is that of a causal mask, which causes a warning with another mask.
    """
    left, right = window or (-1, -1)
    if causal:
        return left, 0
    if left < 0 and right < 0:
        return -1, -1
    return left if left >= 0 else keys, right if right >= 0 else queries


@dataclass(frozen=True, slots=True)
class TEAttention:
    """DotProductAttention restricted to one family.

    Attributes:
        family: the only family TransformerEngine may use.
        deterministic: use a bitwise reproducible backward pass.
    """

    family: TEFamily
    deterministic: bool = False

    @disable_compile
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: a softcap, chunks, sinks, a padding mask, or a bias that the family does not support.
            RuntimeError: TransformerEngine rejected the call or used another family.
        """
        if inputs.softcap:
            raise ValueError(f"`softcap` ({inputs.softcap}) must be 0 in te_{self.family}; use `triton`.")
        for name in ("sinks", "key_padding_mask"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"`{name}` must be None in te_{self.family}; use `triton`.")
        check_same_width(inputs)
        if inputs.attention_chunk:
            raise ValueError(
                f"`attention_chunk` ({inputs.attention_chunk}) must be 0 in te_{self.family}; use `triton`."
            )
        packed = inputs.packed is not None
        biased = any(bias is not None for bias in (inputs.bias, inputs.distance_bias, inputs.alibi_slopes))
        if biased and (self.family == "flash" or (self.family == "fused" and packed)):
            packing = " with packed documents" if packed else ""
            raise ValueError(f"`bias` must be None in te_{self.family}{packing}; use `triton`.")
        options = self._mask_options(inputs)
        dense = combine_biases(inputs)
        if dense is not None:
            shape = (*(1,) * (4 - dense.dim()), *dense.shape)
            expanded = (
                shape[0],
                shape[1],
                inputs.queries,
                inputs.keys,
            )  # cuDNN does not support a bias broadcast over rows
            options |= {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": dense.to(inputs.q.dtype).reshape(shape).expand(expanded).contiguous(),
            }
        tensors = [*inputs[:3]]
        if "cu_seqlens_q" in options:
            tensors = [tensor.flatten(0, 1) for tensor in tensors]
        context = self._run(tensors, inputs.scale, inputs.dropout_p, options)
        return context.reshape(inputs.q.shape)

    def _mask_options(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Convert the mask to TransformerEngine's arguments: True masks a key, and `causal` is top-left aligned."""
        queries, keys, causal, packed = inputs.queries, inputs.keys, inputs.causal, inputs.packed
        causal_type = "causal" if queries == keys else "causal_bottom_right"
        mask_type = causal_type if causal else "no_mask"
        window_size = _window_size(inputs.window_size, causal, queries, keys)
        if packed is None:
            return {"attn_mask_type": mask_type, "window_size": window_size}
        if self.family == "unfused":  # with cu_seqlens it would pad every document to the length of a row
            hidden = build_mask(inputs, causal=causal)
            return {"attn_mask_type": "arbitrary", "attention_mask": hidden, "window_size": (-1, -1)}
        aligned = "padding_causal" if packed.key_document_ids is None else "padding_causal_bottom_right"
        return {
            "qkv_format": "thd",
            "attn_mask_type": aligned if causal else "padding",
            "window_size": window_size,
            "cu_seqlens_q": unpadded_cu_seqlens(packed),
            "cu_seqlens_kv": unpadded_key_cu_seqlens(packed),
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
        }

    def _run(self, tensors: list[Tensor], scale: float, dropout: float, options: dict[str, Any]) -> Tensor:
        state = import_module(_MODULE)._attention_backends
        deterministic = self.deterministic or torch.are_deterministic_algorithms_enabled()
        values = {name: str(int(family == self.family)) for family, name in _SWITCHES.items()}
        if deterministic:
            values["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        query, key = tensors[:2]
        with override_environment(values):
            module = _module(
                self.family, query.shape[-2], key.shape[-2], query.shape[-1], scale, dropout, deterministic
            )
            # in evaluation mode it saves nothing for a backward pass
            module.train(torch.is_grad_enabled())
            state["backend_selection_requires_update"] = True  # its cache of selections ignores changes of NVTE_*
            try:
                context: Tensor = module(*tensors, **options)
            except ValueError as error:
                raise RuntimeError(
                    f"TransformerEngine does not support this call in te_{self.family}: {error} NVTE_DEBUG=1 "
                    "NVTE_DEBUG_LEVEL=2 prints its reasons; attention_backend=auto selects another backend."
                ) from error
            ran = [family for family in _SWITCHES if state[f"use_{family}_attention"]]
        if ran != [self.family]:
            raise RuntimeError(f"TransformerEngine was restricted to {self.family} attention but used {ran or 'none'}.")
        return context


te_flash = TEAttention("flash")
te_fused = TEAttention("fused")
te_unfused = TEAttention("unfused")
