"""The whole GPT: initialisation, vocabulary padding, loss, kinds of calls, positions, groups, compilation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt_builder import build_gpt, gradients_of, layers_of
from tiers import extra, full_only, looped
from torch import Tensor

from stoker.kernels.attention.dispatch import NoBackendError
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.cross_entropy import linear_cross_entropy
from stoker.models import lm_head as head_module
from stoker.models.build import decide_compile
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.layers.context import LayerContext
from stoker.models.layers.mlp import MLP

VOCAB, TOKENS = 50, 12
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "encoder_seq_length": TOKENS,
    "make_vocab_size_divisible_by": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def gpt(
    *, dtype: torch.dtype = torch.float32, device: str = "cpu", flags: AttentionFlags | None = None, **changes: Any
) -> GPT:
    return build_gpt(
        GPTKeys.model_validate(SMALL | changes),
        vocab_size=VOCAB,
        device=device,
        dtype=dtype,
        flags=flags or AttentionFlags(),
        micro_batch_size=3,
    )


def tokens_and_labels(length: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (3, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------- initialisation


def test_init_depends_on_seed_and_name_only() -> None:
    weights = gpt().state_dict()
    deeper = gpt(num_layers=5, use_scaled_init_method=False).state_dict()
    plain = gpt(use_scaled_init_method=False).state_dict()
    assert all(torch.equal(value, deeper[name]) for name, value in plain.items())
    cast = gpt(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value.bfloat16(), cast[name]) for name, value in weights.items())
    torch.manual_seed(5)  # neither the global generator nor the untied head changes the rest
    untied = gpt(share_embeddings_and_output_weights=False).state_dict()
    assert all(torch.equal(value, untied[name]) for name, value in weights.items())
    matrices = [name for name, value in weights.items() if value.ndim == 2]
    other = gpt(seed=1).state_dict()
    assert not any(torch.equal(weights[name], other[name]) for name in matrices)
    firsts = {value.flatten()[0].item() for value in weights.values() if value.ndim == 2}
    assert len(firsts) == len(matrices)


def test_init_statistics() -> None:
    model = gpt(hidden_size=256, ffn_hidden_size=512, init_method_std=0.05, share_embeddings_and_output_weights=False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
        else:
            written = name.endswith(("attention.output.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.05 / (2 if written else 1), rel=0.05), name
            assert abs(parameter.mean()) < 0.003
    one_off = gpt(normalization="layernorm1p"), gpt(normalization="rmsnorm", layernorm_zero_centered_gamma=True)
    for centered in one_off:
        norm = centered.decoder.final_norm
        assert norm is not None
        assert not norm.weight.any()


def test_golden_weight() -> None:
    """The start of a seed is the same on every machine and in every version."""
    weight = gpt().token_embedding.weight
    assert weight[0, :3].tolist() == pytest.approx([0.0147131337, 0.0140105253, -0.0280882381], rel=1e-6)


def test_parameter_names() -> None:
    names = set(gpt(num_layers=1, share_embeddings_and_output_weights=False).state_dict())
    parts = {
        f"decoder.layers.0.{part}.{kind}"
        for part in ("attention_norm", "attention.qkv", "attention.output", "mlp_norm", "mlp.up", "mlp.down")
        for kind in ("weight", "bias")
    }
    tables = {"token_embedding.weight", "position_embedding.weight", "head.weight"}
    assert names == parts | tables | {"decoder.final_norm.weight", "decoder.final_norm.bias"}
    rope = gpt(num_layers=1, position_embedding_type="rope", bias=False, qkv_bias=True, normalization="rmsnorm")
    assert {name for name in rope.state_dict() if name.endswith("bias")} == {"decoder.layers.0.attention.qkv.bias"}
    assert "head.weight" not in rope.state_dict()


# ---------------------------------------------------------------- vocabulary and loss


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary(tied: bool) -> None:
    model = gpt(share_embeddings_and_output_weights=tied, dtype=torch.float64)
    tokens, labels = tokens_and_labels()
    logits = model(tokens)
    assert logits.shape == (3, TOKENS, 64)
    assert (logits[..., VOCAB:] == -math.inf).all()
    assert logits[..., :VOCAB].isfinite().all()
    with torch.no_grad():
        model.output_weight[VOCAB:] = 100.0
    loss = model.loss(tokens, labels, 7.0)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 7
    assert torch.allclose(loss, expected, rtol=1e-12)
    loss.backward()
    assert model.output_weight.grad is not None
    assert not model.output_weight.grad[VOCAB:].any()


def test_loss_skips_ignored_labels_and_micro_batches_add_up() -> None:
    model = gpt(dtype=torch.float64, position_embedding_type="rope")
    tokens, labels = tokens_and_labels()
    labels = labels.clone()
    labels[0] = -100
    labels[1, 3:] = -100
    counted = (labels != -100).sum()
    whole = model.loss(tokens, labels, counted)
    whole.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    parts = [model.loss(tokens[i : i + 1], labels[i : i + 1], counted) for i in range(3)]
    torch.stack(parts).sum().backward()
    assert parts[0] == 0
    assert torch.allclose(torch.stack(parts).sum(), whole, rtol=1e-13)
    for name, gradient in gradients_of(model).items():
        assert torch.allclose(gradient, gradients[name], rtol=1e-11, atol=1e-15)


def test_autocast_reaches_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    def spy(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        seen.update((hidden.dtype, weight.dtype))
        return linear_cross_entropy(hidden, weight, labels, **options)

    monkeypatch.setattr(head_module, "linear_cross_entropy", spy)
    model = gpt()
    tokens, labels = tokens_and_labels()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, labels, 36.0)
    assert seen == {torch.bfloat16}
    assert torch.allclose(loss, model.loss(tokens, labels, 36.0), rtol=1e-2)
    loss.backward()
    assert {gradient.dtype for gradient in gradients_of(model).values()} == {torch.float32}


# ---------------------------------------------------------------- structure


@looped("backend", ["sdpa_flash", "unfused"])
@looped("groups", [1, 2])
@looped("positions", ["rope", "none"])
def test_groups_equal_expanded_heads(backend: str, groups: int, positions: str) -> None:
    """MQA and GQA compute what MHA computes when every head has its own copy of its group."""
    common: dict[str, Any] = {
        "dtype": torch.float64,
        "attention_backend": backend,
        "position_embedding_type": positions,
    }
    grouped = gpt(num_query_groups=groups, **common)
    full = gpt(**common)
    weights = grouped.state_dict()
    for name, value in weights.items():
        if ".qkv." in name:
            query, key, word = value.unflatten(0, (4 + 2 * groups, 8)).split((4, groups, groups))
            wide = [part.repeat_interleave(4 // groups, dim=0) for part in (key, word)]
            weights[name] = torch.cat((query, *wide)).flatten(0, 1)
    full.load_state_dict(weights)
    tokens, _ = tokens_and_labels()
    assert torch.allclose(grouped(tokens)[..., :VOCAB], full(tokens)[..., :VOCAB], atol=1e-13)


def test_causal_and_position_aware() -> None:
    for kind in ("learned_absolute", "rope", "none"):
        model = gpt(position_embedding_type=kind, num_layers=1, dtype=torch.float64).eval()
        tokens, _ = tokens_and_labels()
        changed = tokens.clone()
        changed[:, 7] = (changed[:, 7] + 1) % VOCAB
        logits, others = model(tokens)[..., :VOCAB], model(changed)[..., :VOCAB]
        assert torch.equal(logits[:, :7], others[:, :7])
        assert not torch.isclose(logits[:, 7:], others[:, 7:]).all(-1).any()
        # one layer without positions sees a set: the order of what came before does not matter
        swapped = tokens[:, [0, 5, 2, 3, 4, 1, *range(6, TOKENS)]]
        order_blind = torch.allclose(logits[:, -1], model(swapped)[:, -1, :VOCAB], atol=1e-12)
        assert order_blind == (kind == "none")


def test_scores_without_normalisation() -> None:
    scaled, plain = gpt(dtype=torch.float64), gpt(dtype=torch.float64, normalize_attention_scores=False)
    tokens, _ = tokens_and_labels()
    assert not torch.allclose(scaled.hidden_states(tokens), plain.hidden_states(tokens))
    with torch.no_grad():
        for layer in layers_of(plain):
            layer.attention.qkv.weight[:32] /= math.sqrt(8)
    assert torch.allclose(scaled.hidden_states(tokens), plain.hidden_states(tokens), atol=1e-12)


@pytest.mark.parametrize("key", ["hidden_dropout", "attention_dropout", "ffn_dropout"])
def test_dropout_acts_in_training_only(key: str) -> None:
    options: dict[str, Any] = {key: 0.5}
    model = gpt(**options)
    tokens, _ = tokens_and_labels()
    assert not torch.equal(model.hidden_states(tokens), model.hidden_states(tokens))
    model.eval()
    assert torch.equal(model.hidden_states(tokens), model.hidden_states(tokens))
    assert torch.equal(model.hidden_states(tokens), gpt().eval().hidden_states(tokens))


def test_hidden_dropout_falls_on_embeddings_and_both_parts_of_a_layer() -> None:
    torch.manual_seed(0)
    model = gpt(num_layers=1, hidden_size=2048, hidden_dropout=0.5)
    layer = layers_of(model)[0]
    hidden = torch.zeros(3, TOKENS, 2048)
    dropped: list[float] = []
    layer.attention.output.register_forward_hook(lambda *_: torch.ones_like(hidden))
    assert isinstance(layer.mlp, MLP)
    layer.mlp.down.register_forward_hook(lambda *_: torch.full_like(hidden, 100.0))
    embedded, dropout = model.decoder.drop_embeddings(torch.ones_like(hidden), model.dropout)
    assert dropout is not None
    output, _ = layer(hidden, LayerContext("training", dropout=dropout.of_layer(0, dropout.tokens)))
    for value in (0.0, 2.0, 200.0, 202.0):
        dropped.append((output == value).float().mean().item())
    assert dropped == pytest.approx([0.25] * 4, abs=0.01)
    assert (embedded == 0).float().mean().item() == pytest.approx(0.5, abs=0.01)


# ---------------------------------------------------------------- kinds of calls


def test_decisions() -> None:
    model = gpt(attention_dropout=0.1)
    made = {kind: decision.backend for kind, decision in model.attention_decisions.items()}
    assert made == {"training": "unfused", "evaluation": "sdpa_flash", "generation": "sdpa_flash"}
    assert "not support dropout (0.1)" in model.attention_decisions["training"].table()
    flags = AttentionFlags(flash=False)
    assert {decision.backend for decision in gpt(flags=flags).attention_decisions.values()} == {"unfused"}
    wished = gpt(attention_dropout=0.1, use_flash_attention=True).attention_decisions["training"]
    assert wished.backend == "unfused"
    assert "cannot be met here: " in wished.warning
    with pytest.raises(NoBackendError, match=r"dropout \(0.1\)"):
        gpt(attention_dropout=0.1, attention_backend="flash")


def test_each_kind_runs_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt(attention_dropout=0.1)
    called: list[str] = []
    for layer in layers_of(model):
        for kind in layer.attention.backends:
            real = layer.attention.backends[kind]

            def spy(inputs: AttentionInputs, kind: str = kind, real: Any = real) -> Tensor:
                called.append(f"{kind} {inputs.dropout_p}")
                return real(inputs)

            monkeypatch.setitem(layer.attention.backends, kind, spy)
    tokens, labels = tokens_and_labels()
    model.loss(tokens, labels, 1.0)
    model.eval().loss(tokens, labels, 1.0)
    model(tokens[:, :5])
    assert called == ["training 0.1"] * 2 + ["evaluation 0.0"] * 2 + ["generation 0.0"] * 2


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_generation_of_any_length(length: int) -> None:
    model = gpt(dtype=torch.float64, position_embedding_type="rope").eval()
    tokens, _ = tokens_and_labels()
    whole = model(tokens)[:, :length]
    attended: list[int] = []
    for layer in layers_of(model):
        layer.attention.qkv.register_forward_hook(lambda _layer, _inputs, output: attended.append(output.shape[1]))
    ours = model(tokens[:, :length])
    assert attended == [max(2, length)] * 2  # cuDNN takes no single token
    assert ours.shape == whole.shape
    assert torch.allclose(ours[..., :VOCAB], whole[..., :VOCAB], atol=1e-13)


def test_lengths_outside_the_kinds_are_errors() -> None:
    tokens, _ = tokens_and_labels(TOKENS + 1)
    with pytest.raises(ValueError, match=r"`tokens` \(5 per sample\) must have the sequence length"):
        gpt()(tokens[:, :5])
    with pytest.raises(ValueError, match=r"`tokens` \(13 per sample\) must be from 1 to 12"):
        gpt().eval()(tokens)
    with pytest.raises(ValueError, match=r"\(0 per sample\)"):
        gpt().eval()(tokens[:, :0])
    assert gpt(max_position_embeddings=20).eval()(tokens).shape[1] == 13
    assert gpt(position_embedding_type="none").eval()(tokens).shape[1] == 13
    with pytest.raises(ValueError, match="none, on the meta device"):
        gpt(device="meta")(tokens[:, :TOKENS])


def test_kinds_can_be_left_out() -> None:
    model = build_gpt(
        GPTKeys.model_validate(SMALL | {"attention_dropout": 0.1, "use_flash_attention": True}),
        vocab_size=VOCAB,
        micro_batch_size=1,
        kinds=("evaluation", "generation"),
        seq_length=6,
    )
    tokens, _ = tokens_and_labels()
    assert model.batch_spec.seq_length == 6
    with pytest.raises(ValueError, match="a training call"):
        model(tokens[:, :6])
    assert model.eval()(tokens[:, :6]).shape[1] == 6


def test_wrong_dtype() -> None:
    with pytest.raises(ValueError, match="`dtype`"):
        gpt(dtype=torch.float8_e4m3fn)


# ---------------------------------------------------------------- compilation


@looped(
    ("wish", "device", "release", "uses_rng", "expected"),
    [
        (None, "cuda", (2, 11), False, True),
        (None, "cuda", (2, 11), True, True),
        (None, "cuda", (2, 13), False, True),
        (None, "cuda", (2, 13), True, False),
        (None, "cpu", (2, 13), False, False),
        (True, "cpu", (2, 13), True, True),
        (True, "cuda", (2, 12), True, True),
        (False, "cuda", (2, 11), False, False),
    ],
)
def test_compile_policy(
    wish: bool | None, device: str, release: tuple[int, int], uses_rng: bool, expected: bool
) -> None:
    decided, reason = decide_compile(wish, device, release, uses_rng=uses_rng)
    assert decided is expected
    assert reason


def test_compile_refuses_wrong_masks() -> None:
    with pytest.raises(ValueError, match=r"`compile` \(True\).*#198333"):
        decide_compile(True, "cuda", (2, 13), uses_rng=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, not "error"
@pytest.mark.parametrize("positions", ["rope", *extra("learned_absolute")])
def test_layers_are_one_graph_compiled_once(positions: str) -> None:
    """fullgraph, one compilation for all equal layers and kinds of work, generation left eager, same numbers."""
    eager = gpt(position_embedding_type=positions, num_layers=3, num_query_groups=2)
    model = gpt(position_embedding_type=positions, num_layers=3, num_query_groups=2)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in layers_of(model):
        layer.compile(fullgraph=True, dynamic=False, backend=count)
    model.compiled = True
    tokens, labels = tokens_and_labels()
    for _ in range(2):
        model.loss(tokens, labels, 1.0).backward()
    assert len(graphs) == 1
    eager.loss(tokens, labels, 0.5).backward()
    expected = gradients_of(eager)
    for name, gradient in gradients_of(model).items():
        assert torch.allclose(gradient, expected[name], atol=1e-4, rtol=1e-4)
    model.eval()
    with torch.no_grad():
        model.loss(tokens, labels, 1.0)
        assert len(graphs) == 2
        for length in (1, 3, 7):
            model(tokens[:, :length])
    assert len(graphs) == 2


def test_compile_true_compiles() -> None:
    torch.compiler.reset()
    model = gpt(compile=True)
    assert model.compiled
    assert all("forward" in vars(layer) for layer in layers_of(model))
    assert not gpt().compiled
    assert gpt().compile_reason.startswith("off by default on cpu")


@full_only
def test_many_models_compile_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts their layers together: a limit of 2, in place of its 8, would make the third kind an error."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    tokens, labels = tokens_and_labels()
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in range(32, 48, 4):
            gpt(compile=True, hidden_size=width, num_layers=1).loss(tokens, labels, 1.0).backward()
    torch.compiler.reset()
