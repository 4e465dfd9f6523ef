"""The dispatcher's table: pure functions, every row with its reason, no device needed."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import looped

from stoker.kernels.attention import backend_support
from stoker.kernels.attention.backend_support import BACKENDS, BACKENDS_BY_NAME
from stoker.kernels.attention.call_spec import (
    AttentionCall,
    Bias,
    InstalledSoftware,
    MeasuredCall,
    MeasuredTimes,
)
from stoker.kernels.attention.dispatch import NoBackendError, format_selections, preference_order, select_backend
from stoker.kernels.attention.flags import AttentionFlags

NEW = InstalledSoftware(torch=(2, 13), cudnn=92000)
FULL = InstalledSoftware(
    torch=(2, 13), cudnn=92000, triton=(3, 6), te=(2, 20), flash_attn=(2, 8, 3), flash_attn_3=True, flash_attn_4=True
)
BF16: Any = {"dtype": "bf16", "batch": 4, "heads": 16, "groups": 4, "head_dim": 128, "queries": 4096, "keys": 4096}
HOPPER = AttentionCall(device="cuda", capability=(9, 0), training=True, **BF16)
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))
CPU = dataclasses.replace(HOPPER, device="cpu", capability=None, dtype="fp32")
ON = AttentionFlags()


def chosen(call: AttentionCall, installed: InstalledSoftware = NEW, **wishes: Any) -> str:
    wishes = {"flags": ON, "installed": installed, **wishes}
    return select_backend(call, **wishes).backend


def reason(call: AttentionCall, backend: str, installed: InstalledSoftware = NEW, **wishes: Any) -> str:
    wishes = {"flags": ON, "installed": installed, **wishes}
    decision = select_backend(call, **wishes)
    (row,) = (row for row in decision.rows if row.backend == backend)
    assert not row.accepted
    return row.reason


def test_order_of_preference() -> None:
    assert chosen(HOPPER) == "sdpa_cudnn"
    assert chosen(dataclasses.replace(HOPPER, capability=(10, 0), groups=16)) == "sdpa_cudnn"
    assert chosen(AMPERE) == "sdpa_flash"
    assert chosen(CPU) == "sdpa_flash"
    assert chosen(dataclasses.replace(CPU, device="mps")) == "unfused"
    assert chosen(dataclasses.replace(HOPPER, dtype="fp32")) == "sdpa_efficient"
    assert chosen(dataclasses.replace(HOPPER, dtype="fp64")) == "unfused"


def test_few_queries_train_with_the_kernel_that_keeps_them() -> None:
    with_triton = dataclasses.replace(NEW, triton=(3, 6))
    call = dataclasses.replace(HOPPER, queries=114, keys=512, head_dim=64, batch=64, heads=12, groups=12, causal=False)
    changes: list[dict[str, Any]] = [{}, {"batch": 11}, {"keys": 128}, {"keys": 2048}, {"queries": 32}]
    assert {chosen(dataclasses.replace(call, **change), with_triton) for change in changes} == {"triton"}
    changes = [
        {"training": False}, {"groups": 6}, {"batch": 10}, {"head_dim": 128}, {"keys": 2049}, {"queries": 31},
        {"queries": 256},
    ]  # fmt: skip
    assert {chosen(dataclasses.replace(call, **change), with_triton) for change in changes} == {"sdpa_cudnn"}


def test_gradients_of_queries_in_the_order_of_arrival() -> None:
    with_triton = dataclasses.replace(NEW, triton=(3, 6))
    assert chosen(HOPPER, with_triton) == "triton_atomic"
    full = dataclasses.replace(HOPPER, causal=False, queries=1024, keys=4096)
    named: dict[str, Any] = {"attention_backend": "triton_atomic"}
    for call in (
        HOPPER,
        full,
        dataclasses.replace(full, head_dim=64),
        dataclasses.replace(HOPPER, queries=1, training=False),
    ):
        assert chosen(call, with_triton, **named) == "triton_atomic"
    refused: dict[str, dict[str, Any]] = {
        "not deterministic": {"deterministic": True},
        "needs at least 1024 keys, a multiple of 256 and as many queries, not 4000 queries of 4000 keys": {
            "queries": 4000, "keys": 4000,
        },
        "needs at least 1024 keys, not 4096 queries of 512 keys": {"keys": 512, "causal": False},
        "needs head width 64 or 128, not 256": {"head_dim": 256},
        "Hopper kernels": {"capability": (8, 0)},
        "does not support a bias": {"bias": "slopes"},
        "does not support packed documents": {"packed": True},
        "does not support attention sinks": {"sinks": True},
    }  # fmt: skip
    for why, change in refused.items():
        assert why in reason(dataclasses.replace(HOPPER, **change), "triton_atomic", with_triton)


def test_ranks_that_share_heads_draw_the_dropout_of_one_process() -> None:
    with_triton = dataclasses.replace(NEW, triton=(3, 6))
    dropped = dataclasses.replace(HOPPER, dropout=0.1)
    assert chosen(dropped, with_triton) != "triton"
    assert chosen(dataclasses.replace(dropped, split=True), with_triton) == "triton"
    assert chosen(dataclasses.replace(HOPPER, split=True), with_triton) == chosen(HOPPER, with_triton)
    asked = select_backend(
        dataclasses.replace(dropped, split=True), flags=ON, installed=with_triton, attention_backend="sdpa_flash"
    )
    assert any("drop the same weights" in note for note in asked.notes)


def test_our_hopper_kernels_come_first_where_they_serve() -> None:
    flash: dict[str, Any] = {"attention_backend": "flash", "installed": dataclasses.replace(NEW, triton=(3, 6))}
    long = dataclasses.replace(HOPPER, queries=32768, keys=32768)
    assert chosen(long, **flash) == "triton"
    assert select_backend(long, flags=ON, **flash).notes == ("triton runs its Hopper kernels here.",)
    assert chosen(dataclasses.replace(HOPPER, deterministic=True), installed=flash["installed"]) == "triton"
    changes: list[dict[str, Any]] = [
        {"capability": (8, 0)}, {"head_dim": 96}, {"dropout": 0.1}, {"any_length": True, "training": False},
    ]  # fmt: skip
    for change in changes:
        assert chosen(dataclasses.replace(HOPPER, **change), **flash) == "sdpa_flash", change
    with_te = dataclasses.replace(flash["installed"], te=(2, 20), flash_attn=(2, 8, 3))
    wished = {"attention_backend": "flash", "installed": with_te, "transformer_engine": True}
    assert chosen(HOPPER, **wished) == "te_flash", "the key puts TransformerEngine first"
    faster = dataclasses.replace(HOPPER, head_dim=64)
    assert chosen(faster, with_te, transformer_engine=True) == "te_fused"
    assert chosen(faster, with_te, attention_backend="fused") == "sdpa_cudnn"
    off = dataclasses.replace(ON, flash=False)
    assert chosen(faster, with_te, flags=off) == "sdpa_cudnn"
    older = dataclasses.replace(NEW, triton=(3, 5))
    assert chosen(HOPPER, attention_backend="flash", installed=older) == "sdpa_flash"


def test_packed_documents_go_to_kernels_that_take_a_mask() -> None:
    packed = {"packed": True}
    assert chosen(dataclasses.replace(HOPPER, **packed)) == "sdpa_cudnn"
    assert chosen(dataclasses.replace(AMPERE, **packed)) == "sdpa_efficient"
    assert chosen(dataclasses.replace(CPU, **packed)) == "sdpa_flash"
    decision = select_backend(dataclasses.replace(HOPPER, **packed), flags=ON, installed=NEW)
    assert decision.call.mask_bytes == 4 * 4096 * 4096 * 2
    assert decision.notes[0].startswith("one mask of 0.12 GiB for all layers")
    assert (HOPPER.mask_bytes, select_backend(HOPPER, flags=ON, installed=NEW).notes) == (0, ())


def test_generation_does_not_plan_every_length_with_cudnn() -> None:
    assert chosen(dataclasses.replace(HOPPER, any_length=True, training=False)) == "sdpa_flash"
    assert chosen(dataclasses.replace(HOPPER, any_length=True), attention_backend="fused") == "sdpa_cudnn"


ON_CPU = {"device": "cpu", "capability": None, "dtype": "fp32"}
TE = ("te_flash", "te_fused", "te_unfused")
SDPA = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math")
Filter = tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]
FILTERS: list[Filter] = [  # backends, a refused call, changes to it that are accepted, words of the reason
    # devices and dtypes
    (("sdpa_efficient", "sdpa_cudnn", *TE, "flash_attn"), ON_CPU, {"device": "cuda", "capability": (9, 0),
     "dtype": "bf16"}, "needs a CUDA device, not cpu"),
    (("triton",), ON_CPU, {"device": "cuda", "capability": (9, 0), "dtype": "bf16"}, "TRITON_INTERPRET=1"),
    (("triton", "sdpa_flash", "sdpa_cudnn"), {"device": "mps", "capability": None},
     {"device": "cuda", "capability": (9, 0)}, "needs a CUDA device, not mps"),
    (("sdpa_flash", "sdpa_cudnn", "te_fused", "te_flash", "flash_attn"), {"capability": (7, 5), "dtype": "fp16"},
     {"capability": (8, 0)}, "sm_80 to sm_121, not sm_75"),
    (("triton", "lse_first"), {"capability": (7, 5), "dtype": "fp16"}, {"capability": (8, 0)}, "sm_80 or later"),
    (("sdpa_efficient", "te_unfused"), {"capability": (7, 5)}, {"dtype": "fp16"}, "does not support bf16 on sm_75"),
    (("sdpa_flash", "sdpa_cudnn", "te_fused", "te_flash", "flash_attn"), {"dtype": "fp32"}, {"dtype": "fp16"},
     "supports bf16 and fp16, not fp32"),
    (("triton",), {"dtype": "fp64"}, {"dtype": "fp32"}, "not fp64"),
    (("sdpa_efficient", "te_unfused"), {"dtype": "fp64"}, {"dtype": "fp32"}, "does not support fp64"),
    (("sdpa_efficient",), {"capability": (13, 0)}, {"capability": (12, 0)}, "sm_50 to sm_121"),
    # head widths
    (("sdpa_cudnn", "te_fused"), {"head_dim": 192, "capability": (8, 0)}, {"capability": (9, 0)}, "up to 128"),
    (("sdpa_cudnn", "te_fused"), {"head_dim": 264}, {"head_dim": 256}, "up to 256"),
    (("sdpa_cudnn", "te_fused", "triton", "te_flash", "flash_attn", "lse_first"), {"head_dim": 100},
     {"head_dim": 96}, "multiples of 8"),
    (("triton", "lse_first"), {"head_dim": 8}, {"head_dim": 16}, "head widths 16 to 256"),
    (("triton", "lse_first"), {"head_dim": 264}, {"head_dim": 256}, "head widths 16 to 256"),
    (("sdpa_flash", "flash_attn"), {"head_dim": 320}, {"head_dim": 256}, "up to 256"),
    (("sdpa_flash", "flash_attn"), {"capability": (8, 9), "head_dim": 224}, {"head_dim": 192}, "no backward pass"),
    (("sdpa_flash", "flash_attn"), {"capability": (8, 6), "head_dim": 256, "dropout": 0.1}, {"dropout": 0.0},
     "no backward pass for head width 256 on sm_86"),
    (("te_flash",), {"capability": (8, 9), "head_dim": 224}, {"head_dim": 192}, "up to 192 on sm_89"),
    (("te_flash",), {"head_dim": 320}, {"head_dim": 256}, "width 320 here; supports head widths up to 256"),
    (("sdpa_efficient",), {"head_dim": 100}, {"head_dim": 104}, "multiple of 8"),
    (("sdpa_efficient",), {"dtype": "fp32", "head_dim": 6}, {"head_dim": 4}, "multiple of 4"),
    (("sdpa_flash", "flash_attn"), {"value_dim": 32}, {"value_dim": 128}, "of the keys' width (128) only, not 32"),
    (TE, {"value_dim": 32}, {"value_dim": 128}, "one head width for keys and values"),
    (("lse_first",), {"value_dim": 32}, {"value_dim": 128}, "not support value heads of another width"),
    (("sdpa_flash",), {**ON_CPU, "value_dim": 32}, {"value_dim": None}, "value heads 32 wide with keys 128 wide"),
    (("sdpa_cudnn",), {"head_dim": 192, "value_dim": 96}, {"value_dim": 128}, "or 128 with keys 192 on sm_90"),
    (("sdpa_cudnn",), {"head_dim": 96, "value_dim": 36}, {"value_dim": 40}, "value heads 36 wide"),
    (("sdpa_efficient",), {"value_dim": 36}, {"value_dim": 40}, "multiple of 8, not 36"),
    (("triton",), {"value_dim": 264}, {"value_dim": 256}, "head widths 16 to 256 that are multiples of 8, not 264"),
    # masks
    (SDPA, {"window": (127, 0)}, {"window": None}, "not support a window"),
    (("lse_first",), {"window": (127, 0)}, {"window": None}, "not support a window"),
    (("te_fused",), {"window": (127, 0), "dropout": 0.1}, {"dropout": 0.0}, "a window only without dropout"),
    (("te_fused",), {"window": (127, 0), "bias": "dense"}, {"bias": "none"}, "a window only without dropout"),
    (SDPA, {"queries": 128}, {"causal": False}, "top-left"),
    (("te_fused", "te_unfused"), {"queries": 8192}, {"queries": 2048}, "quer"),
    (("te_unfused",), {"queries": 8192, "causal": False, "window": (9, 9)}, {"window": None}, "that see no key"),
    (("te_fused",), {"queries": 2048, "bias": "dense"}, {"bias": "none"}, "unequal lengths only without dropout"),
    (("te_fused",), {"queries": 2048, "dropout": 0.1}, {"queries": 4096}, "unequal lengths only without dropout"),
    (("sdpa_flash",), {"packed": True}, {"packed": False}, "which packed documents need"),
    (("sdpa_flash", "flash_attn"), {"padding": True}, {"padding": False}, "which padding needs"),
    (TE, {"padding": True}, {"padding": False}, "not as an arbitrary mask"),
    (("te_fused",), {"packed": True, "capability": (8, 0)}, {"capability": (9, 0)}, "from sm_90"),
    (("te_fused",), {"packed": True, "bias": "dense"}, {"packed": False}, "a bias with packed documents"),
    (("triton",), {"packed": True, "bias": "dense"}, {"bias": "distance"}, "a dense bias with packed documents"),
    (("lse_first",), {"packed": True, "dropout": 0.1}, {"packed": False, "dropout": 0.0},
     "packed documents or dropout"),
    (SDPA, {"attention_chunk": 1024}, {"attention_chunk": 0}, "SDPA does not support chunked attention"),
    (TE, {"attention_chunk": 1024}, {"attention_chunk": 0}, "TransformerEngine does not support chunked attention"),
    (("flash_attn", "lse_first"), {"attention_chunk": 1024}, {"attention_chunk": 0}, "not support chunked attention"),
    # biases and scores
    (("sdpa_flash", "te_flash", "flash_attn"), {"bias": "dense"}, {"bias": "none"}, "does not support a bias"),
    (("sdpa_flash", "te_flash"), {"bias": "slopes"}, {"bias": "none"}, "does not support a bias"),
    (("flash_attn",), {"bias": "distance"}, {"bias": "slopes"}, "does not support a bias other than ALiBi slopes"),
    (("flash_attn",), {"bias": "slopes_with_gradient"}, {"bias": "slopes"}, "a gradient for ALiBi slopes"),
    (("lse_first",), {"bias": "slopes"}, {"bias": "none"}, "does not support a bias"),
    (("sdpa_cudnn",), {"bias": "slopes_with_gradient"}, {"bias": "slopes"}, "no gradient for a bias"),
    (("te_fused",), {"packed": True, "bias": "slopes"}, {"packed": False}, "a bias with packed documents"),
    (("te_fused",), {"deterministic": True, "bias": "slopes_with_gradient"}, {"bias": "slopes"}, "gradient of a bias"),
    (("sdpa_cudnn",), {"bias": "dense_with_gradient"}, {"bias": "dense"}, "no gradient for a bias"),
    (("sdpa_cudnn",), {"bias": "distance_with_gradient"}, {"bias": "distance"}, "no gradient for a bias"),
    (SDPA, {"softcap": 30.0}, {"softcap": 0.0}, "not support a softcap"),
    (TE, {"softcap": 30.0}, {"softcap": 0.0}, "in some versions only"),
    (("flash_attn",), {"softcap": 30.0, "dropout": 0.1}, {"dropout": 0.0}, "dropout with a softcap"),
    (SDPA, {"sinks": True}, {"sinks": False}, "SDPA does not support attention sinks"),
    (TE, {"sinks": True}, {"sinks": False}, "only as a parameter of its own module"),
    (("flash_attn", "lse_first"), {"sinks": True}, {"sinks": False}, "not support attention sinks"),
    # dropout
    (("sdpa_cudnn",), {"dropout": 0.1}, {"dropout": 0.125}, "multiples of 1/16"),
    (("sdpa_flash",), {**ON_CPU, "dropout": 0.1}, {"dropout": 0.0}, "not support dropout (0.1)"),
    (("sdpa_flash",), {**ON_CPU, "bias": "distance_with_gradient"}, {"bias": "distance"}, "a bias with gradient"),
    # determinism
    (("sdpa_cudnn",), {"deterministic": True}, {"training": False}, "not deterministic"),
    (("sdpa_flash", "sdpa_efficient"), {"deterministic": True}, {"training": False}, "use_deterministic_algorithms"),
    (("te_fused",), {"deterministic": True, "capability": (8, 0)}, {"capability": (9, 0)}, "on sm_80"),
    (("te_fused",), {"deterministic": True, "capability": (12, 0)}, {"training": False}, "on sm_120"),
    (("te_fused",), {"deterministic": True, "bias": "dense_with_gradient"}, {"bias": "dense"}, "gradient of a bias"),
    (("te_fused",), {"deterministic": True, "capability": (10, 0), "dropout": 0.1}, {"dropout": 0.0}, "91801"),
    (("te_fused",), {"deterministic": True, "packed": True}, {"queries": 128, "keys": 128}, "too much workspace"),
    # fp8
    (("te_fused",), {"fp8": True, "capability": (8, 9)}, {"fp8": False}, "sm_90 to sm_110 (Hopper, Blackwell"),
    (("te_fused",), {"fp8": True, "capability": (12, 0)}, {"capability": (10, 0)}, "not sm_120"),
    (("te_fused",), {"fp8": True, "head_dim": 64}, {"capability": (10, 0)}, "supports heads 128 wide in fp8 on sm_90"),
    (("te_fused",), {"fp8": True, "head_dim": 256}, {"head_dim": 128}, "supports heads 128 wide in fp8 on sm_90"),
    (("te_fused",), {"fp8": True, "capability": (10, 0), "head_dim": 72}, {"head_dim": 80}, "multiples of 16 in fp8"),
    (("te_fused",), {"fp8": True, "bias": "slopes", "packed": True}, {"bias": "none", "packed": False},
     "does not support a bias or packed documents in fp8"),
    (("te_fused",), {"fp8": True, "window": (127, 0)}, {"window": None}, "not support a window in fp8"),
    (("te_fused",), {"fp8": True, "dropout": 0.1}, {"dropout": 0.0}, "not support dropout in fp8"),
    (("te_fused",), {"fp8": True, "queries": 2048}, {"causal": False}, "a causal mask over unequal lengths in fp8"),
    (("te_fused",), {"fp8": True, "padding": True}, {"padding": False}, "not as an arbitrary mask"),
    # lengths
    (("sdpa_cudnn",), {"queries": 1, "keys": 1}, {"queries": 2, "keys": 2}, "single token"),
    (("sdpa_cudnn",), {"queries": 1, "causal": False, "dropout": 0.125}, {"dropout": 0.0}, "single token"),
    (("sdpa_cudnn",), {"capability": (10, 0)}, {"groups": 8}, "#193893"),
]  # fmt: skip


@looped(
    ("backend", "refused", "accepted", "words"),
    [(name, refused, accepted, words) for names, refused, accepted, words in FILTERS for name in names],
)
def test_each_filter_refuses_and_accepts(backend: str, refused: Any, accepted: Any, words: str) -> None:
    call = dataclasses.replace(HOPPER, **refused)
    row = BACKENDS_BY_NAME[backend]
    said = row.why_not(call, FULL)
    assert said is not None
    assert words in said
    assert row.why_not(dataclasses.replace(call, **accepted), FULL) is None


@looped(
    ("backend", "software", "better", "changes", "words"),
    [
        ("sdpa_cudnn", {"cudnn": None}, {"cudnn": 90100}, {}, "found none"),
        ("sdpa_cudnn", {"cudnn": 8907}, {"cudnn": 90100}, {}, "found 8907"),
        ("sdpa_cudnn", {"cudnn": 91200}, {"cudnn": 91002}, {"dropout": 0.125}, "9.11 to 9.13"),
        ("sdpa_cudnn", {"cudnn": 91002}, {"cudnn": 91501}, {"queries": 4000, "keys": 4000}, "#169849"),
        ("sdpa_cudnn", {"cudnn": 91002}, {"cudnn": 91501}, {"any_length": True}, "#169849"),
        ("sdpa_cudnn", {"cudnn": 91001}, {"cudnn": 91002}, {"head_dim": 256}, "up to 128"),
        ("sdpa_cudnn", {"torch": (2, 10)}, {"torch": (2, 11)}, {"head_dim": 256}, "up to 128"),
        ("sdpa_flash", {}, {"deterministic_algorithms": True}, {"deterministic": True}, "only under torch."),
        ("sdpa_cudnn", {"deterministic_algorithms": True}, {"deterministic_algorithms": False},
         {"deterministic": True, "training": False}, "PyTorch rejects it"),
        ("triton", {"triton": None}, {}, {}, "not installed"),
        ("triton", {"triton": (3, 5)}, {}, {}, "Triton 3.6 or later, found 3.5"),
        ("triton", {"interpreted": True}, {}, {}, "does not use the GPU"),
        ("triton", {}, {"interpreted": True}, ON_CPU, "TRITON_INTERPRET=1"),
        ("te_fused", {"te": None}, {}, {}, "pip install 'stoker[te]'"),
        ("te_unfused", {"te": (2, 17)}, {"te": (2, 18)}, {}, "from 2.18 up to 3.0, found 2.17"),
        ("te_unfused", {"te": (3, 0)}, {"te": (2, 99)}, {}, "from 2.18 up to 3.0, found 3.0"),
        ("te_flash", {"te_problem": "it is broken"}, {}, {}, "it is broken"),
        ("te_fused", {"cudnn": 90200}, {"cudnn": 90300}, {}, "needs cuDNN 90300"),
        ("te_fused", {"cudnn": 91001}, {"cudnn": 91002}, {}, "neither 91000 nor 91001"),
        ("te_fused", {"cudnn": 90600}, {"cudnn": 90700}, {"capability": (10, 0)}, "needs cuDNN 90700"),
        ("te_fused", {"cudnn": 90400}, {"cudnn": 90500}, {"head_dim": 256}, "up to 128"),
        ("te_fused", {"cudnn": 90600}, {"cudnn": 90700}, {"queries": 128}, "a causal mask over unequal lengths"),
        ("te_fused", {"cudnn": 90500}, {"cudnn": 90600}, {"window": (9, 9), "causal": False}, "window to the right"),
        ("te_fused", {"cudnn": 90500}, {"cudnn": 90600}, {"packed": True}, "from sm_90 and cuDNN 90600"),
        ("te_fused", {"cudnn": 91800}, {"cudnn": 91801}, {"packed": True, "capability": (12, 0)}, "91801"),
        ("te_fused", {"cudnn": 91800}, {"cudnn": 91801}, {"deterministic": True, "capability": (10, 0)}, "91801"),
        ("te_fused", {"te": (2, 19)}, {"te": (2, 20)}, {"fp8": True}, "needs TransformerEngine 2.20 for fp8"),
        ("te_fused", {"cudnn": 90600}, {"cudnn": 90700}, {"fp8": True}, "needs cuDNN 90700 or later and not 91000"),
        ("te_fused", {"cudnn": 91801}, {"cudnn": 91900}, {"fp8": True, "deterministic": True}, "from cuDNN 91900 on"),
        ("te_fused", {"cudnn": 91701}, {"cudnn": 91800},
         {"fp8": True, "deterministic": True, "capability": (10, 0)}, "from cuDNN 91800 on"),
        ("te_flash", {"flash_attn": None, "flash_attn_3": False, "flash_attn_4": False}, {"flash_attn_3": True}, {},
         "flash-attn is not installed"),
        ("te_flash", {"flash_attn": None}, {"flash_attn": (2, 8, 3)}, {"dropout": 0.1},
         "3 and 4 do not support dropout; flash-attn is not installed"),
        ("te_flash", {"flash_attn": (2, 8, 4)}, {"flash_attn": (2, 7, 3)}, {"capability": (8, 0)}, "2.7.3 to 2.8.3"),
        ("te_flash", {"flash_attn": None}, {"flash_attn": (2, 8, 3)},
         {"head_dim": 256, "deterministic": True}, "not support head width 256 here"),
        ("flash_attn", {"flash_attn": None}, {}, {}, "pip install 'stoker[flash]'"),
        ("flash_attn", {"flash_attn": (2, 7, 2)}, {"flash_attn": (2, 7, 3)}, {}, "found 2.7.2"),
        ("flash_attn", {"flash_attn": (2, 9, 0)}, {"flash_attn": (2, 8, 9)}, {}, "up to 2.9.0, found 2.9.0"),
    ],
)  # fmt: skip
def test_versions(backend: str, software: Any, better: Any, changes: dict[str, Any], words: str) -> None:
    call, worse = dataclasses.replace(HOPPER, **changes), dataclasses.replace(FULL, **software)
    said = BACKENDS_BY_NAME[backend].why_not(call, worse)
    assert said is not None
    assert words in said
    fixed = dataclasses.replace(worse, **better) if better else FULL
    assert BACKENDS_BY_NAME[backend].why_not(call, fixed) is None


def test_only_te_fused_multiplies_in_fp8() -> None:
    call, words = dataclasses.replace(HOPPER, fp8=True), "`fp8_dot_product_attention` (True) is not available"
    decision = select_backend(call, flags=ON, installed=FULL)
    assert decision.backend == "te_fused"
    others = {row.reason for row in decision.rows if row.backend != "te_fused" and row.family != "named"}
    assert others == {"does not multiply in fp8 (`fp8_dot_product_attention`)"}
    assert str(decision.call).endswith("causal, in fp8")
    assert decision.without_fp8().call == HOPPER
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_backend": "flash"}, "not `attention_backend` (flash)"),
        ({"flags": dataclasses.replace(ON, fused=False)}, "removed by NVTE_FUSED_ATTN=0"),
        ({"installed": NEW}, "TransformerEngine is not installed (pip install 'stoker[te]')"),
    ]
    for keys, reason in cases:
        wishes: dict[str, Any] = {"flags": ON, "installed": FULL, **keys}
        with pytest.raises(NoBackendError) as error:
            select_backend(call, **wishes)
        line = f"{words} in te_fused, its only backend: {reason}; use model.fp8_dot_product_attention=false."
        assert str(error.value) == line
        assert len(error.value.rows) == len(BACKENDS_BY_NAME)


def test_cudnn_where_it_may() -> None:
    assert chosen(dataclasses.replace(HOPPER, dropout=0.125)) == "sdpa_cudnn"
    assert chosen(HOPPER, InstalledSoftware(torch=(2, 11), cudnn=91002)) == "sdpa_cudnn"
    assert chosen(dataclasses.replace(HOPPER, deterministic=True, training=False)) == "sdpa_cudnn"


def test_determinism_under_torch() -> None:
    deterministic = dataclasses.replace(HOPPER, deterministic=True)
    assert chosen(deterministic) == "unfused"
    assert chosen(deterministic, dataclasses.replace(NEW, deterministic_algorithms=True)) == "sdpa_flash"


@looped(
    ("call", "use_flash_attention", "flags", "backend"),
    [
        (HOPPER, True, ON, "sdpa_cudnn"),
        (HOPPER, False, ON, "sdpa_cudnn"),
        (AMPERE, False, ON, "sdpa_cudnn"),
        (HOPPER, None, AttentionFlags(fused=False), "sdpa_flash"),
        (AMPERE, None, AttentionFlags(flash=False), "sdpa_cudnn"),
        (HOPPER, None, AttentionFlags(flash=False, fused=False), "unfused"),
        (HOPPER, False, AttentionFlags(fused=False), "unfused"),
        (CPU, False, ON, "unfused"),
    ],
)
def test_families(call: AttentionCall, use_flash_attention: bool | None, flags: AttentionFlags, backend: str) -> None:
    assert chosen(call, use_flash_attention=use_flash_attention, flags=flags) == backend


WITHOUT_TE = dataclasses.replace(FULL, te=None)
OWN = dataclasses.replace(NEW, triton=(3, 6))
TRAINED_BIAS: dict[str, Any] = {"bias": "distance_with_gradient", "causal": False}


@looped(
    ("changes", "installed", "backend"),
    [
        ({}, FULL, "triton_atomic"),
        ({}, NEW, "sdpa_cudnn"),
        ({"queries": 32768, "keys": 32768}, FULL, "sdpa_cudnn"),
        ({"training": False}, FULL, "sdpa_cudnn"),
        ({"capability": (8, 0)}, FULL, "sdpa_flash"),
        ({"dtype": "fp16"}, FULL, "triton_atomic"),
        ({"dtype": "fp32"}, FULL, "sdpa_efficient"),
        ({"dtype": "fp64"}, FULL, "unfused"),
        ({"head_dim": 256}, FULL, "triton"),
        ({"head_dim": 64}, OWN, "triton"),
        ({"queries": 2048, "keys": 2048}, OWN, "triton"),
        ({"queries": 4352, "keys": 4352}, FULL, "sdpa_cudnn"),
        ({"head_dim": 64, "causal": False}, OWN, "triton_atomic"),
        ({"head_dim": 64, "causal": False, "deterministic": True}, OWN, "triton"),
        ({"head_dim": 64, "causal": False, "queries": 512, "keys": 512}, OWN, "triton"),
        ({"causal": False, "queries": 1025, "keys": 1025}, OWN, "sdpa_cudnn"),
        ({"head_dim": 64, "queries": 256, "keys": 256}, OWN, "triton"),
        ({"head_dim": 64, "queries": 512, "keys": 512, "training": False}, OWN, "sdpa_cudnn"),
        ({"head_dim": 64, "queries": 255, "keys": 255}, OWN, "sdpa_cudnn"),
        ({"head_dim": 64, "dropout": 0.125}, OWN, "sdpa_cudnn"),
        ({"head_dim": 64, "capability": (10, 0), "groups": 16}, OWN, "sdpa_cudnn"),
        ({"head_dim": 256, "capability": (12, 0)}, FULL, "sdpa_flash"),
        ({"head_dim": 100}, FULL, "sdpa_flash"),
        ({"capability": (7, 5), "dtype": "fp16"}, FULL, "sdpa_efficient"),
        ({"capability": (7, 5)}, FULL, "unfused"),
        (TRAINED_BIAS, FULL, "triton"),
        ({"bias": "distance"}, FULL, "triton"),
        ({"bias": "slopes"}, FULL, "triton"),
        ({"bias": "slopes"}, dataclasses.replace(FULL, triton=None), "flash_attn"),
        ({"bias": "slopes", "packed": True}, dataclasses.replace(FULL, triton=None), "flash_attn"),
        ({"bias": "slopes"}, NEW, "sdpa_cudnn"),
        ({"bias": "slopes_with_gradient"}, dataclasses.replace(FULL, triton=None), "te_fused"),
        ({"bias": "dense_with_gradient"}, FULL, "triton"),
        ({"bias": "dense"}, FULL, "sdpa_cudnn"),
        (TRAINED_BIAS, dataclasses.replace(FULL, triton=None), "te_fused"),
        (TRAINED_BIAS, NEW, "sdpa_efficient"),
        ({"packed": True}, FULL, "triton"),
        ({"packed": True}, dataclasses.replace(FULL, triton=None), "te_fused"),
        ({"packed": True, "capability": (8, 0)}, dataclasses.replace(FULL, triton=None), "flash_attn"),
        ({"packed": True, "bias": "dense"}, OWN, "sdpa_cudnn"),
        ({"window": (127, 0)}, FULL, "te_fused"),
        ({"window": (127, 0)}, WITHOUT_TE, "flash_attn"),
        ({"window": (127, 0)}, OWN, "triton"),
        ({"softcap": 30.0}, OWN, "triton"),
        ({"queries": 1, "any_length": True}, OWN, "triton"),
        ({"deterministic": True}, FULL, "te_fused"),
        ({"deterministic": True}, OWN, "triton"),
        ({"deterministic": True, "capability": (8, 0)}, FULL, "flash_attn"),
        ({"padding": True, "causal": False}, OWN, "sdpa_cudnn"),
        ({"any_length": True, "training": False}, FULL, "sdpa_flash"),
        (TRAINED_BIAS | {"device": "cpu", "capability": None, "dtype": "fp32"},
         dataclasses.replace(OWN, interpreted=True), "unfused"),
    ],
)  # fmt: skip
def test_order_with_everything_installed(changes: dict[str, Any], installed: InstalledSoftware, backend: str) -> None:
    assert chosen(dataclasses.replace(HOPPER, **changes), installed) == backend


def test_a_bias_by_distance_is_written_out_last() -> None:
    for bias, first in (("slopes", ("triton", "flash_attn", "sdpa_cudnn")), ("distance", ("triton", "sdpa_cudnn"))):
        names, _ = preference_order(dataclasses.replace(HOPPER, bias=bias), FULL)
        assert names[: len(first)] == first
        assert {*names[-2:]} == {"lse_first", "reference"}


@looped("capability", [(8, 0), (9, 0)])
@looped("switch", [None, True, False])
@looped(
    "flags",
    [AttentionFlags(flash=a, fused=b, unfused=c) for a, b, c in itertools.product([True, False], repeat=3)],
)
@looped("wish", ["auto", "flash", "fused", "unfused", "triton", "te_flash", "sdpa_cudnn", "te_fused", "sdpa_math"])
def test_truth_table(capability: Any, switch: bool | None, flags: AttentionFlags, wish: str) -> None:
    """Design 5: keys and flags only remove families, a wish is never overruled, and the order is the rest's."""
    table = {None: {"flash", "fused", "unfused"}, True: {"flash", "fused"}, False: {"fused", "unfused"}}
    off = {family for family in table[None] if not getattr(flags, family)}
    left = table[switch] - off
    call = dataclasses.replace(HOPPER, capability=capability, queries=32768, keys=32768)
    order = ["fused", "flash", "unfused"] if capability == (9, 0) else ["flash", "fused", "unfused"]
    family = BACKENDS_BY_NAME[wish].family if wish in BACKENDS_BY_NAME else wish
    allowed = [
        name
        for name in order
        if name in left and wish in ("auto", name, *(n for n in BACKENDS_BY_NAME if family == name))
    ]
    if not allowed:
        with pytest.raises(NoBackendError, match="no attention backend" if wish == "auto" else f"\\({wish}\\) is"):
            chosen(call, FULL, use_flash_attention=switch, attention_backend=wish, flags=flags)
        return
    decision = select_backend(call, use_flash_attention=switch, attention_backend=wish, flags=flags, installed=FULL)
    assert BACKENDS_BY_NAME[decision.backend].family == allowed[0]
    assert wish in ("auto", family, decision.backend)
    assert {row.family for row in decision.rows if row.accepted} == set(allowed)


@looped(
    ("call", "switch", "backend"),
    [
        (HOPPER, True, "te_fused"), (HOPPER, None, "triton_atomic"), (HOPPER, False, "triton_atomic"),
        (AMPERE, True, "te_flash"), (AMPERE, None, "sdpa_flash"), (AMPERE, False, "sdpa_flash"),
        (dataclasses.replace(HOPPER, dtype="fp32"), True, "sdpa_efficient"),
    ],
)  # fmt: skip
def test_transformer_engine(call: AttentionCall, switch: bool | None, backend: str) -> None:
    """First in its families, or nowhere; never where a call needs something else."""
    decision = select_backend(call, transformer_engine=switch, flags=ON, installed=FULL)
    assert decision.backend == backend
    reasons = {row.reason for row in decision.rows if row.backend.startswith("te_")}
    assert (reasons == {"removed by `transformer_engine: False`"}) is (switch is False)
    assert decision.supports_compile is not decision.backend.startswith("te_")


def test_transformer_engine_that_is_missing_is_an_error_with_the_way_out() -> None:
    for software in (NEW, dataclasses.replace(FULL, te_problem="cannot be imported: OSError")):
        with pytest.raises(NoBackendError, match=r"`transformer_engine` \(True\).*pip install 'stoker\[te\]'"):
            select_backend(HOPPER, transformer_engine=True, flags=ON, installed=software)
    with pytest.raises(NoBackendError, match=r"\(te_fused\) is removed by `transformer_engine: False`"):
        select_backend(HOPPER, transformer_engine=False, attention_backend="te_fused", flags=ON, installed=FULL)


def test_versions_of_flash_attn_are_switched_one_by_one() -> None:
    """V2 serves Ampere and dropout, V3 and V4 Hopper; flash_attn is V2."""

    def reasons(call: AttentionCall, **off: Any) -> dict[str, str]:
        rows = select_backend(call, flags=AttentionFlags(**off), installed=FULL).rows
        return {row.backend: row.reason for row in rows if row.backend in ("flash_attn", "te_flash")}

    assert reasons(HOPPER) == {"flash_attn": "can run", "te_flash": "can run"}
    no_v2 = {"flash_attn": "removed by NVTE_FLASH_ATTN_V2=0", "te_flash": "can run"}
    assert reasons(HOPPER, flash_v2=False) == no_v2
    assert "flash-attn is not installed" in reasons(AMPERE, flash_v2=False)["te_flash"]
    assert reasons(HOPPER, flash_v3=False, flash_v4=False) == {"flash_attn": "can run", "te_flash": "can run"}
    dropout = dataclasses.replace(HOPPER, dropout=0.1)
    assert reasons(dropout, flash_v3=False)["te_flash"] == "can run"
    none = reasons(HOPPER, flash_v2=False, flash_v3=False, flash_v4=False)["te_flash"]
    assert none == "removed by NVTE_FLASH_ATTN_V2=0 and NVTE_FLASH_ATTN_V3=0 and NVTE_FLASH_ATTN_V4=0"


def test_the_interpreter_is_taken_by_name_only() -> None:
    interpreted = dataclasses.replace(OWN, interpreted=True)
    assert chosen(CPU, interpreted, attention_backend="triton") == "triton"
    assert "only by name" in reason(CPU, "triton", interpreted)
    with pytest.raises(NoBackendError, match="only by name"):
        select_backend(
            dataclasses.replace(CPU, dropout=0.1), attention_backend="flash", flags=ON, installed=interpreted
        )


def test_what_grows_with_the_square_is_told() -> None:
    packed = dataclasses.replace(HOPPER, packed=True)
    masked, free = (select_backend(packed, flags=ON, installed=software) for software in (NEW, OWN))
    assert (masked.mask_bytes, masked.needs_mask) == (4 * 4096 * 4096 * 2, True)
    assert (free.mask_bytes, free.needs_mask) == (0, False)
    assert free.notes == ("triton runs its Hopper kernels here.",)
    whole = select_backend(dataclasses.replace(packed, causal=False), flags=ON, installed=OWN)
    assert whole.notes == ("triton runs its portable kernels here.",)
    biased = dataclasses.replace(HOPPER, **TRAINED_BIAS)
    assert select_backend(biased, flags=ON, installed=NEW).notes == (
        "sdpa_efficient expands the distance bias to a dense bias: 0.50 GiB per layer and copy.",
    )
    assert select_backend(biased, flags=ON, installed=OWN).notes == ("triton runs its Hopper kernels here.",)
    sloped = dataclasses.replace(HOPPER, bias="slopes")
    assert select_backend(sloped, flags=ON, installed=NEW).notes == (
        "sdpa_cudnn expands the ALiBi slopes to a dense bias: 0.50 GiB per layer and copy.",
    )
    assert select_backend(sloped, flags=ON, installed=OWN).notes == ("triton runs its Hopper kernels here.",)
    assert not select_backend(sloped, attention_backend="flash_attn", flags=ON, installed=FULL).notes


@looped("backend", BACKENDS)
def test_a_wish_is_never_overruled(backend: Any) -> None:
    """By name every backend runs where it can, and where it cannot that is an error."""
    for call in (HOPPER, AMPERE, CPU, dataclasses.replace(CPU, dropout=0.1), dataclasses.replace(HOPPER, dtype="fp64")):
        if backend.why_not(call, NEW) is None:
            assert chosen(call, attention_backend=backend.name) == backend.name
        else:
            with pytest.raises(NoBackendError, match=backend.name) as caught:
                select_backend(call, attention_backend=backend.name, flags=ON, installed=NEW)
            assert all(row.name in str(caught.value) for row in BACKENDS)


def test_a_wish_that_was_removed_names_both() -> None:
    with pytest.raises(NoBackendError, match=r"`attention_backend` \(sdpa_flash\).*removed by NVTE_FLASH_ATTN=0"):
        select_backend(CPU, attention_backend="sdpa_flash", flags=AttentionFlags(flash=False), installed=NEW)
    with pytest.raises(NoBackendError, match="`use_flash_attention: True`"):
        select_backend(CPU, attention_backend="unfused", use_flash_attention=True, flags=ON, installed=NEW)


def test_nothing_left_prints_every_row() -> None:
    dropping = dataclasses.replace(CPU, dropout=0.1)
    cases: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"unfused": False}, ("not support dropout (0.1)", "removed by NVTE_UNFUSED_ATTN=0")),
        ({"flash": False}, ("removed by NVTE_FLASH_ATTN=0", "removed by `use_flash_attention: True`")),
    ]
    for off, reasons in cases:
        flags = dataclasses.replace(ON, **off)
        with pytest.raises(NoBackendError) as caught:
            select_backend(dropping, use_flash_attention=True, flags=flags, installed=NEW)
        text = str(caught.value)
        assert all(backend.name in text for backend in BACKENDS)
        assert all(reason in text for reason in reasons)


def test_flash_on_a_cpu_falls_back_where_its_kernel_cannot_run() -> None:
    met = select_backend(CPU, use_flash_attention=True, flags=ON, installed=NEW)
    assert (met.backend, met.warning) == ("sdpa_flash", "")
    for call, why in (
        (dataclasses.replace(CPU, dropout=0.1), "dropout (0.1)"),
        (dataclasses.replace(CPU, bias="distance_with_gradient", reach=8), "a bias with gradient"),
    ):
        unmet = select_backend(call, use_flash_attention=True, flags=ON, installed=NEW)
        assert unmet.backend == "unfused"
        assert unmet.warning.startswith("`use_flash_attention` (True) cannot be met here: ")
        assert why in unmet.warning
        assert why in next(row.reason for row in unmet.rows if row.backend == "sdpa_flash")
        with pytest.raises(NoBackendError):
            select_backend(call, attention_backend="flash", flags=ON, installed=NEW)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="must be one of auto, flash, fused"):
        select_backend(CPU, attention_backend="cudnn", flags=ON, installed=NEW)


def test_kinds_of_call_with_the_same_reasons_share_a_table() -> None:
    short = select_backend(CPU, flags=ON, installed=NEW)
    long = select_backend(dataclasses.replace(CPU, queries=2 * CPU.queries, keys=2 * CPU.keys), flags=ON, installed=NEW)
    dropping = select_backend(dataclasses.replace(CPU, dropout=0.1), flags=ON, installed=NEW)
    both, alone = format_selections({"training": short, "evaluation": dropping, "generation": long})
    first, second, *rest = both.splitlines()
    assert first == f"attention, training: {short.table().splitlines()[0]}"
    assert second == f"attention, generation: {long.table().splitlines()[0]}"
    assert rest == short.table().splitlines()[1:]
    assert alone == f"attention, evaluation: {dropping.table()}"


def test_table_and_memory_note() -> None:
    decision = select_backend(dataclasses.replace(CPU, dropout=0.1), flags=ON, installed=NEW)
    lines = decision.table().splitlines()
    assert lines[0].startswith("cpu, fp32, batch 4, 16 heads in 4 groups, head width 128, 4096 x 4096 tokens, causal")
    assert lines[0].endswith(": unfused")
    assert [line.split()[1] for line in lines[1 : 1 + len(BACKENDS)]] == [row.backend for row in decision.rows]
    assert lines[-1] == "  note: unfused stores the whole score matrix: 4.0 GiB per layer and copy."
    assert not select_backend(CPU, flags=ON, installed=NEW).notes


CALLS = st.builds(
    AttentionCall,
    device=st.sampled_from(["cpu", "cuda", "mps"]),
    capability=st.sampled_from([(7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]),
    dtype=st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
    batch=st.just(2),
    heads=st.just(8),
    groups=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([1, 7, 64, 96, 128, 256, 512]),
    queries=st.sampled_from([1, 2, 128, 1000]),
    keys=st.sampled_from([1, 2, 128, 1000]),
    any_length=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([None, (3, 0)]),
    packed=st.booleans(),
    padding=st.booleans(),
    bias=st.sampled_from(get_args(Bias)),
    softcap=st.sampled_from([0.0, 30.0]),
    dropout=st.sampled_from([0.0, 0.1, 0.5]),
    training=st.booleans(),
    deterministic=st.booleans(),
)


@given(
    call=CALLS,
    switch=st.sampled_from([None, True, False]),
    flags=st.builds(AttentionFlags, flash=st.booleans(), fused=st.booleans(), unfused=st.booleans()),
)
def test_flags_and_keys_only_remove(call: AttentionCall, switch: bool | None, flags: AttentionFlags) -> None:
    free = {row.backend for row in select_backend(call, flags=ON, installed=FULL).rows if row.accepted}
    try:
        decision = select_backend(call, use_flash_attention=switch, flags=flags, installed=FULL)
    except NoBackendError as error:
        assert not flags.unfused or switch is True, "unfused runs everywhere"
        assert str(call) in str(error)  # noqa: PT017
        return
    accepted = {row.backend for row in decision.rows if row.accepted}
    assert decision.backend in accepted <= free
    families = {row.family for row in decision.rows if row.accepted}
    assert flags.flash >= ("flash" in families)
    assert flags.fused >= ("fused" in families)
    assert flags.unfused >= ("unfused" in families)


# ---------------------------------------------------------------- measured times


def measured(
    times: Mapping[str, float], installed: InstalledSoftware = FULL, call: AttentionCall = HOPPER
) -> InstalledSoftware:
    """Return software with the times of one call, half of each forward."""
    one = MeasuredCall(call=call, milliseconds={name: (time / 2, time / 2) for name, time in times.items()})
    return dataclasses.replace(installed, measured=MeasuredTimes(source="T of D", calls=(one,)))


def test_the_fastest_of_the_first_family_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_support, "ATOMIC_IS_FASTEST", {})
    card = measured({"sdpa_cudnn": 3.0, "te_fused": 2.0, "triton": 1.0, "sdpa_flash": 0.9, "te_flash": 1.2})
    assert chosen(HOPPER, FULL) == "sdpa_cudnn"
    decision = select_backend(HOPPER, flags=ON, installed=card)
    reasons = {row.backend: row.reason for row in decision.rows}
    assert decision.backend == "te_fused", "flash would be faster, and is not the first family"
    assert reasons["te_fused"].endswith(
        "; by T of D, head width 128, group size 4, 4096 tokens, causal: sdpa_cudnn takes 1.50 times as long)"
    )
    assert reasons["sdpa_cudnn"] == "can run"
    assert chosen(HOPPER, card, flags=AttentionFlags(fused=False)) == "sdpa_flash"
    assert chosen(HOPPER, card, attention_backend="flash") == "sdpa_flash"
    assert chosen(HOPPER, card, attention_backend="triton") == "triton"
    assert chosen(HOPPER, card, transformer_engine=False) == "sdpa_cudnn"
    assert chosen(HOPPER, measured({"sdpa_cudnn": 2.03, "te_fused": 2.0})) == "sdpa_cudnn", "within the margin"
    assert chosen(HOPPER, measured({"te_fused": 2.0})) == "sdpa_cudnn", "it has no time of the first one"
    forward = {"sdpa_cudnn": (1.0, 9.0), "te_fused": (2.0, 2.0)}
    one = MeasuredCall(call=HOPPER, milliseconds=forward)
    card = dataclasses.replace(FULL, measured=MeasuredTimes(source="T", calls=(one,)))
    assert chosen(HOPPER, card) == "te_fused"
    assert chosen(dataclasses.replace(HOPPER, training=False), card) == "sdpa_cudnn", "only the forward pass counts"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_dim": 64}, "not measured with head_dim 64"),
        ({"causal": False}, "not measured with causal False"),
        ({"queries": 2000, "keys": 2000}, "no measured length is near"),
        ({"any_length": True}, "not measured with any_length True"),
        ({"dropout": 0.1}, "not measured with dropout 0.1"),
        ({"deterministic": True}, "not measured with deterministic True"),
        ({"queries": 512}, "not measured with other queries than keys"),
        ({"bias": "dense"}, "not measured with bias dense"),
    ],
)
def test_calls_that_no_measured_one_stands_for(changes: dict[str, Any], why: str) -> None:
    call, card = dataclasses.replace(HOPPER, **changes), measured({"sdpa_cudnn": 3.0, "te_fused": 2.0})
    assert chosen(call, card) == chosen(call, FULL)
    row = next(row for row in select_backend(call, flags=ON, installed=card).rows if row.reason.startswith("chosen"))
    assert f"T of D decides nothing here: {why}" in row.reason


def test_nearest_measured_call() -> None:
    def sized(tokens: int, groups: int) -> AttentionCall:
        return dataclasses.replace(HOPPER, queries=tokens, keys=tokens, groups=groups)

    sizes = [(1024, 4), (4096, 4), (4096, 16), (16384, 4)]
    calls = tuple(MeasuredCall(call=sized(*each), milliseconds={}) for each in sizes)
    times = MeasuredTimes(source="T", calls=calls)
    assert times.nearest(sized(1500, 4))[0] == calls[0]
    assert times.nearest(sized(3000, 4))[0] == calls[1]
    assert times.nearest(sized(3000, 8))[0] in calls[1:3]
    assert times.nearest(sized(3000, 16))[0] == calls[2]
    assert times.nearest(sized(1 << 20, 4))[0] == calls[3], "rates no longer change beyond the longest"
    assert times.nearest(sized(500, 4))[0] is None
    split = dataclasses.replace(sized(4096, 4), dtype="fp16", training=False, split=True, batch=1)
    assert times.nearest(split)[0] == calls[1]
    assert calls[1].flops == 14 * 128 * 4 * 16 * 4096**2 / 2


def test_speed_is_not_bought_with_memory() -> None:
    call = dataclasses.replace(HOPPER, bias="distance_with_gradient", reach=128, groups=16)
    card = measured({"triton": 2.0, "sdpa_efficient": 1.0}, call=call)
    assert chosen(call, card) == "triton", "the others expand the bias over queries and keys"


@given(call=CALLS, flags=st.builds(AttentionFlags, flash=st.booleans(), fused=st.booleans()), data=st.data())
def test_times_never_change_the_family(call: AttentionCall, flags: AttentionFlags, data: st.DataObject) -> None:
    times: dict[str, float] = {row.name: data.draw(st.floats(0.1, 9)) for row in BACKENDS}
    card = measured(times, call=call)
    before = select_backend(call, flags=flags, installed=FULL)
    after = select_backend(call, flags=flags, installed=card)
    assert BACKENDS_BY_NAME[after.backend].family == BACKENDS_BY_NAME[before.backend].family
    assert [row.accepted for row in after.rows] == [row.accepted for row in before.rows]
    assert after == select_backend(call, flags=flags, installed=card)


def test_dispatch_imports_no_torch() -> None:
    config = "stoker.models.config"
    code = f"import sys, stoker.kernels.attention.dispatch, {config}.stack\n"
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
