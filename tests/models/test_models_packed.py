"""Rows of several documents: each is computed as if it stood alone, in every backend, compiled and recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import attend
from gpt_builder import build_gpt, gradients_of
from hypothesis import given
from hypothesis import strategies as st
from tiers import cases, examples, extra, full_only, looped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stoker.kernels.attention.backends.registry import ATTENTION_FUNCTIONS
from stoker.kernels.attention.dispatch import NoBackendError
from stoker.kernels.attention.packed_sequences import PackedSequences, document_position_ids
from stoker.kernels.launch import INTERPRETED
from stoker.kernels.rope import apply_rotary, rotary_table
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.layer import Layer
from stoker.trainer.data.datasets.document_ids import document_ids

VOCAB, TOKENS, EOD = 50, 12, 1
ROWS = [
    [5, 6, 7, EOD, 8, 9, EOD, 10, 11, 12, 13, 14],  # the last goes on in the next row
    [EOD, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, EOD],  # an end at the first and at the last position
    [5, 6, EOD, EOD, EOD, 7, 8, 9, 10, 11, EOD, 12],  # several ends in a row
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],  # no end
]
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "encoder_seq_length": TOKENS,
    "make_vocab_size_divisible_by": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
}
BACKENDS = ["sdpa_flash", "sdpa_math", "unfused", "reference"]


def gpt(
    *,
    positions: bool = True,
    mask: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **changes: Any,
) -> GPT:
    return build_gpt(
        GPTKeys.model_validate(SMALL | changes),
        vocab_size=VOCAB,
        device=device,
        dtype=dtype,
        micro_batch_size=len(ROWS),
        reset_position_ids=positions,
        reset_attention_mask=mask,
    )


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels with some that do not count, and documents."""
    tokens = torch.tensor(ROWS)
    labels = tokens.roll(-1, dims=1)
    labels[0, 2] = labels[2, 8] = -100
    return tokens, labels, document_ids(tokens, EOD)


def spans(documents: Tensor) -> list[tuple[int, int, int]]:
    """Row, begin and end of each document, found one token at a time."""
    found: list[tuple[int, int, int]] = []
    for row, numbers in enumerate(documents.tolist()):
        begin = 0
        for place in range(1, len(numbers) + 1):
            if place == len(numbers) or numbers[place] != numbers[begin]:
                found.append((row, begin, place))
                begin = place
    return found


def alone(model: GPT, tokens: Tensor, row: int, begin: int, end: int, *, restart: bool) -> Tensor:
    """Hidden states of one document in a model that knows of no documents, at positions from 0 or from `begin` on."""
    hidden = model.token_embedding(tokens[row : row + 1, begin:end])
    places = torch.arange(end - begin) + (0 if restart else begin)
    if isinstance(model.position_embedding, nn.Embedding):
        hidden = hidden + model.position_embedding.weight[places]
    return model.decoder(hidden, "training", positions=places[None])


# ---------------------------------------------------------------- a row is its documents


@pytest.mark.parametrize(
    ("backend", "restart"),
    [
        *((backend, True) for backend in cases(BACKENDS, fast=2)),
        (BACKENDS[0], False),
        *extra(*((backend, False) for backend in BACKENDS[1:])),
    ],
)
@pytest.mark.parametrize("kind", cases(["learned_absolute", "rope", "xpos", "alibi", "sandwich", "none"], fast=2))
def test_a_row_equals_its_documents_alone(backend: str, kind: str, restart: bool) -> None:
    """Hidden states, loss and all gradients; the two keys act each on its own."""
    options: dict[str, Any] = {"position_embedding_type": kind, "attention_backend": backend}
    model, plain = gpt(positions=restart, **options), gpt(positions=False, mask=False, **options)
    tokens, labels, documents = batch()
    found = spans(documents)
    assert len(found) == 3 + 2 + 5 + 1
    hidden, total = model.hidden_states(tokens, documents), torch.zeros((), dtype=torch.float64)
    for row, begin, end in found:
        expected = alone(plain, tokens, row, begin, end, restart=restart)
        assert (hidden[row, begin:end] - expected[0]).abs().max() <= 1e-12
        logits = F.linear(expected[0], plain.output_weight)[:, :VOCAB]
        total = total + F.cross_entropy(logits, labels[row, begin:end], reduction="sum", ignore_index=-100)
    loss = model.loss(tokens, labels, 7.0, documents)
    assert (loss - total / 7).abs() <= 1e-12 * loss
    loss.backward()
    (total / 7).backward()
    expected_gradients = gradients_of(plain)
    assert gradients_of(model).keys() == expected_gradients.keys()
    for name, gradient in gradients_of(model).items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-12, name
    logits = model(tokens, documents)
    assert torch.equal(logits[..., :VOCAB], F.linear(hidden, model.output_weight)[..., :VOCAB])


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "xpos"])
def test_positions_alone_leave_the_view_whole(kind: str) -> None:
    """Without the mask a token still sees all before it, at the positions these have in their own documents."""
    model, plain = gpt(mask=False, position_embedding_type=kind), gpt(position_embedding_type=kind)
    tokens, _, documents = batch()
    hidden = model.hidden_states(tokens, documents)
    places = torch.tensor([[place - begin for place in range(begin, end)] for _, begin, end in spans(documents)[:1]])
    assert torch.equal(document_position_ids(documents)[0, :4], places[0])
    for row in range(len(ROWS)):
        counted = torch.cat([torch.arange(end - begin) for at, begin, end in spans(documents) if at == row])
        embedded = plain.token_embedding(tokens[row : row + 1])
        if isinstance(plain.position_embedding, nn.Embedding):
            embedded = embedded + plain.position_embedding.weight[counted]
        expected = plain.decoder(embedded, "training", positions=counted[None])
        assert (hidden[row] - expected[0]).abs().max() <= 1e-12
    assert not torch.allclose(hidden[0], plain.hidden_states(tokens, documents)[0])


def test_what_the_keys_change() -> None:
    """Each of the four combinations is another model, except where a row is one document."""
    tokens, _, documents = batch()
    keys = ((True, True), (True, False), (False, True))
    seen = [gpt(positions=restart, mask=mask).hidden_states(tokens, documents) for restart, mask in keys]
    seen.append(gpt(positions=False, mask=False).hidden_states(tokens))
    for first in range(4):
        for second in range(first):
            assert not torch.allclose(seen[first][:3], seen[second][:3])
            assert torch.allclose(seen[first][3], seen[second][3], atol=1e-12)
    # rope knows distances only: within a document they are the same, wherever counting begins
    rope = [gpt(positions=p, position_embedding_type="rope").hidden_states(tokens, documents) for p in (True, False)]
    assert (rope[0] - rope[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("dropout", ["hidden_dropout", "attention_dropout"])
def test_dropout_masks_come_from_the_seed(dropout: str) -> None:
    options: dict[str, Any] = {dropout: 0.3}
    model = gpt(**options)
    tokens, _, documents = batch()
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(model.hidden_states(tokens, documents))
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])


def test_bf16_and_autocast_are_as_good_as_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is in the dtype of the queries, so that no layer casts it."""
    dtypes: list[torch.dtype] = []
    real = PackedSequences.from_documents
    monkeypatch.setattr(
        PackedSequences, "from_documents", lambda numbers, **how: dtypes.append(how["dtype"]) or real(numbers, **how)
    )
    tokens, _, documents = batch()
    truth = gpt().hidden_states(tokens, documents)
    narrow = gpt(dtype=torch.bfloat16).hidden_states(tokens, documents)
    assert narrow.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gpt(dtype=torch.float32).hidden_states(tokens, documents)
    for ours in (narrow, mixed):
        assert 1e-4 < (ours - truth).abs().mean() < 0.05
    assert dtypes == [torch.float64, torch.bfloat16, torch.bfloat16]


# ---------------------------------------------------------------- what the layers are given


@examples(40)
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_mask_positions_and_lengths_follow_the_documents(rows: list[list[int]]) -> None:
    """Megatron's loop over the end tokens gives the same mask and positions; the lengths cut at the same places."""
    tokens = torch.tensor(rows)
    documents = document_ids(tokens, EOD)
    packed = PackedSequences.from_documents(documents, dtype=torch.float32, causal=True)
    visible = torch.ones(7, 7, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    positions = torch.arange(7).repeat(len(rows), 1)
    for row, line in enumerate(rows):
        before = 0
        for place in (place for place, token in enumerate(line) if token == EOD):
            visible[row, place + 1 :, : place + 1] = False
            positions[row, place + 1 :] -= place + 1 - before
            before = place + 1
    assert torch.equal(
        packed.require_mask(), torch.zeros(len(rows), 1, 7, 7).masked_fill(~visible[:, None], -torch.inf)
    )
    assert torch.equal(document_position_ids(documents), positions)
    full = PackedSequences.from_documents(documents, dtype=torch.float32, causal=False).require_mask()
    assert torch.equal(full == 0, (visible | visible.mT)[:, None])

    lengths = packed.cu_seqlens()
    ends = [row * 7 + end for row, _, end in spans(documents)]
    assert (lengths.dtype, len(lengths)) == (torch.int32, 7 * len(rows) + 1)
    assert lengths.tolist() == [0, *ends] + [7 * len(rows)] * (7 * len(rows) - len(ends))


@looped("name", BACKENDS)
@looped("groups", [1, 2, 4])
@looped("causal", [True, False])
def test_backends_take_each_document_by_itself(name: str, groups: int, causal: bool) -> None:
    """With a bias too; against the same function on the slices."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, TOKENS, 4, 8), (4, TOKENS, groups, 8), (4, TOKENS, groups, 8))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    bias = torch.randn(1, 4, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    documents = batch()[2]
    packed = PackedSequences.from_documents(documents, dtype=torch.float64, causal=causal)
    for term in (None, bias):
        output = attend(ATTENTION_FUNCTIONS[name], *tensors, softmax_scale=0.4, causal=causal, bias=term, packed=packed)
        upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad(output, tensors, upstream)
        for row, begin, end in spans(documents):
            inside = (slice(row, row + 1), slice(begin, end))
            parts = [tensor.detach()[inside].requires_grad_() for tensor in tensors]
            own = None if term is None else term[..., begin:end, begin:end]
            expected = attend(ATTENTION_FUNCTIONS[name], *parts, softmax_scale=0.4, causal=causal, bias=own)
            assert (output[inside] - expected).abs().max() <= 1e-13
            for ours, other in zip(gradients, torch.autograd.grad(expected, parts, upstream[inside]), strict=True):
                assert (ours[inside] - other).abs().max() <= 1e-13


def test_rotary_angles_by_row() -> None:
    cosine, sine = rotary_table(9, 4, dtype=torch.float64)
    heads = torch.randn(3, 5, 2, 6, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [8, 0, 1, 0, 0]])
    turned = apply_rotary(heads, cosine[places], sine[places])
    for row, place in enumerate(places):
        assert torch.equal(turned[row : row + 1], apply_rotary(heads[row : row + 1], cosine[place], sine[place]))


def test_the_mask_is_made_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PackedSequences] = []
    given: list[PackedSequences] = []
    real = PackedSequences.from_documents
    monkeypatch.setattr(
        PackedSequences, "from_documents", lambda *args, **options: made.append(real(*args, **options)) or made[-1]
    )
    model = gpt(num_layers=3)
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, args: given.append(args[1].packed))
    tokens, labels, documents = batch()
    for _ in range(2):
        model.loss(tokens, labels, 1.0, documents)
    assert len(made) == 2
    assert [[one is packed for one in made] for packed in given] == [[True, False]] * 3 + [[False, True]] * 3


@full_only
@pytest.mark.skipif(not INTERPRETED, reason="on a CPU Triton needs its interpreter")
def test_no_mask_is_made_for_a_backend_that_takes_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PackedSequences] = []
    real = PackedSequences.from_documents
    monkeypatch.setattr(
        PackedSequences, "from_documents", lambda *args, **options: made.append(real(*args, **options)) or made[-1]
    )
    tokens, labels, documents = batch()
    losses, gradients = [], []
    for backend in ("unfused", "triton"):
        model = gpt(attention_backend=backend, kv_channels=16, num_layers=1)
        assert model.attention_decisions["training"].needs_mask is (backend == "unfused")
        losses.append(model.loss(tokens, labels, 1.0, documents))
        losses[-1].backward()
        gradients.append(gradients_of(model))
    assert [packed.mask is None for packed in made] == [False, True]
    assert torch.allclose(*losses, rtol=1e-12)
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max() <= 1e-11, name


# ---------------------------------------------------------------- kinds of calls


def test_decisions_say_that_calls_are_packed() -> None:
    model = gpt()
    made = model.attention_decisions
    assert [(kind, decision.call.packed) for kind, decision in made.items()] == [
        ("training", True), ("evaluation", True), ("generation", False),
    ]  # fmt: skip
    assert "packed documents" in str(made["training"].call)
    assert "one mask" in made["training"].table()
    assert "packed" not in made["generation"].table()
    assert not any(decision.call.packed for decision in gpt(mask=False).attention_decisions.values())


def test_calls_outside_the_kinds_are_errors() -> None:
    tokens, _, documents = batch()
    with pytest.raises(ValueError, match="`documents` must be None"):
        gpt(positions=False, mask=False)(tokens, documents)
    only_one: list[dict[str, Any]] = [{"positions": False}, {"mask": False}]
    for options in only_one:
        with pytest.raises(ValueError, match="`documents` is required in training"):
            gpt(**options)(tokens)
        with pytest.raises(ValueError, match="`documents` must come with samples of 12 tokens"):
            gpt(**options).eval()(tokens[:, :5], documents[:, :5])
    with pytest.raises(NoBackendError, match="needs a CUDA device"):
        gpt(attention_backend="sdpa_cudnn")


def test_a_text_without_documents_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation, whatever the length: the end tokens of a prompt keep nothing apart."""
    model, plain = gpt().eval(), gpt(positions=False, mask=False).eval()
    tokens, _, documents = batch()
    for length in (1, 5, TOKENS):
        ours, expected = model(tokens[:, :length])[..., :VOCAB], plain(tokens[:, :length])[..., :VOCAB]
        assert (ours - expected).abs().max() <= 1e-12
    assert not torch.allclose(model(tokens)[..., :VOCAB], model(tokens, documents)[..., :VOCAB])
    for layer in model.decoder.layers:
        assert isinstance(layer, Layer)
        monkeypatch.delitem(layer.attention.backends, "generation")  # which was chosen for calls without documents
    model(tokens, documents)
    with pytest.raises(KeyError, match="generation"):
        model(tokens)


def test_evaluation_equals_training_without_dropout() -> None:
    tokens, labels, documents = batch()
    model = gpt()
    training = model.loss(tokens, labels, 1.0, documents)
    assert torch.allclose(model.eval().loss(tokens, labels, 1.0, documents), training, rtol=1e-13)


# ---------------------------------------------------------------- compiled, recomputed


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, not "error"
@pytest.mark.parametrize(
    ("positions", "recompute"),
    [("rope", False), *extra(("rope", True), ("learned_absolute", False), ("learned_absolute", True))],
)
def test_compiled_layers_are_one_graph_whatever_the_documents(positions: str, recompute: bool) -> None:
    options: dict[str, Any] = {"position_embedding_type": positions, "dtype": torch.float32, "num_layers": 3}
    eager, model = gpt(**options), gpt(**options)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.decoder.layers:
        assert isinstance(layer, Layer)
        layer.compile(fullgraph=True, dynamic=False, backend=count)
        if recompute:
            layer._compiled_call_impl = _recomputed(layer._compiled_call_impl)
    tokens, labels, documents = batch()
    for numbers in (documents, torch.zeros_like(documents), documents.roll(1, dims=0)):
        model.zero_grad()
        eager.zero_grad()
        loss, expected = (one.loss(tokens, labels, 9.0, numbers) for one in (model, eager))
        assert torch.allclose(loss, expected, rtol=1e-5)
        loss.backward()
        expected.backward()
        wanted = gradients_of(eager)
        for name, gradient in gradients_of(model).items():
            assert torch.allclose(gradient, wanted[name], atol=1e-4, rtol=1e-4), name
    assert len(graphs) == 1
    torch.compiler.reset()


def _recomputed(layer: Any) -> Any:
    return lambda *args: checkpoint(layer, *args, use_reentrant=False)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn", "sdpa_math", "unfused"])
@pytest.mark.parametrize("tokens", [200, 256, 1023])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_gpu_backends_take_each_document_by_itself(name: str, tokens: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, tokens, 8, 64), (2, tokens, groups, 64), (2, tokens, groups, 64))
    drawn = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
    wide, narrow = ([one.to(dtype).requires_grad_() for one in drawn] for dtype in (torch.float64, torch.bfloat16))
    documents = (torch.rand(2, tokens, generator=generator) < 0.03).int().cumsum(1, dtype=torch.int32).to("cuda")
    upstream = torch.randn(2, tokens, 8, 64, generator=generator).to("cuda")
    results: list[list[Tensor]] = []
    for function, tensors in (("reference", wide), (name, narrow)):
        packed = PackedSequences.from_documents(documents, dtype=tensors[0].dtype, causal=True)
        output = attend(ATTENTION_FUNCTIONS[function], *tensors, softmax_scale=0.125, causal=True, packed=packed)
        results.append([output, *torch.autograd.grad(output, tensors, upstream.to(output.dtype))])
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).abs().max() < 0.02 * expected.abs().max()
