"""Slices, rules and the closed formula of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_gpt, parameter_count
from stoker.models.config.block import Finding
from stoker.models.config.counting import count_parameters
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.rules import gpt_rules
from stoker.models.config.slices import gpt_slice


def keys(**changes: Any) -> GPTKeys:
    return GPTKeys.model_validate(changes)


def findings(**changes: Any) -> list[Finding]:
    return list(gpt_rules(keys(**changes)))


def test_defaults_are_silent() -> None:
    assert findings() == []
    assert findings(position_embedding_type="rope", activation="fast-swiglu", normalization="rmsnorm", bias=False) == []
    assert findings(num_query_groups=4) == findings(num_query_groups=1) == findings(num_query_groups=12) == []
    assert findings(qkv_bias=True, bias=False) == findings(kv_channels=100) == []
    assert findings(max_position_embeddings=1024) == findings(seq_len_interpolation_factor=1.0) == []


@pytest.mark.parametrize(
    ("changes", "level", "path", "words"),
    [
        ({"num_attention_heads": 10}, "error", "num_attention_heads",
         "(768) must be a multiple of `num_attention_heads` (10) unless `kv_channels` is set. "
         "use num_attention_heads=3, 4, 6, 8, 12 or 16"),
        ({"num_query_groups": 5}, "error", "num_query_groups",
         "`num_attention_heads` (12) must be a multiple of `num_query_groups` (5). "
         "use num_query_groups=1, 2, 3, 4, 6 or 12"),
        ({"num_query_groups": 24}, "error", "num_query_groups", "(24)"),
        ({"position_embedding_type": "rope", "kv_channels": 7}, "error", "rotary_percentage", "rotates 7 channels"),
        ({"position_embedding_type": "rope", "rotary_percentage": 0.01}, "error", "rotary_percentage",
         "rotates 0 channels"),
        ({"position_embedding_type": "rope", "kv_channels": 1}, "error", "kv_channels", "heads 1 wide"),
        ({"rotary_base": 500.0}, "warning", "rotary_base", "(500.0) has no effect with `position_embedding_type` (lea"),
        ({"rotary_interleaved": True, "position_embedding_type": "none"}, "warning", "rotary_interleaved", "(none)"),
        ({"seq_len_interpolation_factor": 2.0}, "warning", "seq_len_interpolation_factor", "no effect"),
        ({"openai_gelu": True, "activation": "relu"}, "error", "openai_gelu", "`activation` (relu)"),
        ({"openai_gelu": True, "activation": "approx-gelu"}, "error", "openai_gelu", "(approx-gelu)"),
        ({"attention_backend": "unfused", "use_flash_attention": True}, "error", "attention_backend", "contradicts"),
        ({"attention_backend": "reference", "use_flash_attention": True}, "error", "attention_backend", "contradicts"),
        ({"attention_backend": "sdpa_flash", "use_flash_attention": False}, "error", "attention_backend",
         "excludes flash attention"),
        ({"attention_backend": "te_flash", "use_flash_attention": False}, "error", "attention_backend",
         "excludes flash attention"),
        ({"attention_backend": "te_fused", "transformer_engine": False}, "error", "attention_backend", "contradicts"),
        ({"attention_backend": "triton", "transformer_engine": True}, "warning", "transformer_engine", "no effect"),
        ({"attention_backend": "flash", "masked_softmax_fusion": False}, "warning", "masked_softmax_fusion",
         "`unfused` backend"),
        ({"use_flash_attention": True, "masked_softmax_fusion": False}, "warning", "masked_softmax_fusion",
         "no effect with `use_flash_attention` (True)"),
        ({"qkv_bias": True}, "warning", "qkv_bias", "no effect"),
        ({"max_position_embeddings": 100}, "error", "max_position_embeddings",
         "(100) must not be smaller than `encoder_seq_length` (512)"),
        ({"max_position_embeddings": 100, "position_embedding_type": "rope"}, "warning", "max_position_embeddings",
         "a longer `encoder_seq_length` (512)"),
        ({"max_position_embeddings": 999, "position_embedding_type": "none"}, "warning", "max_position_embeddings",
         "(none)"),
    ],
)  # fmt: skip
def test_rule(changes: dict[str, Any], level: str, path: str, words: str) -> None:
    (finding,) = findings(**changes)
    assert (finding.level, finding.keys[0]) == (level, path)
    assert words in f"{finding.message} {finding.fix}"
    assert finding.fix
    assert all(name in GPTKeys.model_fields for name in finding.keys)


def test_all_findings_come_at_once() -> None:
    wrong = findings(
        num_attention_heads=10,
        num_query_groups=3,
        openai_gelu=True,
        activation="relu",
        max_position_embeddings=1,
        use_flash_attention=True,
        attention_backend="unfused",
    )
    assert len([finding for finding in wrong if finding.level == "error"]) == 5


@example(width=200, percentage=0.578125)
@given(width=st.integers(2, 300), percentage=st.floats(0.001, 1.0))
def test_suggested_percentage_is_valid(width: int, percentage: float) -> None:
    common = {"position_embedding_type": "rope", "kv_channels": width}
    for finding in findings(**common, rotary_percentage=percentage):
        suggested = float(finding.fix.removeprefix("use rotary_percentage=").split(",")[0])
        assert findings(**common, rotary_percentage=suggested) == []


def test_slices() -> None:
    gpt = gpt_slice(
        keys(
            hidden_size=64, num_attention_heads=4, kv_channels=20, num_query_groups=2, num_layers=8, qkv_bias=True,
            bias=False, init_method_std=0.01, normalization="layernorm1p", position_embedding_type="rope",
            rotary_percentage=0.5, seq_len_interpolation_factor=4.0, encoder_seq_length=32, max_position_embeddings=64,
        ),
        vocab_size=130,
    )  # fmt: skip
    attention, rotary = gpt.stack.attention, gpt.stack.rotary
    assert (attention.heads, attention.groups, attention.head_dim) == (4, 2, 20)
    assert attention.scale == 1 / math.sqrt(20)
    assert attention.qkv_bias
    assert not attention.output_bias
    assert not gpt.stack.mlp.bias
    assert gpt.stack.norm.zero_centered
    assert rotary
    assert (rotary.dim, rotary.position_scale, rotary.positions) == (10, 0.25, 64)
    assert gpt.stack.output_init_std == pytest.approx(0.01 / 4)
    assert (gpt.vocab_size, gpt.padded_vocab_size, gpt.learned_positions) == (130, 256, None)
    plain = gpt_slice(keys(normalize_attention_scores=False, use_scaled_init_method=False), vocab_size=128)
    assert plain.stack.attention.scale == 1.0
    assert plain.stack.output_init_std == plain.stack.init_std
    assert (plain.padded_vocab_size, plain.learned_positions) == (128, 512)


def test_override_vocab_size() -> None:
    assert gpt_slice(keys(override_vocab_size=200), vocab_size=130).vocab_size == 200
    with pytest.raises(ValueError, match=r"`override_vocab_size` \(100\) must not be smaller.*use 130 or more"):
        gpt_slice(keys(override_vocab_size=100), vocab_size=130)


GEOMETRY = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "hidden_size": st.sampled_from([12, 24]),
        "ffn_hidden_size": st.integers(1, 40),
        "num_attention_heads": st.sampled_from([2, 6]),
        "kv_channels": st.sampled_from([None, 2, 8]),
        "num_query_groups": st.sampled_from([None, 1, 2]),
        "normalization": st.sampled_from(["layernorm", "layernorm1p", "rmsnorm"]),
        "activation": st.sampled_from(["gelu", "fast-swiglu", "reglu"]),
        "bias": st.booleans(),
        "qkv_bias": st.booleans(),
        "position_embedding_type": st.sampled_from(["learned_absolute", "rope", "none"]),
        "max_position_embeddings": st.sampled_from([None, 600]),
        "make_vocab_size_divisible_by": st.sampled_from([1, 64]),
        "override_vocab_size": st.sampled_from([None, 200]),
        "share_embeddings_and_output_weights": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(changes=GEOMETRY, vocab_size=st.integers(1, 200))
def test_counted_parameters_are_built(changes: dict[str, Any], vocab_size: int) -> None:
    model = build_gpt(
        keys(**changes),
        vocab_size=vocab_size,
        device="meta",
        dtype=torch.bfloat16,
        flags=AttentionFlags(),
        micro_batch_size=1,
    )
    assert count_parameters(keys(**changes), vocab_size) == parameter_count(model)


def test_gpt2_has_124_million() -> None:
    gpt2 = keys(encoder_seq_length=1024, make_vocab_size_divisible_by=1)
    assert count_parameters(gpt2, 50257) == 124_439_808
