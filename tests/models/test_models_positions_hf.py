"""Positions, norms on heads and softcaps equal those of transformers: Bloom, T5, Llama 3.1, YaRN, Qwen3, Gemma 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from gpt_builder import build_gpt
from hf_fp64 import _rms_norm, _rotary, map_parameters
from tiers import looped
from torch import Tensor

from stoker.kernels.attention.backends.registry import ATTENTION_FUNCTIONS
from stoker.kernels.relative_position_buckets import relative_buckets
from stoker.kernels.rope_scaling import Llama3Scaling, RotaryScaling, YarnScaling, rotary_frequencies
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.gpt import GPT
from stoker.models.hf.llama import QWEN3
from stoker.models.layers.attention_bias import ALiBi
from stoker.models.layers.context import LayerContext
from stoker.models.layers.position_embeddings import RotaryEmbedding, RotaryTables
from stoker.models.layers.self_attention import SelfAttention

FP64 = torch.float64
VOCAB, TOKENS = 53, 13


@looped("heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_slopes_of_bloom(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(ALiBi(heads, heads).slopes, theirs, rtol=1e-6, atol=0)


@looped("bidirectional", [True, False])
@looped(("buckets", "largest"), [(32, 128), (32, 40), (64, 256), (8, 20), (16, 100)])
def test_buckets_of_t5(buckets: int, largest: int, bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = torch.tensor(relative_buckets(buckets, largest, bidirectional=bidirectional))
    reach, distances = len(ours) // 2, torch.arange(-5 * largest, 5 * largest + 1)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, largest)
    assert torch.equal(ours[distances.clamp(-reach, reach) + reach], theirs)


SCALINGS: list[tuple[RotaryScaling, dict[str, Any]]] = [
    (
        Llama3Scaling(factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ),
    (
        Llama3Scaling(factor=32.0, original_max_position_embeddings=100, low_freq_factor=0.5, high_freq_factor=7.0),
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 7.0,
         "original_max_position_embeddings": 100},
    ),
    (
        YarnScaling(factor=4.0, original_max_position_embeddings=32768, beta_slow=1.0, beta_fast=32.0),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        YarnScaling(factor=40.0, original_max_position_embeddings=4096, beta_slow=2.0, beta_fast=16.0),
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2,
         "original_max_position_embeddings": 4096},
    ),
    (  # both ends of the ramp are channel 0
        YarnScaling(factor=2.0, original_max_position_embeddings=4, beta_slow=1.0, beta_fast=32.0),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    ),
]  # fmt: skip


@looped(("scaling", "parameters"), SCALINGS)
@looped("base", [10000.0, 500000.0])
@looped("share", [1.0, 0.5])
def test_rotary_frequencies(scaling: RotaryScaling, parameters: dict[str, Any], base: float, share: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**parameters, "rope_theta": base, "partial_rotary_factor": share}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=rope)
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    ours = scaling.apply(rotary_frequencies(int(128 * share), base), base)
    torch.testing.assert_close(torch.tensor(ours, dtype=FP64).float(), theirs, rtol=2e-6, atol=0)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    table = RotaryEmbedding(int(128 * share), 30, base=base, position_scale=1.0, scaling=scaling)(30)
    angles = torch.outer(torch.arange(30.0), theirs)
    torch.testing.assert_close(table.cosine, angles.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(table.sine, angles.sin() * factor, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- models


def model_of(**changes: Any) -> GPT:
    keys = {
        "num_layers": 2, "hidden_size": 36, "ffn_hidden_size": 50, "num_attention_heads": 6, "num_query_groups": 2,
        "kv_channels": 10, "normalization": "rmsnorm", "bias": False, "encoder_seq_length": TOKENS,
        "position_embedding_type": "rope", "rotary_base": 500.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 8,
    }  # fmt: skip
    return build_gpt(GPTKeys.model_validate(keys | changes), vocab_size=VOCAB, dtype=FP64, micro_batch_size=3)


def randomised(reference: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    for parameter in reference.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return reference.double()


def compare(model: GPT, reference: Any, names: Callable[[str], dict[str, Tensor]]) -> None:
    """Logits and all gradients of a loss, at a relative 1e-10."""
    mine = dict(model.named_parameters())
    assert mine.keys() == names("data").keys()
    for name, value in names("data").items():
        mine[name].data.zero_()[: len(value)] = value
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, VOCAB, (2, 3, TOKENS), generator=generator)
    theirs = reference(tokens).logits
    F.cross_entropy(theirs.flatten(0, 1), labels.flatten()).backward()
    close(model(tokens)[..., :VOCAB], theirs)
    model.loss(tokens, labels, labels.numel()).backward()
    for name, gradient in names("grad").items():
        found = mine[name].grad
        assert found is not None
        close(found[: len(gradient)], gradient)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


@pytest.fixture
def qwen3_upcasts_lifted() -> Iterator[None]:
    from transformers.models.qwen3 import modeling_qwen3

    with (
        mock.patch.object(modeling_qwen3.Qwen3RMSNorm, "forward", _rms_norm),
        mock.patch.object(modeling_qwen3.Qwen3RotaryEmbedding, "forward", _rotary),
    ):
        yield


@pytest.mark.usefixtures("qwen3_upcasts_lifted")
def test_qwen3() -> None:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config)
    randomised(reference).set_attn_implementation("sdpa")
    model = model_of(activation="fast-swiglu", qk_layernorm=True, share_embeddings_and_output_weights=False)

    compare(model, reference, lambda of: map_parameters(QWEN3, model, reference, of))


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


@pytest.fixture
def gemma2_upcasts_lifted() -> Iterator[None]:
    from transformers.models.gemma2 import modeling_gemma2

    softmax = F.softmax
    with (
        mock.patch.object(modeling_gemma2.Gemma2RMSNorm, "forward", _gemma_norm),
        mock.patch.object(modeling_gemma2.Gemma2RotaryEmbedding, "forward", _rotary),
        mock.patch.object(F, "softmax", lambda scores, dim, dtype: softmax(scores, dim=dim)),
    ):
        yield


def gemma2(**changes: Any) -> Any:
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=50, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, query_pre_attn_scalar=10, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **changes,
    )  # fmt: skip
    reference = randomised(transformers.Gemma2ForCausalLM(config))
    reference.set_attn_implementation("eager")
    return reference


@pytest.mark.usefixtures("gemma2_upcasts_lifted")
@pytest.mark.parametrize("backend", ["unfused", "reference"])
def test_softcap_and_window_of_gemma2(backend: str) -> None:
    reference = gemma2(attn_logit_softcapping=1.5, sliding_window=4, layer_types=["sliding_attention"])
    theirs = reference.model.layers[0].self_attn
    keys = {
        "num_layers": 1, "hidden_size": 36, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 10,
        "bias": False, "attention_dropout": 0.0, "window_size": [3, 0], "attn_logit_softcapping": 1.5,
    }  # fmt: skip
    stack = gpt_slice(GPTKeys.model_validate(keys), vocab_size=8).stack
    ours = SelfAttention(stack, {"training": ATTENTION_FUNCTIONS[backend]}).double()
    ours.qkv.weight.data = torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]).detach()
    ours.output.weight.data = theirs.o_proj.weight.detach()
    hidden = torch.randn(2, TOKENS, 36, dtype=FP64, requires_grad=True)
    cosine, sine = reference.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    behind = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    mask = torch.zeros(TOKENS, TOKENS, dtype=FP64).masked_fill((behind < 0) | (behind >= 4), float("-inf"))
    expected = theirs(hidden, position_embeddings=(cosine, sine), attention_mask=mask)[0]
    found = ours(hidden, LayerContext("training", RotaryTables(cosine[0, :, :5], sine[0, :, :5])))
    close(found, expected)
    upstream = torch.randn(expected.shape, dtype=FP64)
    (gradient,) = torch.autograd.grad(expected, hidden, upstream)
    close(torch.autograd.grad(found, hidden, upstream)[0], gradient)


@pytest.mark.usefixtures("gemma2_upcasts_lifted")
def test_embedding_scale_and_logit_softcap_of_gemma2() -> None:
    """Gemma 2's layer has norms that no block here has: the layers of both add nothing, the rest must be equal."""
    reference = gemma2(final_logit_softcapping=2.5)
    model = model_of(
        num_layers=1, activation="fast-geglu", openai_gelu=True, layernorm_zero_centered_gamma=True,
        apply_embedding_scaling=True, logits_soft_cap=2.5,
    )  # fmt: skip
    layer = reference.model.layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    for parameter in model.decoder.layers.parameters():
        parameter.data.zero_()
    mine = dict(model.named_parameters())

    def names(of: str) -> dict[str, Tensor]:
        table, norm = reference.model.embed_tokens.weight, reference.model.norm.weight
        ours = {"token_embedding.weight": getattr(table, of), "decoder.final_norm.weight": getattr(norm, of)}
        if of == "data":
            ours |= {name: parameter.data for name, parameter in mine.items() if name.startswith("decoder.layers")}
        return ours

    compare(model, reference, names)
