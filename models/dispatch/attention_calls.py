"""Attention calls of a stack by kind, and the backend chosen for each. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ...kernels.attention.call_spec import AttentionCall, Bias, DType, InstalledSoftware
from ...kernels.attention.dispatch import BackendSelection, select_backend
from ...kernels.attention.flags import AttentionFlags
from ..config.positions import PositionBiasSlice
from ..config.stack import AttentionSlice

CallKind = Literal["training", "evaluation", "generation"]


def attention_call(
    attention: AttentionSlice,
    *,
    queries: int,
    keys: int,
    device: str,
    capability: tuple[int, int] | None,
    dtype: DType,
    batch: int,
    packed: bool,
    deterministic: bool,
    padding: bool = False,
    training: bool = False,
    any_length: bool = False,
) -> AttentionCall:
    """Build the `AttentionCall` of one kind of call; for the arguments besides `attention` see `AttentionCall`."""
    distance = attention.position_bias
    return AttentionCall(
        device=device,
        capability=capability,
        dtype=dtype,
        batch=batch,
        heads=attention.heads,
        groups=attention.groups,
        head_dim=attention.head_dim,
        queries=queries,
        keys=keys,
        any_length=any_length,
        causal=attention.causal,
        window=attention.window,
        packed=packed,
        padding=padding,
        bias=_bias(distance, training=training),
        reach=0 if distance is None else distance.max_distinct_distance(max(queries, keys), causal=attention.causal),
        softcap=attention.softcap,
        dropout=attention.dropout if training else 0.0,
        training=training,
        deterministic=deterministic,
    )


def _bias(distance: PositionBiasSlice | None, *, training: bool) -> Bias:
    if distance is None:
        return "none"
    if distance.kind == "alibi":
        return "slopes"
    return "distance_with_gradient" if distance.learned and training else "distance"


def attention_calls(
    attention: AttentionSlice,
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: DType,
    batch: int,
    seq_length: int,
    max_length: int,
    packed: bool,
    deterministic: bool,
) -> dict[CallKind, AttentionCall]:
    """Return the calls of a causal stack: training, evaluation without dropout, generation of any length.

    Generation is never packed, even if the samples are.

    Args:
        attention: attention of each layer.
        device: device type.
        capability: CUDA compute capability, None on other devices.
        dtype: compute dtype.
        batch: micro batch size.
        seq_length: sequence length of a sample.
        max_length: maximal sequence length in generation.
        packed: samples of training and evaluation hold several documents, with attention within documents only.
        deterministic: results must be bitwise reproducible.
    """

    def call(length: int, *, training: bool = False, any_length: bool = False) -> AttentionCall:
        return attention_call(
            attention,
            queries=length,
            keys=length,
            device=device,
            capability=capability,
            dtype=dtype,
            batch=batch,
            packed=packed and not any_length,
            deterministic=deterministic,
            training=training,
            any_length=any_length,
        )

    return {
        "training": call(seq_length, training=True),
        "evaluation": call(seq_length),
        "generation": call(max_length, any_length=True),
    }


def choose_backends(
    attention: AttentionSlice,
    calls: Mapping[CallKind, AttentionCall],
    flags: AttentionFlags,
    installed: InstalledSoftware,
) -> dict[CallKind, BackendSelection]:
    """Choose the attention backend of each kind of call.

    Raises:
        NoBackendError: no backend supports one of them.
    """
    return {
        kind: select_backend(
            call,
            use_flash_attention=attention.use_flash_attention,
            attention_backend=attention.backend,
            transformer_engine=attention.transformer_engine,
            flags=flags,
            installed=installed,
        )
        for kind, call in calls.items()
    }


def decision_for(decisions: Mapping[str, BackendSelection], label: str) -> BackendSelection:
    """Return the decision for a call.

    Args:
        decisions: decisions of a model by label.
        label: kind of call, prefixed by the name of the attention if there are several (`PlannedAttention.label`).

    Raises:
        ValueError: the model was not built for this call.
    """
    if label not in decisions:
        raise ValueError(
            f"a {label} call must be among those the model was built for "
            f"({', '.join(decisions) or 'none, on the meta device'}); name it in `kinds`."
        )
    return decisions[label]
