"""A GPT with each kind of positions, window, softcap and order of norms: lengths, weights, loss, compilation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt_builder import build_gpt, layers_of
from tiers import cases, full_only
from torch import Tensor

from stoker.kernels.attention.call_spec import InstalledSoftware
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.relative_position_buckets import relative_buckets
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.dispatch.attention_calls import CallContext, attention_calls, choose_backends
from stoker.models.gpt import GPT
from stoker.models.layers.attention_bias import Kerple, RelativeBias, Sandwich, alibi_slopes
from stoker.models.layers.context import LayerContext
from stoker.models.layers.mlp import MLP

VOCAB, TOKENS, LONG = 50, 16, 64
TABLES = ["learned_absolute", "learned_parameters", "rope", "xpos"]
KINDS = [*TABLES, "alibi", "kerple", "sandwich", "relative", "none"]
FP64 = torch.float64
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": [5, 0], "position_embedding_type": "alibi"},
    "softcap": {"attn_logit_softcapping": 0.5, "position_embedding_type": "kerple"},
    "sinks": {"softmax_type": "learnable", "position_embedding_type": "rope"},
    "normed_heads": {"qk_layernorm": True, "position_embedding_type": "xpos", "num_query_groups": 2},
    "yarn": {"position_embedding_type": "rope", "rotary_scaling": "yarn", "rotary_original_length": 100},
    "normformer": {"transformer_block_type": "normformer", "headscale": True, "position_embedding_type": "sandwich"},
    "post_ln": {"transformer_block_type": "post_ln", "position_embedding_type": "relative"},
}


def gpt(kind: str = "none", *, tokens: int = TOKENS, longest: int | None = None, **changes: Any) -> GPT:
    keys: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 32, "num_attention_heads": 4,
        "encoder_seq_length": tokens, "make_vocab_size_divisible_by": 16, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "init_method_std": 0.3, "position_embedding_type": kind,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    }  # fmt: skip
    if longest is not None and changes.get("position_embedding_type", kind) in TABLES:
        keys["max_position_embeddings"] = longest
    return build_gpt(GPTKeys.model_validate(keys | changes), vocab_size=VOCAB, dtype=FP64)


def some_tokens(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


CASES: Mapping[str, dict[str, Any]] = {**{kind: {"kind": kind} for kind in KINDS}, **OPTIONS}


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("case", cases(CASES, fast=5))
def test_a_text_that_grows_sees_what_the_whole_text_saw(case: str) -> None:
    model = gpt(longest=LONG, **CASES[case]).eval()
    tokens = some_tokens(LONG)
    with torch.no_grad():
        whole = model(tokens)[..., :VOCAB]
        for length in (1, 2, 3, TOKENS - 1, TOKENS, TOKENS + 1, 41):
            torch.testing.assert_close(model(tokens[:, :length])[:, -1, :VOCAB], whole[:, length - 1])


@pytest.mark.parametrize("case", cases(CASES, fast=5))
def test_four_times_the_training_length(case: str) -> None:
    """A model trained on 16 tokens gives on 64 what one built for 64 does with the same weights."""
    model, long = gpt(longest=LONG, **CASES[case]), gpt(tokens=LONG, **CASES[case])
    model.loss(some_tokens(TOKENS), some_tokens(TOKENS), 1.0).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-3 * parameter.grad
    if case != "learned_parameters":  # of 64 places of the table only 16 were trained; their gradient is 0
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    long.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(some_tokens(LONG)), long.eval()(some_tokens(LONG)))


def test_tables_bound_a_text_and_functions_of_distance_do_not() -> None:
    for kind in KINDS:
        assert gpt(kind).max_positions == (TOKENS if kind in TABLES else None)


@pytest.mark.parametrize("backend", ["auto", "unfused", "reference"])
def test_a_window_hides_what_lies_before_it(backend: str) -> None:
    model = gpt(num_layers=1, window_size=[3, 0], attention_backend=backend).eval()
    tokens = some_tokens(TOKENS)
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCAB
    with torch.no_grad():
        moved = (model(tokens) - model(other))[..., :VOCAB].abs().amax(dim=(0, 2)) > 1e-9
    assert moved.tolist() == [4 <= place <= 7 for place in range(TOKENS)]


# ---------------------------------------------------------------- weights


def test_kerple_begins_at_the_slopes_of_alibi() -> None:
    model = gpt("kerple", init_method_std=0.01)
    positions = model.decoder.score_positions
    assert isinstance(positions, Kerple)
    torch.testing.assert_close(positions.log_a.exp(), torch.ones(4, dtype=FP64))
    torch.testing.assert_close(F.softplus(positions.raw_p), torch.ones(4, dtype=FP64), rtol=1e-6, atol=0)
    slopes = torch.tensor(alibi_slopes(4), dtype=FP64)
    torch.testing.assert_close(F.softplus(positions.raw_b), slopes, rtol=1e-5, atol=0)
    fresh = Kerple(4)
    assert all(torch.equal(fresh.get_parameter(name).double(), value) for name, value in positions.named_parameters())


def test_a_head_begins_whole_and_a_table_random() -> None:
    model = gpt("relative", headscale=True, layernorm_zero_centered_gamma=True, qk_layernorm=True)
    for layer in layers_of(model):
        assert layer.attention.head_scale is not None
        assert layer.attention.head_scale.tolist() == [1.0] * 4
        assert layer.attention.query_norm is not None
        assert not layer.attention.query_norm.weight.any()
    table = model.get_parameter("decoder.score_positions.table")
    assert table.std().item() == pytest.approx(0.3, rel=0.4)


def test_a_causal_stack_has_all_buckets_for_what_came_before() -> None:
    positions = gpt("relative").decoder.score_positions
    assert isinstance(positions, RelativeBias)
    assert positions.places.tolist() == relative_buckets(8, 20, bidirectional=False)


@pytest.mark.parametrize("raw", [-1e4, -80.0, 0.0, 80.0, 1e3])
def test_kerple_cannot_become_nan(raw: float) -> None:
    positions = Kerple(3)
    for parameter in positions.parameters():
        torch.nn.init.constant_(parameter, raw)
    terms = positions(5000, 5000).distance_bias
    assert terms.isfinite().all()
    assert (terms <= 0).all()
    terms.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in positions.parameters())


def test_sandwich_far_away() -> None:
    """Angles of thousands of radians, in fp32."""
    terms = Sandwich(2, 64).eval()(20000, 20000).distance_bias
    assert terms.shape == (2, 2 * 19999 + 1)
    for distance in (1, 777, 19999):
        waves = sum(math.cos(distance * 10000 ** (-2 * k / 64)) for k in range(1, 33)) - 32
        for side in (-distance, distance):
            assert terms[0, 19999 + side].item() == pytest.approx(waves / 4, rel=1e-6)
            assert terms[1, 19999 + side].item() == pytest.approx(waves / 8, rel=1e-6)


# ---------------------------------------------------------------- what a layer computes


def test_loss_is_that_of_capped_logits() -> None:
    tokens, labels = some_tokens(TOKENS), some_tokens(TOKENS + 1)[:, 1:]
    model = gpt(logits_soft_cap=0.7)
    logits = model(tokens)[..., :VOCAB]
    assert 0.5 < logits.abs().max() < 0.7
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model.loss(tokens, labels, labels.numel()), expected)


@pytest.mark.parametrize("table", ["learned_absolute", "learned_parameters"])
def test_embeddings_grow_with_their_positions(table: str) -> None:
    plain, scaled = (gpt(table, apply_embedding_scaling=scaling) for scaling in (False, True))
    with torch.no_grad():
        for name in ("token_embedding.weight", f"position_embedding.{'weight' if 'abs' in table else 'table'}"):
            plain.get_parameter(name).mul_(math.sqrt(24))
        hidden = plain.hidden_states(some_tokens(TOKENS))
        torch.testing.assert_close(scaled.hidden_states(some_tokens(TOKENS)), hidden)


@pytest.mark.parametrize("block", ["pre_ln", "post_ln", "normformer", "parallel_ln"])
def test_order_of_norms(block: str) -> None:
    model = gpt(transformer_block_type=block, num_layers=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # gains and biases of their own, so that no norm stands for another
        parameter.data.normal_(0, 0.5, generator=generator)
    (layer,) = layers_of(model)
    x = torch.randn(2, TOKENS, 24, dtype=FP64, generator=generator)

    def norm(name: str, of: Tensor) -> Tensor:
        gain, bias = (layer.get_parameter(f"{name}.{part}") for part in ("weight", "bias"))
        return F.layer_norm(of, of.shape[-1:], gain, bias, 1e-5)

    def attention(of: Tensor) -> Tensor:
        return layer.attention(of, LayerContext("training"))

    def mlp(of: Tensor) -> Tensor:
        assert isinstance(layer.mlp, MLP)
        inner = F.gelu(layer.mlp.up(of))
        return layer.mlp.down(norm("mlp.inner_norm", inner) if block == "normformer" else inner)

    if block == "post_ln":
        expected = norm("attention_norm", x + attention(x))
        expected = norm("mlp_norm", expected + mlp(expected))
    else:
        update = attention(norm("attention_norm", x))
        expected = x + (norm("attention_output_norm", update) if block == "normformer" else update)
        expected = expected + mlp(norm("mlp_norm", x if block == "parallel_ln" else expected))
    torch.testing.assert_close(layer(x, LayerContext("training"))[0], expected)
    assert (model.decoder.final_norm is None) == (block == "post_ln")
    if model.decoder.final_norm is not None:
        expected = model.decoder.final_norm(expected)
    torch.testing.assert_close(model.decoder(x, "training"), expected)


def test_a_scaled_head_is_a_scaled_column_of_the_output_projection() -> None:
    model = gpt("rope", headscale=True)
    tokens, factors = some_tokens(TOKENS), torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=FP64)
    with torch.no_grad():
        for layer in layers_of(model):
            layer.get_parameter("attention.head_scale").copy_(factors)
        expected = model(tokens)
        for layer in layers_of(model):
            layer.get_parameter("attention.head_scale").fill_(1.0)
            layer.attention.output.weight.mul_(factors.repeat_interleave(6))
        torch.testing.assert_close(model(tokens), expected)


def test_position_places_are_those_of_the_sample() -> None:
    """`learned_parameters` does not restart with a document, `learned_absolute` does."""
    documents = torch.tensor([[0] * 6 + [1] * 10] * 2).int()
    model = gpt("learned_parameters")
    model.batch_spec = replace(model.batch_spec, reset_position_ids=True)
    torch.testing.assert_close(model(some_tokens(TOKENS), documents), gpt("learned_parameters")(some_tokens(TOKENS)))


# ---------------------------------------------------------------- compilation and dispatch


@pytest.mark.parametrize("kind", ["alibi", "kerple", "sandwich", "relative"])
def test_terms_are_made_once_for_all_layers(kind: str) -> None:
    model, seen = gpt(kind, num_layers=3), []
    for layer in layers_of(model):
        layer.attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].terms))
    model.loss(some_tokens(TOKENS), some_tokens(TOKENS), 1.0)
    assert len(seen) == 3
    assert seen[0] is not None
    assert all(terms is seen[0] for terms in seen)


@full_only
def test_compiled_layers_share_the_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    for kind in ("kerple", "alibi", "xpos"):
        options = {"transformer_block_type": "post_ln", "headscale": True, "qk_layernorm": True, "window_size": [5, 0]}
        model, eager = (gpt(kind, compile=compiled, **options) for compiled in (True, False))
        losses = [one.loss(some_tokens(TOKENS), some_tokens(TOKENS), 1.0) for one in (model, eager)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
        assert len(graphs) == 1  # of both layers
        graphs.clear()
    torch.compiler.reset()


H100 = InstalledSoftware(torch=(2, 11), cudnn=91900, triton=(3, 6))


def decisions(length: int, **changes: Any) -> Any:
    keys = GPTKeys.model_validate({"encoder_seq_length": length, "attention_dropout": 0.0, **changes})
    attention = gpt_slice(keys, vocab_size=VOCAB).stack.attention
    context: CallContext = {
        "device": "cuda", "capability": (9, 0), "dtype": "bf16", "batch": 1, "deterministic": False,
    }  # fmt: skip
    both = (length, length)
    calls = attention_calls(attention, context, samples=both, longest=both, packed=False)
    return choose_backends(attention, calls, AttentionFlags(), H100)


@pytest.mark.parametrize(
    ("kind", "length", "bias", "reach", "kernels"),
    [
        ("relative", 8192, "distance_with_gradient", 113, "Hopper"),
        ("kerple", 513, "distance_with_gradient", 512, "Hopper"),
        ("kerple", 514, "distance_with_gradient", 513, "portable"),
        ("sandwich", 8192, "distance", 8191, "portable"),
        ("alibi", 8192, "slopes", 0, "Hopper"),
    ],
)
def test_the_dispatcher_knows_what_positions_need(kind: str, length: int, bias: str, reach: int, kernels: str) -> None:
    decided = decisions(length, position_embedding_type=kind)
    assert (decided["training"].call.bias, decided["training"].call.reach) == (bias, reach)
    assert decided["evaluation"].call.bias == bias.removesuffix("_with_gradient")
    assert decided["training"].backend == decided["evaluation"].backend == "triton"
    assert decided["training"].notes == (f"triton runs its {kernels} kernels here.",)
    words = f"(reach {reach})" if reach else ", ALiBi slopes"
    assert words in str(decided["training"].call)


def test_the_dispatcher_knows_window_and_softcap() -> None:
    call = decisions(1024, window_size=[100, 0], position_embedding_type="rope")["training"].call
    assert (call.window, call.bias, call.reach) == ((100, 0), "none", 0)
    capped = decisions(1024, attn_logit_softcapping=30.0, position_embedding_type="rope")
    assert capped["training"].call.softcap == 30.0
    assert capped["training"].backend == "triton"
    rows = {row.backend: row.reason for row in capped["training"].rows}
    assert "softcap" in rows["sdpa_cudnn"]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_trains_as_a_cpu_in_fp64(kind: str) -> None:
    """Compiled, in bf16, with our kernels: loss and gradients of the same weights."""
    changes = {"num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 64, "init_method_std": 0.05}
    keys = {"hidden_size": 96, "ffn_hidden_size": 128, "qk_layernorm": True, "window_size": [100, 0], **changes}
    wide = gpt(kind, tokens=300, attention_backend="reference", **keys)
    narrow = build_gpt(GPTKeys.model_validate(
            {"num_layers": 2, "encoder_seq_length": 300, "make_vocab_size_divisible_by": 16, "hidden_dropout": 0.0,
             "attention_dropout": 0.0, "position_embedding_type": kind, "relative_attention_num_buckets": 8,
             "relative_attention_max_distance": 20, "attention_backend": "triton", "compile": True, **keys}
        ), vocab_size=VOCAB, device="cuda", dtype=torch.bfloat16)  # fmt: skip
    wide.load_state_dict({name: value.double().cpu() for name, value in narrow.state_dict().items()})
    tokens, labels = some_tokens(300), some_tokens(301)[:, 1:]
    expected, loss = wide.loss(tokens, labels, 600), narrow.loss(tokens.cuda(), labels.cuda(), 600)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    expected.backward()
    loss.backward()
    theirs = dict(wide.named_parameters())
    for name, parameter in narrow.named_parameters():
        gradient = theirs[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        if gradient.norm() > 1e-6:  # that of the bias of keys is rounding
            assert (parameter.grad.double().cpu() - gradient).norm() <= 0.1 * gradient.norm(), name
