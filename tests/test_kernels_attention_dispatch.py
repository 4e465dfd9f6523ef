"""The dispatcher's table: pure functions, every row with its reason, no device needed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.kernels.attention.call import AttentionCall, Installed
from stoker.kernels.attention.dispatch import BACKENDS, NoBackendError, choose
from stoker.kernels.attention.flags import ACTING_FLAGS, KNOWN_FLAGS, AttentionFlags, read_flags

NEW = Installed(torch=(2, 13), cudnn=92000)
BF16 = {"dtype": "bf16", "batch": 4, "heads": 16, "groups": 4, "head_dim": 128, "queries": 4096, "keys": 4096}
HOPPER = AttentionCall(device="cuda", capability=(9, 0), training=True, **BF16)
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))
CPU = dataclasses.replace(HOPPER, device="cpu", capability=None, dtype="fp32")
ON = AttentionFlags()


def chosen(call: AttentionCall, installed: Installed = NEW, **wishes: Any) -> str:
    return choose(call, **({"flags": ON, "installed": installed} | wishes)).backend


def reason(call: AttentionCall, backend: str, installed: Installed = NEW, **wishes: Any) -> str:
    decision = choose(call, **({"flags": ON, "installed": installed} | wishes))
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


def test_packed_documents_go_to_kernels_that_take_a_mask() -> None:
    packed = {"packed": True}
    assert chosen(dataclasses.replace(HOPPER, **packed)) == "sdpa_cudnn"
    assert chosen(dataclasses.replace(AMPERE, **packed)) == "sdpa_efficient"
    assert chosen(dataclasses.replace(CPU, **packed)) == "sdpa_flash"
    decision = choose(dataclasses.replace(HOPPER, **packed), flags=ON, installed=NEW)
    assert decision.call.mask_bytes == 4 * 4096 * 4096 * 2
    assert decision.notes[0].startswith("one mask of 0.12 GiB for all layers")
    assert (HOPPER.mask_bytes, choose(HOPPER, flags=ON, installed=NEW).notes) == (0, ())


def test_generation_does_not_plan_every_length_with_cudnn() -> None:
    assert chosen(dataclasses.replace(HOPPER, any_length=True, training=False)) == "sdpa_flash"
    assert chosen(dataclasses.replace(HOPPER, any_length=True), attention_backend="fused") == "sdpa_cudnn"


@pytest.mark.parametrize(
    ("changes", "backend", "words"),
    [
        ({"head_dim": 192}, "sdpa_cudnn", "up to 128"),
        ({"head_dim": 100}, "sdpa_cudnn", "multiples of 8"),
        ({"dropout": 0.1}, "sdpa_cudnn", "sixteenths"),
        ({"deterministic": True}, "sdpa_cudnn", "not deterministic"),
        ({"deterministic": True}, "sdpa_flash", "use_deterministic_algorithms"),
        ({"bias": "dense"}, "sdpa_flash", "no bias"),
        ({"packed": True}, "sdpa_flash", "no mask"),
        ({"bias": "dense_with_gradient"}, "sdpa_cudnn", "no gradient for a bias"),
        ({"window": (127, 0)}, "sdpa_flash", "no window"),
        ({"queries": 1}, "sdpa_flash", "top-left"),
        ({"queries": 1, "keys": 1}, "sdpa_cudnn", "single token"),
        ({"capability": (7, 5)}, "sdpa_flash", "sm_80 to sm_121, not sm_75"),
        ({"capability": (7, 5)}, "sdpa_efficient", "does not take bf16 on sm_75"),
        ({"capability": (8, 9), "head_dim": 224}, "sdpa_flash", "cannot train heads 224 wide"),
        ({"head_dim": 320}, "sdpa_flash", "up to 256"),
        ({"head_dim": 100}, "sdpa_efficient", "multiple of 8"),
        ({"dtype": "fp32", "head_dim": 6}, "sdpa_efficient", "multiple of 4"),
        ({"capability": (10, 0)}, "sdpa_cudnn", "#193893"),
        ({}, "reference", "only by name"),
        ({"device": "cpu"}, "sdpa_efficient", "needs a CUDA device"),
        ({"device": "cpu", "dropout": 0.1, "bias": "dense_with_gradient"}, "sdpa_flash", "no dropout (0.1) and no a"),
    ],
)  # fmt: skip
def test_why_not(changes: dict[str, Any], backend: str, words: str) -> None:
    assert words in reason(dataclasses.replace(HOPPER, **changes), backend)


@pytest.mark.parametrize(
    ("cudnn", "changes", "words"),
    [
        (None, {}, "found none"),
        (8907, {}, "found 8907"),
        (91200, {"dropout": 0.125}, "9.11 to 9.13"),
        (91002, {"queries": 4000, "keys": 4000}, "#169849"),
        (91002, {"any_length": True}, "#169849"),
    ],
)
def test_old_cudnn(cudnn: int | None, changes: dict[str, Any], words: str) -> None:
    assert words in reason(dataclasses.replace(HOPPER, **changes), "sdpa_cudnn", Installed(torch=(2, 11), cudnn=cudnn))


def test_cudnn_where_it_may() -> None:
    assert chosen(dataclasses.replace(HOPPER, dropout=0.125)) == "sdpa_cudnn"
    assert chosen(HOPPER, Installed(torch=(2, 11), cudnn=91002)) == "sdpa_cudnn"
    assert chosen(dataclasses.replace(HOPPER, deterministic=True, training=False)) == "sdpa_cudnn"


def test_determinism_under_torch() -> None:
    deterministic = dataclasses.replace(HOPPER, deterministic=True)
    assert chosen(deterministic) == "unfused"
    assert chosen(deterministic, dataclasses.replace(NEW, deterministic_algorithms=True)) == "sdpa_flash"


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_wish_is_never_overruled(backend: Any) -> None:
    """By name every backend runs where it can, and where it cannot that is an error."""
    for call in (HOPPER, AMPERE, CPU, dataclasses.replace(CPU, dropout=0.1), dataclasses.replace(HOPPER, dtype="fp64")):
        if backend.why_not(call, NEW) is None:
            assert chosen(call, attention_backend=backend.name) == backend.name
        else:
            with pytest.raises(NoBackendError, match=backend.name) as caught:
                choose(call, attention_backend=backend.name, flags=ON, installed=NEW)
            assert all(row.name in str(caught.value) for row in BACKENDS)


def test_a_wish_that_was_removed_names_both() -> None:
    with pytest.raises(NoBackendError, match=r"`attention_backend` \(sdpa_flash\).*removed by NVTE_FLASH_ATTN=0"):
        choose(CPU, attention_backend="sdpa_flash", flags=AttentionFlags(flash=False), installed=NEW)
    with pytest.raises(NoBackendError, match="`use_flash_attention: True`"):
        choose(CPU, attention_backend="unfused", use_flash_attention=True, flags=ON, installed=NEW)


def test_nothing_left_prints_every_row() -> None:
    with pytest.raises(NoBackendError) as caught:
        choose(dataclasses.replace(CPU, dropout=0.1), use_flash_attention=True, flags=ON, installed=NEW)
    text = str(caught.value)
    assert all(backend.name in text for backend in BACKENDS)
    assert "no dropout (0.1)" in text
    assert "removed by `use_flash_attention: True`" in text


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="must be one of auto, flash, fused"):
        choose(CPU, attention_backend="cudnn", flags=ON, installed=NEW)


def test_table_and_memory_note() -> None:
    decision = choose(dataclasses.replace(CPU, dropout=0.1), flags=ON, installed=NEW)
    lines = decision.table().splitlines()
    assert lines[0].startswith("cpu, fp32, batch 4, 16 heads in 4 groups, head width 128, 4096 x 4096 tokens, causal")
    assert lines[0].endswith(": unfused")
    assert [line.split()[1] for line in lines[1 : 1 + len(BACKENDS)]] == [row.backend for row in decision.rows]
    assert lines[-1] == "  note: unfused holds the whole score matrix: 4.0 GiB per layer and copy."
    assert not choose(CPU, flags=ON, installed=NEW).notes


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
    bias=st.sampled_from(["none", "dense", "dense_with_gradient"]),
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
    free = {row.backend for row in choose(call, flags=ON, installed=NEW).rows if row.accepted}
    try:
        decision = choose(call, use_flash_attention=switch, flags=flags, installed=NEW)
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


# ---------------------------------------------------------------- flags


def test_flags_default_to_on() -> None:
    assert read_flags({}) == AttentionFlags()
    assert not read_flags({}).notes()


@pytest.mark.parametrize("name", ACTING_FLAGS)
def test_each_flag_switches_one_thing_off(name: str) -> None:
    fields = ("flash", "fused", "unfused", "allow_nondeterministic")
    flags = read_flags({name: "0"})
    assert [field for field in fields if not getattr(flags, field)] == [fields[ACTING_FLAGS.index(name)]]
    with pytest.raises(ValueError, match=rf"`{name}` \(yes\) must be 0 or 1"):
        read_flags({name: "yes"})


def test_flags_read_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert not read_flags().fused


def test_notes_tell_what_does_nothing() -> None:
    flags = read_flags({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN_BACKEND": "1", "NVTE_FLASH_ATN": "0", "PATH": "x"})
    cudnn_stays, misspelt, old = flags.notes()
    assert "cuDNN stays" in cudnn_stays
    assert "did you mean NVTE_FLASH_ATTN?" in misspelt
    assert "since 2.16" in old
    assert len(KNOWN_FLAGS) == len(set(KNOWN_FLAGS))


def test_dispatch_imports_no_torch() -> None:
    code = "import sys, stoker.kernels.attention.dispatch, stoker.models.config.rules, stoker.models.config.counting\n"
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
