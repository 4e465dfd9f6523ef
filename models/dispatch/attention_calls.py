"""The kinds of attention call that a stack makes, and the backend for each. Pure: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ...kernels.attention.call_spec import AttentionCall, Bias, DType, Installed
from ...kernels.attention.dispatch import Decision, choose
from ...kernels.attention.flags import AttentionFlags
from ..config.position_slices import DistanceSlice
from ..config.slices import AttentionSlice

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
    """One kind of call of an attention; arguments that are not the attention's are those of `AttentionCall`."""
    distance = attention.distance
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
        reach=0 if distance is None else distance.reach(max(queries, keys), causal=attention.causal),
        softcap=attention.softcap,
        dropout=attention.dropout if training else 0.0,
        training=training,
        deterministic=deterministic,
    )


def _bias(distance: DistanceSlice | None, *, training: bool) -> Bias:
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
    longest: int,
    packed: bool,
    deterministic: bool,
) -> dict[CallKind, AttentionCall]:
    """Every kind of call a causal stack makes: training, evaluation without dropout, generation of any length.

    A text that is generated is one document, even where those of a sample are `packed`.

    Args:
        attention: the attention of each layer.
        device: kind of device.
        capability: CUDA compute capability, None elsewhere.
        dtype: of the arithmetic.
        batch: samples in a call.
        seq_length: tokens in a sample.
        longest: tokens of the longest text that can be generated.
        packed: samples of training and evaluation hold several documents, which do not see each other.
        deterministic: equal calls must give equal bits.
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
        "generation": call(longest, any_length=True),
    }


def decide(
    attention: AttentionSlice, calls: Mapping[CallKind, AttentionCall], flags: AttentionFlags, installed: Installed
) -> dict[CallKind, Decision]:
    """The dispatcher's choice for each kind of call.

    Raises:
        NoBackendError: nothing is left for one of them.
    """
    return {
        kind: choose(
            call,
            use_flash_attention=attention.use_flash_attention,
            attention_backend=attention.backend,
            transformer_engine=attention.transformer_engine,
            flags=flags,
            installed=installed,
        )
        for kind, call in calls.items()
    }


def decision_for(made: Mapping[str, Decision], label: str) -> Decision:
    """What was chosen for a call.

    Args:
        made: the decisions of a model.
        label: names the call as `made` does: its kind, after its attention where there are several.

    Raises:
        ValueError: the model was not built for it.
    """
    if label not in made:
        raise ValueError(
            f"a {label} call must be among those the model was built for "
            f"({', '.join(made) or 'none, on the meta device'}); name it in `kinds`."
        )
    return made[label]
