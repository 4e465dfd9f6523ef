"""Slices, rules and the closed formula of parameters."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from gpt_builder import build_gpt
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples, looped

from stoker.models.build import num_parameters
from stoker.models.config.bert import BertKeys
from stoker.models.config.families import model_rules
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.config.key_block import Finding
from stoker.models.config.model import single_stack_rules, window_is_shorter_than_sequences
from stoker.models.config.positions import PositionEmbedding, resolve_window
from stoker.models.config.stack import stack_rules
from stoker.models.config.t5 import T5Keys
from stoker.models.model_cost import count_parameters


def keys(**changes: Any) -> GPTKeys:
    return GPTKeys.model_validate(changes)


def findings(**changes: Any) -> list[Finding]:
    return list(single_stack_rules(keys(**changes), causal=True))


def test_defaults_are_silent() -> None:
    assert findings() == []
    assert findings(position_embedding_type="rope", activation="fast-swiglu", normalization="rmsnorm", bias=False) == []
    assert findings(num_query_groups=4) == findings(num_query_groups=1) == findings(num_query_groups=12) == []
    assert findings(qkv_bias=True, bias=False) == findings(kv_channels=100) == []
    assert findings(max_position_embeddings=1024) == findings(seq_len_interpolation_factor=1.0) == []


@looped(
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
        ({"max_position_embeddings": 999, "position_embedding_type": "alibi"}, "warning", "max_position_embeddings",
         "(alibi)"),
        ({"max_position_embeddings": 100, "position_embedding_type": "learned_parameters"}, "error",
         "max_position_embeddings", "(100) must not be smaller than `encoder_seq_length` (512)"),
        ({"position_embedding_type": "xpos", "kv_channels": 7}, "error", "kv_channels", "heads 7 wide"),
        ({"position_embedding_type": "sandwich", "kv_channels": 9}, "error", "kv_channels", "heads 9 wide"),
        ({"num_attention_heads_alibi": 2}, "warning", "num_attention_heads_alibi", "position_embedding_type=alibi"),
        ({"num_attention_heads_alibi": 13, "position_embedding_type": "alibi"}, "error", "num_attention_heads_alibi",
         "(13) must not be more than `num_attention_heads` (12)"),
        ({"relative_attention_num_buckets": 8}, "warning", "relative_attention_num_buckets", "=relative"),
        ({"relative_attention_max_distance": 9, "position_embedding_type": "kerple"}, "warning",
         "relative_attention_max_distance", "=relative"),
        ({"relative_attention_max_distance": 16, "position_embedding_type": "relative"}, "error",
         "relative_attention_max_distance", "more than the 16 distances"),
        ({"rotary_scaling": "yarn"}, "warning", "rotary_scaling", "position_embedding_type=rope"),
        ({"rotary_base": 9.0, "position_embedding_type": "xpos"}, "warning", "rotary_base", "(xpos)"),
        ({"rotary_low_turns": 2.0, "position_embedding_type": "rope"}, "warning", "rotary_low_turns",
         "`rotary_scaling` (null)"),
        ({"rotary_scaling": "llama3", "rotary_low_turns": 4.0, "position_embedding_type": "rope"}, "error",
         "rotary_low_turns", "(4) must be smaller than `rotary_high_turns` (4)"),
        ({"rotary_scaling": "yarn", "rotary_base": 1.0, "position_embedding_type": "rope"}, "error", "rotary_base",
         "greater than 1"),
        ({"rotary_scaling": "yarn", "scale_positional_embedding": True, "position_embedding_type": "rope"}, "error",
         "scale_positional_embedding", "contradicts `rotary_scaling` (yarn)"),
        ({"rotary_scaling": "yarn", "seq_len_interpolation_factor": 2.0, "position_embedding_type": "rope"}, "error",
         "seq_len_interpolation_factor", "rotary_scaling=null"),
        ({"scale_positional_embedding": True, "seq_len_interpolation_factor": 2.0, "position_embedding_type": "rope"},
         "error", "seq_len_interpolation_factor", "scale_positional_embedding=False"),
        ({"window_size": [10, 3]}, "warning", "window_size", "the 3 tokens to the right"),
        ({"window_size": [511, 0]}, "warning", "window_size", "no sequence of this model is longer than 512"),
    ],
)  # fmt: skip
def test_rule(changes: dict[str, Any], level: str, path: str, words: str) -> None:
    (finding,) = findings(**changes)
    assert (finding.level, finding.keys[0]) == (level, path)
    assert words in f"{finding.message} {finding.fix}"
    assert finding.fix
    assert all(name in GPTKeys.model_fields for name in finding.keys)


def test_a_stack_that_sees_both_ways_has_rules_of_its_own() -> None:
    relative = {"position_embedding_type": "relative", "relative_attention_max_distance": 100}

    def found(causal: bool, **changes: Any) -> list[str]:
        return [finding.message for finding in stack_rules(keys(**relative, **changes), causal=causal)]

    assert found(True, relative_attention_num_buckets=6) == found(False, relative_attention_num_buckets=8) == []
    (message,) = found(False, relative_attention_num_buckets=6)
    assert "(6) must be a multiple of 4" in message
    assert found(False, relative_attention_num_buckets=396) == []
    (message,) = found(False, relative_attention_num_buckets=400)
    assert "more than the 100 distances" in message
    assert found(False, window_size=[4, 4]) == []
    assert len(found(True, window_size=[4, 4])) == 1


def test_windows() -> None:
    def window(causal: bool, longest: int | None, *sides: int) -> tuple[int, int] | None:
        return resolve_window(keys(window_size=list(sides)), causal=causal, max_length=longest)

    assert resolve_window(keys(), causal=True) is None
    assert window(True, None, 4, -1) == window(True, None, 4, 9) == window(True, 6, 4, 0) == (4, 0)
    assert window(True, 5, 4, 0) is window(True, None, -1, 3) is window(False, None, -1, -1) is None
    assert window(False, None, 4, -1) == (4, -1)
    assert window(False, 5, 4, 3) == (-1, 3)
    assert window(False, 5, 3, 4) == (3, -1)
    # a table bounds the length of texts, ALiBi does not
    bounded, any_length = (
        gpt_slice(keys(window_size=[511, 0], position_embedding_type=kind), vocab_size=9) for kind in ("rope", "alibi")
    )
    assert bounded.stack.attention.window is None
    assert any_length.stack.attention.window == (511, 0)


def test_a_window_of_a_bert_has_two_sides() -> None:
    def found(left: int, right: int) -> list[str]:
        bert = BertKeys.model_validate({"window_size": [left, right]})
        return [finding.keys[0] for finding in window_is_shorter_than_sequences(bert, causal=False)]

    assert found(511, 510) == found(3, -1) == found(-1, -1) == []
    assert found(511, 511) == found(511, -1) == ["window_size"]


def test_a_window_of_a_t5_encoder_has_two_sides() -> None:
    def found(kind: str, *window: int, **changes: object) -> list[tuple[str, ...]]:
        t5 = {"encoder": {"window_size": list(window), "position_embedding_type": kind}, "seq_length": 64, **changes}
        return [finding.keys for finding in model_rules(T5Keys.model_validate(t5))]

    said = [("encoder.window_size", "seq_length", "max_position_embeddings")]
    assert found("rope", 63, 62) == found("relative", 63, 63) == found("rope", -1, -1) == []
    assert found("rope", 63, 63) == found("rope", 99, -1) == said
    assert found("rope", 99, 99, max_position_embeddings=128) == []


def test_buckets_of_cross_attention_are_for_both_directions() -> None:
    """Two buckets do for a causal stack, but leave one for each direction."""

    def found(buckets: int, *, alone: bool) -> list[tuple[str, ...]]:
        relative = {"position_embedding_type": "relative", "relative_attention_num_buckets": buckets}
        t5 = {"decoder": relative | {"relative_position_bias_self_attention_only": alone}}
        return [finding.keys for finding in model_rules(T5Keys.model_validate(t5)) if finding.level == "error"]

    assert found(2, alone=True) == found(8, alone=False) == []
    assert found(2, alone=False) == found(6, alone=False) == [("decoder.relative_attention_num_buckets",)]


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
        "position_embedding_type": st.sampled_from(get_args(PositionEmbedding)),
        "relative_attention_num_buckets": st.sampled_from([2, 8]),
        "transformer_block_type": st.sampled_from(["pre_ln", "post_ln", "normformer", "parallel_ln"]),
        "qk_layernorm": st.booleans(),
        "headscale": st.booleans(),
        "max_position_embeddings": st.sampled_from([None, 600]),
        "make_vocab_size_divisible_by": st.sampled_from([1, 64]),
        "override_vocab_size": st.sampled_from([None, 200]),
        "share_embeddings_and_output_weights": st.booleans(),
    }
)


@examples(60)
@given(changes=GEOMETRY, vocab_size=st.integers(1, 200))
def test_counted_parameters_are_built(changes: dict[str, Any], vocab_size: int) -> None:
    model = build_gpt(keys(**changes), vocab_size=vocab_size, device="meta", dtype=torch.bfloat16, micro_batch_size=1)
    assert count_parameters(keys(**changes), vocab_size) == num_parameters(model)


def test_gpt2_has_124_million() -> None:
    gpt2 = keys(encoder_seq_length=1024, make_vocab_size_divisible_by=1)
    assert count_parameters(gpt2, 50257) == 124_439_808
