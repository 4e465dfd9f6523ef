"""T5 and BERT: packed and padded rows give what each text gives alone, and every part around the stacks does its part.

Parity with transformers is in test_models_parity_encoders.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import attend
from gpt_builder import build_model, gradients_of
from tiers import cases, extra, full_only, looped
from torch import Tensor

from stoker.kernels.attention.backends.sdpa import sdpa_math
from stoker.kernels.attention.backends.triton import triton_attention
from stoker.kernels.attention.backends.unfused import UnfusedAttention
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.attention.installed_software import detect_installed_software
from stoker.kernels.attention.packed_sequences import PackedSequences, unpadded_cu_seqlens, unpadded_key_cu_seqlens
from stoker.kernels.attention.reference import reference_backend
from stoker.kernels.launch import INTERPRETED
from stoker.kernels.relative_position_buckets import relative_buckets
from stoker.models.bert import BERT
from stoker.models.build import call_context, num_parameters, plan_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.families import family_slice
from stoker.models.config.t5 import T5Keys
from stoker.models.layer import Layer
from stoker.models.layers import dropout
from stoker.models.layers.context import LayerContext, Memory
from stoker.models.model_cost import count_parameters
from stoker.models.t5 import T5

VOCAB, READ, WRITTEN = 31, 13, 9
STACK: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 40, "num_attention_heads": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "position_embedding_type": "relative", "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6, "init_method_std": 0.3, "attention_backend": "unfused",
}  # fmt: skip


def t5(form: BatchSpec | None = None, *, encoder: Any = None, decoder: Any = None, **keys: Any) -> T5:
    both = {"encoder": STACK | (encoder or {}), "decoder": STACK | (decoder or {})}
    made = build_model(
        T5Keys.model_validate(both | {"seq_length": READ, "make_vocab_size_divisible_by": 8} | keys),
        vocab_size=VOCAB,
        dtype=torch.float64,
        batch_spec=form or BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN),
    )
    assert isinstance(made, T5)
    return made


def bert(form: BatchSpec, **keys: Any) -> BERT:
    made = build_model(
        BertKeys.model_validate(STACK | {"encoder_seq_length": READ} | keys),
        vocab_size=VOCAB,
        dtype=torch.float64,
        batch_spec=form,
    )
    assert isinstance(made, BERT)
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-11, msg=name)


# ---------------------------------------------------------------- packed and padded rows

READ_DOCUMENTS = torch.tensor([[0] * 4 + [1] * 3 + [2] * 6, [0] * 7 + [1] * 2 + [2] * 4], dtype=torch.int32)
WRITTEN_DOCUMENTS = torch.tensor([[0] * 2 + [1] * 5 + [2] * 2, [0] * 3 + [1] * 6], dtype=torch.int32)
"""Three pairs in the first row, the last of which is padding; two in the second, whose third has nothing to write."""


@pytest.mark.parametrize("backend", ["unfused", "sdpa_math", "reference"])
@pytest.mark.parametrize("kind", cases(["relative", "learned_absolute", "rope"], fast=1))
def test_packed_pairs_are_what_each_is_alone(kind: str, backend: str) -> None:
    changes = {"position_embedding_type": kind, "attention_backend": backend}
    form = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, packed=True, reset_position_ids=True)
    model = t5(form, encoder=changes, decoder=changes)
    read, written, labels = drawn(2, READ), drawn(2, WRITTEN, seed=1), drawn(2, WRITTEN, seed=2)
    documents = {"encoder_documents": READ_DOCUMENTS, "decoder_documents": WRITTEN_DOCUMENTS}
    labels[0, 7:] = -100
    model.loss(read, written, labels, 3.0, **documents).backward()
    packed = gradients_of(model)
    logits = model(read, written, **documents)

    alone = t5(encoder=changes, decoder=changes).eval()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for number in range(2):
            mine = written[row, WRITTEN_DOCUMENTS[row] == number][None]
            answer = alone(read[row, READ_DOCUMENTS[row] == number][None], mine)
            there = logits[row, WRITTEN_DOCUMENTS[row] == number]
            torch.testing.assert_close(there[:, :VOCAB], answer[0, :, :VOCAB], rtol=1e-9, atol=1e-10)
            wanted = labels[row, WRITTEN_DOCUMENTS[row] == number]
            total = total + F.cross_entropy(answer[0, :, :VOCAB], wanted, reduction="sum", ignore_index=-100)
    (total / 3).backward()
    assert_same_gradients(packed, gradients_of(alone))


@pytest.mark.parametrize("backend", ["unfused", "sdpa_math", "reference"])
def test_padded_rows_are_what_each_is_without_padding(backend: str) -> None:
    changes = {"attention_backend": backend}
    form = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, padded=True)
    model = t5(form, encoder=changes, decoder=changes)
    read, written, labels = drawn(2, READ), drawn(2, WRITTEN, seed=1), drawn(2, WRITTEN, seed=2)
    real = torch.ones(2, READ, dtype=torch.bool)
    real[1, 5:] = False
    model.loss(read, written, labels, 2.0, encoder_padding=real).backward()
    alone = t5(encoder=changes, decoder=changes).eval()
    losses = [
        alone.loss(read[row : row + 1, : real[row].sum()], written[row : row + 1], labels[row : row + 1], 2.0)
        for row in range(2)
    ]
    sum(losses, start=torch.zeros(())).backward()
    assert_same_gradients(gradients_of(model), gradients_of(alone))


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU Triton needs its interpreter")
@pytest.mark.parametrize("rows", ["padded", *extra("whole", "packed")])
def test_flash_gives_what_unfused_gives(rows: str) -> None:
    """Logits and all gradients, the tables of both stacks among them; nothing is written out over queries and keys."""
    form = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, padded=rows == "padded", packed=rows == "packed")
    real = torch.ones(2, READ, dtype=torch.bool)
    real[1, 5:] = False
    documents = {"encoder_documents": READ_DOCUMENTS, "decoder_documents": WRITTEN_DOCUMENTS}
    given: dict[str, Any] = {"padded": {"encoder_padding": real}, "packed": documents}.get(rows, {})
    read, written, labels = drawn(2, READ), drawn(2, WRITTEN, seed=1), drawn(2, WRITTEN, seed=2)
    found = []
    for backend in ("triton", "unfused"):
        changes = {"attention_backend": backend, "num_layers": 1}
        model = t5(form, encoder=changes, decoder=changes).float()
        logits = model(read, written, **given)[..., :VOCAB]
        model.loss(read, written, labels, 3.0, **given).backward()
        found.append({"logits": logits, **gradients_of(model)})
    for name, mine in found[0].items():
        torch.testing.assert_close(mine, found[1][name], rtol=2e-4, atol=2e-5, msg=name)


def test_packed_documents_of_bert_are_what_each_is_alone() -> None:
    form = BatchSpec(seq_length=READ, packed=True, reset_position_ids=True)
    model = bert(form, position_embedding_type="learned_absolute").eval()
    alone = bert(BatchSpec(seq_length=READ), position_embedding_type="learned_absolute").eval()
    tokens = drawn(2, READ)
    logits = model(tokens, documents=READ_DOCUMENTS)
    for row in range(2):
        for number in range(3):
            here = READ_DOCUMENTS[row] == number
            torch.testing.assert_close(logits[row, here], alone(tokens[row, here][None])[0], rtol=1e-9, atol=1e-10)


def test_positions_of_bert_restart_where_that_was_asked_for() -> None:
    learned = {"position_embedding_type": "learned_absolute"}
    tokens = drawn(1, READ)
    apart, restarted, both = (
        bert(BatchSpec(seq_length=READ, packed=packed, reset_position_ids=restart), **learned).eval()
        for packed, restart in ((True, False), (False, True), (True, True))
    )
    numbers = READ_DOCUMENTS[:1]
    first, second, third = (model(tokens, documents=numbers) for model in (apart, restarted, both))
    torch.testing.assert_close(first[:, :4], third[:, :4], msg="positions of the first document are the same")
    assert (first[:, 4:7] - third[:, 4:7])[..., :VOCAB].abs().max() > 0.01
    assert (second[:, :4] - third[:, :4])[..., :VOCAB].abs().max() > 0.01, "documents see each other"


# ---------------------------------------------------------------- documents across two texts


def _inputs(queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, queries, 2, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    return [torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", ["unfused", "sdpa_math", "triton"])
def test_every_backend_keeps_documents_of_two_texts_apart(backend: str) -> None:
    """Documents without keys give 0 and no gradient, those without queries nothing."""
    if backend == "triton" and not INTERPRETED:
        pytest.skip("on a CPU Triton needs its interpreter")
    of_queries = torch.tensor([[0, 0, 1, 3, 3], [1, 1, 1, 2, 2]], dtype=torch.int32)
    of_keys = torch.tensor([[0, 0, 0, 2, 3, 3, 3], [0, 1, 2, 2, 2, 2, 2]], dtype=torch.int32)
    functions: dict[str, Any] = {"unfused": UnfusedAttention(), "sdpa_math": sdpa_math, "triton": triton_attention}
    outcomes: list[list[Any]] = []
    for function in (functions[backend], reference_backend):
        tensors = _inputs(5, 7)
        packed = PackedSequences.from_query_and_key_documents(of_queries, of_keys, dtype=torch.float32)
        context = attend(function, *tensors, softmax_scale=0.3, causal=False, packed=packed)
        (context * torch.linspace(0, 1, context.numel()).view_as(context)).sum().backward()
        outcomes.append([context, *(tensor.grad for tensor in tensors)])
    assert outcomes[0][0][0, 2].abs().max() == 0
    for mine, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_the_ends_of_documents_of_two_texts_belong_together() -> None:
    of_queries = torch.tensor([[0, 0, 1, 3, 3], [1, 1, 1, 2, 2]], dtype=torch.int32)
    of_keys = torch.tensor([[0, 0, 0, 2, 3, 3, 3], [0, 1, 2, 2, 2, 2, 2]], dtype=torch.int32)
    packed = PackedSequences.from_query_and_key_documents(of_queries, of_keys, dtype=torch.float32, with_mask=False)
    # row 0: documents 0, 1, 2, 3; row 1: documents 0, 1, 2
    assert unpadded_cu_seqlens(packed).tolist() == [0, 2, 3, 3, 5, 5, 8, 10]
    assert unpadded_key_cu_seqlens(packed).tolist() == [0, 3, 3, 4, 7, 8, 9, 14]
    assert packed.cu_seqlens().shape == packed.key_cu_seqlens().shape == (10 + 14 + 1,)
    own = PackedSequences.from_documents(of_queries, dtype=torch.float32, causal=True)
    assert unpadded_cu_seqlens(own).tolist() == unpadded_key_cu_seqlens(own).tolist() == [0, 2, 3, 5, 8, 10]


# ---------------------------------------------------------------- around the stacks


def test_cross_attention_may_have_relative_positions_of_its_own() -> None:
    """A table indexed by the difference of places, counted from the beginning of both texts."""
    only = {"relative_position_bias_self_attention_only": False}
    model = t5(decoder=only | {"num_layers": 1}).eval()
    assert model.cross_positions is not None
    seen: list[Any] = []
    layer = model.decoder.layers[0]
    assert isinstance(layer, Layer)
    cross = layer.cross_attention
    assert cross is not None
    function = cross.backends["evaluation"]
    cross.backends["evaluation"] = lambda inputs: seen.append(inputs) or function(inputs)
    model(drawn(2, READ), drawn(2, WRITTEN))
    bias = seen[0].distance_bias
    reach = bias.shape[1] // 2
    buckets = relative_buckets(8, 6, bidirectional=True)
    for query in range(WRITTEN):
        for key in range(READ):
            engine = max(-reach, min(reach, key - (query + READ - WRITTEN)))
            bucket = buckets[max(-4, min(4, key - query)) + 4]  # all distances from 4 on share one
            assert torch.equal(bias[:, engine + reach], model.cross_positions.table[bucket])
    assert plan_of(model_keys(decoder=only)).decisions["cross training"].call.reach == 4 + READ - WRITTEN


def model_keys(**changes: Any) -> T5Keys:
    stacks = {name: STACK | changes.pop(name, {}) for name in ("encoder", "decoder")}
    return T5Keys.model_validate(stacks | {"seq_length": READ} | changes)


def plan_of(keys: T5Keys, **form: Any) -> Any:
    shape = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, **form)
    return plan_model(
        family_slice(keys, vocab_size=VOCAB, batch_spec=shape),
        shape,
        call_context(torch.device("cpu"), torch.float32, 2, AttentionFlags()),
        flags=AttentionFlags(),
        software=detect_installed_software("cpu"),
    )


def test_cross_attention_is_what_its_keys_say() -> None:
    """Normed heads, fewer groups, capped scores, a factor per head; the window is for the decoder's own text alone."""
    keys = {"qk_layernorm": True, "headscale": True, "attn_logit_softcapping": 0.5, "window_size": [1, 0]}
    model = t5(decoder=keys | {"num_attention_heads": 4, "kv_channels": 6, "num_query_groups": 2}).eval()
    layer = model.decoder.layers[0]
    assert isinstance(layer, Layer)
    cross = layer.cross_attention
    assert cross is not None
    assert cross.head_scale is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in cross.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    hidden, memory = (torch.randn(2, n, 32, generator=generator, dtype=torch.float64) for n in (WRITTEN, READ))

    weights = dict(cross.named_parameters())

    def normed(heads: Tensor, name: str) -> Tensor:
        return F.layer_norm(heads, (6,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    query = F.linear(hidden, weights["query.weight"], weights["query.bias"]).view(2, WRITTEN, 4, 6)
    both = F.linear(memory, weights["kv.weight"], weights["kv.bias"]).view(2, READ, 4, 6)
    key, value = both[:, :, :2].repeat_interleave(2, dim=2), both[:, :, 2:].repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", normed(query, "query_norm"), normed(key, "key_norm")) * 6**-0.5
    context = torch.einsum("bhqk,bkhd->bqhd", (0.5 * torch.tanh(scores / 0.5)).softmax(-1), value)
    context = (context * weights["head_scale"][:, None]).flatten(2)
    expected = F.linear(context, weights["output.weight"], weights["output.bias"])
    torch.testing.assert_close(cross(hidden, LayerContext("evaluation", memory=Memory(memory))), expected)
    calls = plan_of(model_keys(decoder=keys)).decisions
    assert calls["decoder training"].call.window == (1, 0)
    assert calls["cross training"].call.window is None
    assert calls["cross training"].call.softcap == 0.5


def test_every_attention_is_planned_for_what_it_sees() -> None:
    keys = model_keys(encoder={"window_size": [2, 3]})
    plain = {label: decision.call for label, decision in plan_of(keys).decisions.items()}
    assert list(plain) == [
        f"{a} {k}" for a in ("encoder", "decoder", "cross") for k in ("training", "evaluation", "generation")
    ]
    encoder, decoder, cross = (plain[f"{name} training"] for name in ("encoder", "decoder", "cross"))
    assert (encoder.causal, encoder.queries, encoder.bias, encoder.window) == (
        False,
        READ,
        "distance_with_gradient",
        (2, 3),
    )
    assert (decoder.causal, decoder.queries, decoder.window) == (True, WRITTEN, None)
    assert (cross.causal, cross.queries, cross.keys, cross.bias) == (False, WRITTEN, READ, "none")
    assert not any((encoder.padding, cross.padding, encoder.packed))
    assert plain["encoder generation"].padding
    assert plain["cross generation"].any_length
    padded = {label: decision.call for label, decision in plan_of(keys, padded=True).decisions.items()}
    assert [padded[f"{name} training"].padding for name in ("encoder", "decoder", "cross")] == [True, False, True]
    packed = {label: decision.call for label, decision in plan_of(keys, packed=True).decisions.items()}
    assert [packed[f"{name} evaluation"].packed for name in ("encoder", "decoder", "cross")] == [True, True, True]
    assert not packed["cross generation"].packed


def test_the_heads_tables_and_biases_that_were_asked_for() -> None:
    names = {name for name, _ in t5(tokens_head_bias=True).named_parameters()}
    assert "head_bias" in names
    assert not names & {"head.weight", "decoder_token_embedding.weight"}
    apart = t5(share_token_embeddings=False, share_decoder_tokens_head_embeddings=False, tokens_head_bias=False)
    assert {"head.weight", "decoder_token_embedding.weight"} <= {name for name, _ in apart.named_parameters()}
    assert apart.output_weight is apart.get_parameter("head.weight")
    tied = t5(share_token_embeddings=False)
    assert tied.output_weight is tied.get_parameter("decoder_token_embedding.weight")
    with torch.no_grad():
        plain, scaled = (t5(scale_tied_logits=on).eval()(drawn(1, READ), drawn(1, WRITTEN)) for on in (False, True))
    torch.testing.assert_close(scaled[..., :VOCAB], plain[..., :VOCAB] * 32**-0.5)
    biased = t5().eval()
    with torch.no_grad():
        before = biased(drawn(1, READ), drawn(1, WRITTEN))
        biased.get_parameter("head_bias").fill_(0.5)
        assert torch.allclose(biased(drawn(1, READ), drawn(1, WRITTEN))[..., :VOCAB], before[..., :VOCAB] + 0.5)


def test_labels_are_smoothed_in_training_only() -> None:
    read, written, labels = drawn(2, READ), drawn(2, WRITTEN, seed=1), drawn(2, WRITTEN, seed=2)
    model = t5(label_smoothing=0.2)
    log = model(read, written)[..., :VOCAB].log_softmax(-1).flatten(0, 1)
    of_labels = log.gather(1, labels.flatten()[:, None])[:, 0]
    others = (log.sum(-1) - of_labels) / (VOCAB - 1)
    torch.testing.assert_close(model.loss(read, written, labels, 1.0), -(0.8 * of_labels + 0.2 * others).sum())
    torch.testing.assert_close(model.eval().loss(read, written, labels, 1.0), -of_labels.sum())


def test_dropout_of_embeddings_is_that_of_each_stack_or_of_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    run = dropout.dropout
    monkeypatch.setattr(dropout, "dropout", lambda values, rate, *more: rates.append(rate) or run(values, rate, *more))
    rate_of = {"encoder": 0.1, "decoder": 0.2}
    stacks: dict[str, Any] = {name: {"hidden_dropout": rate, "num_layers": 1} for name, rate in rate_of.items()}
    t5(**stacks)(drawn(2, READ), drawn(2, WRITTEN))
    assert rates == [0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2]
    rates.clear()
    t5(**stacks, embedding_dropout=0.3)(drawn(2, READ), drawn(2, WRITTEN))
    assert rates == [0.3, 0.1, 0.1, 0.3, 0.2, 0.2, 0.2]


def test_each_stack_starts_by_its_own_keys() -> None:
    wide = {"hidden_size": 64, "num_layers": 8}
    model = t5(
        encoder=wide | {"init_method_std": 0.5, "use_scaled_init_method": False},
        decoder=wide | {"init_method_std": 0.1},
        embedding_init_method_std=2.0,
        share_decoder_tokens_head_embeddings=False,
    )
    deviations = {name: value.std().item() for name, value in model.named_parameters() if value.ndim == 2}
    assert deviations["token_embedding.weight"] == pytest.approx(2.0, rel=0.05)
    assert deviations["encoder.layers.0.attention.output.weight"] == pytest.approx(0.5, rel=0.05)
    assert deviations["decoder.layers.0.cross_attention.kv.weight"] == pytest.approx(0.1, rel=0.05)
    for part in ("attention", "cross_attention"):
        assert deviations[f"decoder.layers.0.{part}.output.weight"] == pytest.approx(0.1 / 4, rel=0.05)
    assert deviations["head.weight"] == pytest.approx(0.1, rel=0.05)
    assert model.get_parameter("head_bias").abs().max() == 0


@looped(
    "changes",
    [
        {},
        {"decoder": {"relative_position_bias_self_attention_only": False, "num_attention_heads": 4, "kv_channels": 24}},
        {"decoder": {"transformer_block_type": "normformer", "headscale": True, "qk_layernorm": True}},
        {"decoder": {"num_query_groups": 1, "bias": False, "qkv_bias": True}},
        {"encoder": {"transformer_block_type": "post_ln", "activation": "geglu"}, "tokens_head_bias": False},
        {"encoder": {"position_embedding_type": "learned_absolute"}, "share_token_embeddings": False},
        {"decoder": {"position_embedding_type": "learned_parameters"}, "share_decoder_tokens_head_embeddings": False},
    ],
)  # fmt: skip
def test_parameters_of_a_t5_are_counted_without_building_it(changes: dict[str, Any]) -> None:
    keys = model_keys(**changes)
    form = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN)
    assert count_parameters(keys, VOCAB, form) == num_parameters(meta(keys, form))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transformer_block_type": "post_ln", "position_embedding_type": "learned_absolute"},
        {"bert": {"token_types": 0, "embedding_norm": False}},
        {"bert": {"mlm_transform": False, "head_bias": False}, "share_embeddings_and_output_weights": False},
    ],
)
def test_parameters_of_a_bert_are_counted_without_building_it(changes: dict[str, Any]) -> None:
    keys = BertKeys.model_validate(STACK | {"encoder_seq_length": READ} | changes)
    form = BatchSpec(seq_length=READ)
    assert count_parameters(keys, VOCAB, form) == num_parameters(meta(keys, form))


def meta(keys: T5Keys | BertKeys, form: BatchSpec) -> Any:
    return build_model(keys, vocab_size=VOCAB, device="meta", micro_batch_size=1, batch_spec=form)


# ---------------------------------------------------------------- calls


def test_a_single_token_is_read_and_written_too() -> None:
    model = t5().eval()
    read, written = drawn(2, 1), drawn(2, 4, seed=1)
    whole = model(read, written)
    for length in (1, 2, 3):
        torch.testing.assert_close(model(read, written[:, :length]), whole[:, :length])
    other = bert(BatchSpec(seq_length=READ)).eval()
    one = other(read)
    hidden = torch.tensor([[True, False]]).expand(2, 2)
    torch.testing.assert_close(other(F.pad(read, (0, 1), value=5), padding=hidden)[:, :1], one)


@full_only
def test_compiled_layers_of_a_stack_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory, documents and the bias of cross-attention; what is generated after that compiles nothing."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    read, written, labels = drawn(2, READ), drawn(2, WRITTEN, seed=1), drawn(2, WRITTEN, seed=2)
    packed = {"encoder_documents": READ_DOCUMENTS, "decoder_documents": WRITTEN_DOCUMENTS}
    for changes, given in (
        ({"position_embedding_type": "rope"}, packed),
        ({"relative_position_bias_self_attention_only": False}, {}),
    ):
        torch.compiler.reset()
        form = BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, packed=bool(given))
        models = [t5(form, decoder=changes, compile=compiled) for compiled in (True, False)]
        losses = [model.loss(read, written, labels, 3.0, **given) for model in models]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        assert_same_gradients(*map(gradients_of, models))
        assert len(graphs) == 4  # a layer and the final norm of each stack
        texts = [model.eval().decode(written[:, :3], model.encode(read[:, :5])) for model in models]
        torch.testing.assert_close(*texts)
        assert len(graphs) == 4
        graphs.clear()
    torch.compiler.reset()


def test_what_a_model_was_not_built_for_is_refused() -> None:
    model, packed = t5(), t5(BatchSpec(seq_length=READ, decoder_seq_length=WRITTEN, packed=True))
    read, written, real = drawn(2, READ), drawn(2, WRITTEN), torch.ones(2, READ, dtype=torch.bool)
    documents = {"encoder_documents": READ_DOCUMENTS, "decoder_documents": WRITTEN_DOCUMENTS}
    short = documents | {"encoder_documents": READ_DOCUMENTS[:, :5]}
    for call, says in (
        (lambda: model(read[:, :5], written), "shape that the model was built for"),
        (lambda: model(read, written, encoder_padding=real), "shape that the model was built for"),
        (lambda: model(read, written, **documents), "not built for packed"),
        (lambda: packed(read, written), "shape that the model was built for"),
        (lambda: packed(read, written, encoder_documents=READ_DOCUMENTS), "given together"),
        (lambda: packed(read, written, encoder_padding=real, **documents), "a document of its own"),
        (lambda: packed.eval()(read[:, :5], written, **short), "shape that the model was built for"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            call()
    learned = t5(encoder={"position_embedding_type": "learned_absolute"}).eval()
    with pytest.raises(ValueError, match="max_position_embeddings"):
        learned(drawn(1, READ + 1), written[:1])
    with pytest.raises(ValueError, match="shape that the model was built for"):
        bert(BatchSpec(seq_length=READ))(read[:, :5])
