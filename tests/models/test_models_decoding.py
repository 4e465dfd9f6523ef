"""Steps over a cache give what the whole text gives: every kind of positions, windows, experts, GPT and T5, in fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from gpt_builder import build_gpt, build_model
from tiers import cases
from torch import Tensor

from stoker.kernels.attention import decode
from stoker.kernels.launch import HAS_TRITON
from stoker.models import incremental_decoding
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.peft import PromptSlice
from stoker.models.config.t5 import T5Keys
from stoker.models.fused_decoding import is_plain
from stoker.models.gpt import GPT
from stoker.models.incremental_decoding import GPTDecoder, T5Decoder, kv_cache_bytes
from stoker.models.kv_cache import KVCache
from stoker.models.layer import Layer
from stoker.models.layers.fp8_linear import Fp8Linear
from stoker.models.t5 import T5

VOCAB, SLOTS = 41, 40
interpreted = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no build for this platform")
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.3, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}  # fmt: skip
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss"}
KINDS = ["learned_absolute", "learned_parameters", "rope", "xpos", "alibi", "kerple", "sandwich", "relative", "none"]
CASES: dict[str, dict[str, Any]] = {kind: {"position_embedding_type": kind} for kind in KINDS} | {
    "grouped": {"position_embedding_type": "rope", "num_query_groups": 2, "rotary_percentage": 0.5},
    "one_group": {"position_embedding_type": "rope", "num_query_groups": 1, "rotary_interleaved": True},
    "yarn": {"position_embedding_type": "rope", "rotary_scaling": "yarn", "rotary_original_length": 16},
    "normed_heads": {"position_embedding_type": "xpos", "qk_layernorm": True, "headscale": True},
    "parallel": {"position_embedding_type": "rope", "transformer_block_type": "parallel_ln"},
    "post_ln": {"position_embedding_type": "rope", "transformer_block_type": "post_ln"},
    "normformer_softcaps": {
        "transformer_block_type": "normformer", "attn_logit_softcapping": 0.5, "logits_soft_cap": 2.0,
    },
    "window": {"position_embedding_type": "rope", "window_size": [5, 0]},
    "sinks": {"position_embedding_type": "rope", "num_query_groups": 2, "softmax_type": "off-by-one"},
    "window_alibi": {"position_embedding_type": "alibi", "window_size": [5, 0], "num_query_groups": 2},
    "window_of_all": {"position_embedding_type": "kerple", "window_size": [99, 0]},
    "itself_only": {"position_embedding_type": "relative", "window_size": [0, 0]},
    "experts": {"position_embedding_type": "rope", **MOE},
    "experts_room": {
        "position_embedding_type": "rope", **MOE, "moe_expert_capacity_factor": 0.5,
        "moe_pad_expert_input_to_capacity": True,
    },
    "own_bias": {
        "position_embedding_type": "own_kerple", "transformer_block_type": "own_pre_ln", "window_size": [7, 0],
    },
    "own_activation": {"position_embedding_type": "own_alibi", "activation": "own_mish-glu"},
    "experts_sinkhorn": {"position_embedding_type": "rope", **MOE, "moe_router_load_balancing_type": "sinkhorn"},
}  # fmt: skip


def gpt(**changes: Any) -> GPT:
    keys = SMALL | {"encoder_seq_length": SLOTS + 1, "make_vocab_size_divisible_by": 8} | changes
    model = build_gpt(GPTKeys.model_validate(keys), vocab_size=VOCAB, dtype=torch.float64)
    return model.eval()


def t5(encoder: dict[str, Any], decoder: dict[str, Any], **changes: Any) -> T5:
    stacks = {"encoder": SMALL | encoder, "decoder": SMALL | decoder}
    keys = T5Keys.model_validate(stacks | {"seq_length": 30, "make_vocab_size_divisible_by": 8} | changes)
    model = build_model(
        keys, vocab_size=VOCAB, dtype=torch.float64, batch_spec=BatchSpec(seq_length=30, decoder_seq_length=SLOTS + 1)
    )
    assert isinstance(model, T5)
    return model.eval()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def same(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine[..., :VOCAB], theirs[..., :VOCAB], rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.usefixtures("own_components")
@pytest.mark.parametrize("case", dict.fromkeys([*cases(CASES, fast=4), "own_bias"]))
def test_every_step_gives_what_the_whole_text_gives(case: str) -> None:
    """Texts of 1, 9 and 20 tokens go on together to the last slot; a second batch finds nothing of the first."""
    model = gpt(**CASES[case])
    decoder = GPTDecoder(model, 3, SLOTS)
    for seed, starts in enumerate([[1, 9, 20], [3, 1, 2]]):
        texts, lengths = drawn(3, SLOTS, seed=seed), torch.tensor(starts)
        expected = [model(texts[row : row + 1])[0] for row in range(3)]
        begun = texts[:, : max(starts)].clone()
        for row, length in enumerate(starts):
            begun[row, length:] = 0
        logits = decoder.prefill(begun, lengths)
        for number in range(SLOTS - max(starts) + 1):
            same(logits, torch.stack([expected[row][length - 1 + number] for row, length in enumerate(starts)]))
            if number < SLOTS - max(starts):
                logits = decoder.step(texts[torch.arange(3), lengths + number])


@torch.no_grad()
def test_a_single_token_begins_a_text() -> None:
    model, texts = gpt(position_embedding_type="rope"), drawn(2, 5)
    decoder = GPTDecoder(model, 2, 5)
    same(decoder.prefill(texts[:, :1], torch.ones(2, dtype=torch.int64)), model(texts)[:, 0])
    for place in range(1, 5):
        same(decoder.step(texts[:, place]), model(texts)[:, place])


@torch.no_grad()
@pytest.mark.parametrize("window", [None, [3, 0]])
def test_rows_go_on_as_other_rows(window: list[int] | None) -> None:
    model = gpt(position_embedding_type="alibi", window_size=window)
    texts, order = drawn(3, 10), torch.tensor([2, 2, 0])
    decoder = GPTDecoder(model, 3, SLOTS)
    decoder.prefill(texts[:, :8], torch.tensor([4, 6, 8]))
    decoder.reorder(order)
    logits = decoder.step(texts[:, 9])
    for row, (source, length) in enumerate([(2, 8), (2, 8), (0, 4)]):
        same(logits[row], model(torch.cat((texts[source, :length], texts[row, 9:]))[None])[0, -1])


@torch.no_grad()
def test_a_full_text_stays_within_its_slots() -> None:
    """Texts that have ended are still computed: their positions must not leave the tables."""
    model = gpt(position_embedding_type="learned_absolute", encoder_seq_length=8)
    decoder = GPTDecoder(model, 2, 8)
    texts = drawn(2, 8)
    decoder.prefill(texts, torch.tensor([8, 4]))
    for place in range(4, 8):
        logits = decoder.step(torch.stack((texts[0, 0], texts[1, place])))
        assert logits[:, :VOCAB].isfinite().all()
        same(logits[1], model(texts[1:, : place + 1])[0, -1])


def test_slots_are_what_a_window_needs() -> None:
    def keys(window: int) -> list[int]:
        cache = KVCache(
            2,
            batch_size=1,
            groups=3,
            slots=50,
            head_dim=8,
            window=window,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        return list(cache.layers[1].key.shape)

    assert keys(-1) == [1, 3, 50, 8]
    assert keys(9) == [1, 3, 10, 8]
    assert keys(80) == [1, 3, 50, 8]


def test_slots_beyond_the_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`max_length` \(42\) must be from 1 to 41"):
        GPTDecoder(gpt(), 1, SLOTS + 2)
    with pytest.raises(ValueError, match=r"^`batch_size`"):
        T5Decoder(t5({}, {}), 3, 4, 5, rows_per_encoding=2)


FUSED: dict[str, dict[str, Any]] = {
    "llama": {"position_embedding_type": "rope", "num_query_groups": 2, "activation": "swiglu", "bias": False},
    "parallel_bias": {
        "position_embedding_type": "rope", "transformer_block_type": "parallel_ln", "rotary_percentage": 0.5,
        "activation": "geglu",
    },
    "xpos_interleaved": {"position_embedding_type": "xpos", "rotary_interleaved": True, "num_query_groups": 1},
    "window_softcap": {
        "position_embedding_type": "alibi", "window_size": [5, 0], "attn_logit_softcapping": 5.0,
        "transformer_block_type": "parallel_ln",
    },
    "normed_heads_sinks": {
        "position_embedding_type": "kerple", "qk_layernorm": True, "softmax_type": "learnable",
        "layernorm_zero_centered_gamma": True,
    },
}  # fmt: skip


@torch.no_grad()
@interpreted
@pytest.mark.parametrize(("case", "parts"), cases(product(FUSED, (1, 4)), fast=2))
def test_fused_steps_give_what_the_whole_text_gives(case: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer in six kernels, interpreted; five where the keys are in one part."""
    monkeypatch.setattr(incremental_decoding, "can_fuse_decode_step", lambda layers, *_: all(map(is_plain, layers)))
    monkeypatch.setattr(decode, "num_splits", lambda *_: parts)
    model, text = gpt(**{"normalization": "rmsnorm"} | FUSED[case]), drawn(1, SLOTS)
    decoder = GPTDecoder(model, 1, SLOTS)
    assert decoder._fused
    same(decoder.prefill(text[:, :9], torch.tensor([9])), model(text[:, :9])[:, -1])
    for length in range(9, 12):
        same(decoder.step(text[:, length]), model(text[:, : length + 1])[:, -1])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "layernorm"}, {"transformer_block_type": "post_ln"}, {"headscale": True},
        {"transformer_block_type": "normformer"}, MOE, {"activation": "own_mish-glu"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("own_components")
def test_other_layers_are_not_fused(changes: dict[str, Any]) -> None:
    layer = next(iter(gpt(**{"normalization": "rmsnorm"} | changes).decoder.layers))
    assert isinstance(layer, Layer)
    assert not is_plain(layer)


def test_adapted_hooked_and_training_layers_are_not_fused() -> None:
    layer = next(iter(gpt(normalization="rmsnorm").decoder.layers))
    assert isinstance(layer, Layer)
    assert is_plain(layer)
    assert not is_plain(layer.train())
    hook = layer.eval().attention.output.register_forward_hook(lambda *_: None)
    assert not is_plain(layer)
    hook.remove()
    assert is_plain(layer)
    layer.attention.qkv = Fp8Linear(24, 24)
    assert not is_plain(layer)


T5_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "relative": ({"position_embedding_type": "relative"}, {"position_embedding_type": "relative"}, {}),
    "cross_relative": (
        {"position_embedding_type": "relative"},
        {"position_embedding_type": "relative", "relative_position_bias_self_attention_only": False},
        {},
    ),
    "learned": ({}, {}, {"share_decoder_tokens_head_embeddings": False, "tokens_head_bias": True}),
    "rope_window_groups": (
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope", "num_query_groups": 2, "window_size": [3, 0], "headscale": True},
        {},
    ),
    "own": (
        {"position_embedding_type": "own_kerple", "transformer_block_type": "own_pre_ln"},
        {"position_embedding_type": "own_kerple", "transformer_block_type": "own_pre_ln"},
        {},
    ),
    "experts_normed": ({"position_embedding_type": "alibi"}, {**MOE, "qk_layernorm": True}, {}),
}


@torch.no_grad()
@pytest.mark.usefixtures("own_components")
@pytest.mark.parametrize("case", cases(T5_CASES, fast=3))
@pytest.mark.parametrize("per_memory", cases([1, 2], fast=1))
def test_a_t5_writes_what_the_whole_text_gives(case: str, per_memory: int) -> None:
    encoder, decoder, keys = T5_CASES[case]
    model = t5(encoder, decoder, **keys)
    made = T5Decoder(model, 2 * per_memory, 12, 30, per_memory)
    for read, lengths in ((drawn(2, 17, seed=1), [17, 5]), (drawn(2, 1, seed=2), [1, 1])):
        made.prefill(read, torch.tensor(lengths))
        held = [tensor for pair in [*made._cache.layers, *made._memories] for tensor in pair[:2]]
        assert kv_cache_bytes(model, 2 * per_memory, 12, 30, per_memory) == sum(tensor.nbytes for tensor in held)
        written = drawn(2 * per_memory, 12, seed=3)
        expected = [
            model(read[row // per_memory, : lengths[row // per_memory]][None], written[row : row + 1])[0]
            for row in range(2 * per_memory)
        ]
        for place in range(12):
            same(made.step(written[:, place]), torch.stack([one[place] for one in expected]))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "alibi"])
def test_learned_vectors_stand_in_front_of_texts(positions: str) -> None:
    """They take positions: what the model reads is shorter by as many."""
    keys = GPTKeys.model_validate(SMALL | {"position_embedding_type": positions, "encoder_seq_length": 20})
    prompt = PromptSlice(virtual_tokens=5, bottleneck=8, embedding=6, init_std=0.5)
    model = build_model(
        keys,
        vocab_size=VOCAB,
        dtype=torch.float64,
        micro_batch_size=1,
        batch_spec=BatchSpec(seq_length=15),
        peft=prompt,
    )
    assert isinstance(model, GPT)
    model.eval()
    texts, starts = drawn(2, 12), torch.tensor([7, 1])
    decoder = GPTDecoder(model, 2, 15)
    logits = decoder.prefill(texts[:, :7], starts)
    for number in range(5):
        same(logits, torch.stack([model(texts[row : row + 1])[0, int(starts[row]) - 1 + number] for row in range(2)]))
        logits = decoder.step(texts[torch.arange(2), starts + number])
    if positions != "alibi":
        with pytest.raises(ValueError, match=r"^`max_length` \(16\) must be from 1 to 15"):
            GPTDecoder(model, 2, 16)


@torch.no_grad()
def test_learned_vectors_stand_in_front_of_what_a_t5_reads() -> None:
    stack = SMALL | {"position_embedding_type": "relative"}
    keys = T5Keys.model_validate({"encoder": stack, "decoder": stack, "seq_length": 20})
    model = build_model(
        keys,
        vocab_size=VOCAB,
        dtype=torch.float64,
        micro_batch_size=1,
        batch_spec=BatchSpec(seq_length=20, decoder_seq_length=9),
        peft=PromptSlice(virtual_tokens=4, bottleneck=8, embedding=6, init_std=0.5),
    )
    assert isinstance(model, T5)
    model.eval()
    read, written = drawn(2, 11), drawn(2, 6, seed=1)
    decoder = T5Decoder(model, 2, 6, 11)
    decoder.prefill(read, torch.tensor([11, 1]))
    expected = [model(read[row : row + 1, : (11, 1)[row]], written[row : row + 1])[0] for row in range(2)]
    for place in range(6):
        same(decoder.step(written[:, place]), torch.stack([one[place] for one in expected]))


@torch.no_grad()
def test_a_step_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step is whole, gives the same, and is compiled once for all layers."""
    compiled = torch.compile
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend=backend, **options))
    model = gpt(position_embedding_type="rope", window_size=[5, 0])
    model.decoder.compile_decode_step()
    texts, decoder = drawn(2, 12), GPTDecoder(model, 2, 12)
    decoder.prefill(texts[:, :8], torch.tensor([8, 3]))
    for place in range(8, 12):
        logits = decoder.step(texts[torch.arange(2), torch.tensor([place, place - 5])])
        same(logits[:1], model(texts[:1, : place + 1])[:, -1])
    assert len(graphs) == 1
