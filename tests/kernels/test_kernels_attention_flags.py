"""NVTE_* variables: what each switches off, what is said about the others, and the scope of TransformerEngine."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
from tiers import looped

from stoker.kernels.attention.flags import (
    KNOWN_FLAGS,
    SUPPORTED_FLAGS,
    AttentionFlags,
    override_environment,
    read_flags,
)

FIELD_OF = {
    "NVTE_FLASH_ATTN": "flash",
    "NVTE_FUSED_ATTN": "fused",
    "NVTE_UNFUSED_ATTN": "unfused",
    "NVTE_FLASH_ATTN_V2": "flash_v2",
    "NVTE_FLASH_ATTN_V3": "flash_v3",
    "NVTE_FLASH_ATTN_V4": "flash_v4",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "allow_nondeterministic",
    "NVTE_MASKED_SOFTMAX_FUSION": "masked_softmax_fusion",
}
LEVELS = ("NVTE_DEBUG", "NVTE_DEBUG_LEVEL")


def test_flags_default_to_on() -> None:
    assert read_flags({}) == AttentionFlags()
    assert not read_flags({}).notes()
    assert {*FIELD_OF, *LEVELS} == set(SUPPORTED_FLAGS)
    assert len(KNOWN_FLAGS) == len(set(KNOWN_FLAGS))
    assert {*FIELD_OF.values(), "debug", "set_variables"} == {field.name for field in fields(AttentionFlags)}


@looped("name", FIELD_OF)
def test_each_flag_switches_one_thing_off(name: str) -> None:
    flags = read_flags({name: "0"})
    assert [field for field in FIELD_OF.values() if not getattr(flags, field)] == [FIELD_OF[name]]
    assert read_flags({name: " 1 "}) == AttentionFlags(set_variables=((name, " 1 "),))
    with pytest.raises(ValueError, match=rf"`{name}` \(yes\) must be 0 or 1"):
        read_flags({name: "yes"})


@pytest.mark.parametrize(("debug", "level", "product"), [("1", "2", 2), ("1", "1", 1), ("0", "2", 0), ("1", None, 0)])
def test_the_level_is_a_product(debug: str, level: str | None, product: int) -> None:
    values = {"NVTE_DEBUG": debug} | ({"NVTE_DEBUG_LEVEL": level} if level else {})
    assert read_flags(values).debug == product
    assert len(read_flags(values).notes()) == (level is None)
    with pytest.raises(ValueError, match=r"`NVTE_DEBUG` \(-1\) must be 0, 1 or 2"):
        read_flags({"NVTE_DEBUG": "-1"})


def test_flags_read_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert not read_flags().fused


def test_notes_tell_what_does_nothing() -> None:
    flags = read_flags({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN_BACKEND": "1", "NVTE_FLASH_ATN": "0", "PATH": "x"})
    cudnn_stays, misspelt, old = flags.notes()
    assert "cuDNN stays" in cudnn_stays
    assert "did you mean NVTE_FLASH_ATTN?" in misspelt
    assert "since 2.16" in old
    assert not read_flags({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}).notes()


def test_the_override_puts_back_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)

    def fail_inside() -> None:
        with override_environment({"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"}):
            assert (os.environ["NVTE_FLASH_ATTN"], os.environ["NVTE_FUSED_ATTN"]) == ("1", "0")
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert os.environ["NVTE_FLASH_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in os.environ
