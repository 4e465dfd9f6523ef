"""Attention calls of a stack by kind, and the backend chosen for each. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from ...kernels.attention.call_spec import AttentionCall, Bias, DType, InstalledSoftware
from ...kernels.attention.dispatch import BackendSelection, select_backend
from ...kernels.attention.flags import AttentionFlags
from ..config.dense_stack import AttentionSlice
from ..config.positions import PositionBiasSlice

CallKind = Literal["training", "evaluation", "generation"]


class CallContext(TypedDict):
    """Properties common to all attention calls of a run; see `AttentionCall`."""

    device: str
    capability: tuple[int, int] | None
    dtype: DType
    batch: int
    deterministic: bool


def attention_calls(
    attention: AttentionSlice,
    context: CallContext,
    *,
    samples: tuple[int, int],
    longest: tuple[int, int],
    packed: bool,
    padded: bool | None = None,
) -> dict[CallKind, AttentionCall]:
    """Return the calls of an attention: training, evaluation without dropout, generation of any length.

    Generation is never packed, even if the samples are.

    Args:
        attention: attention of each layer.
        context: properties common to all calls.
        samples: (queries, keys) of the samples of training and evaluation.
        longest: maximal (queries, keys) in generation.
        packed: samples hold several documents, with attention within documents only.
        padded: samples are padded, as prompts in generation may be; None if padding is never masked, in causal
            attention.
    """
    bias = attention.position_bias

    def call(lengths: tuple[int, int], *, training: bool = False, any_length: bool = False) -> AttentionCall:
        queries, keys = lengths
        within_documents = packed and not any_length
        reach = 0
        if bias is not None:
            # attention aligns the ends of queries and keys, but their positions are aligned at the start
            reach = bias.max_distinct_distance(max(lengths), causal=attention.causal) + abs(keys - queries)
        return AttentionCall(
            **context,
            heads=attention.heads,
            groups=attention.groups,
            head_dim=attention.head_dim,
            queries=queries,
            keys=keys,
            any_length=any_length,
            causal=attention.causal,
            window=attention.window,
            packed=within_documents,
            padding=padded is not None and (any_length or (padded and not within_documents)),
            bias=_bias(bias, training=training),
            reach=reach,
            softcap=attention.softcap,
            sinks=attention.softmax_type != "vanilla",
            dropout=attention.dropout if training else 0.0,
            split=attention.split,
            training=training,
            fp8=attention.fp8 and training,
        )

    return {
        "training": call(samples, training=True),
        "evaluation": call(samples),
        "generation": call(longest, any_length=True),
    }


def _bias(distance: PositionBiasSlice | None, *, training: bool) -> Bias:
    if distance is None:
        return "none"
    if distance.kind == "alibi":
        return "slopes"
    return "distance_with_gradient" if distance.learned and training else "distance"


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
