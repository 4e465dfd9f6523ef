"""Norms, rotary embedding, activations and the MLP against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from stoker.kernels.activations import NONLINEARITIES
from stoker.kernels.rope import apply_rotary, rotary_table
from stoker.models.config.dense_stack import Activation, mlp_slice
from stoker.models.config.gpt import GPTKeys
from stoker.models.layers.dropout import StackDropout
from stoker.models.layers.mlp import MLP
from stoker.models.layers.norm import LayerNorm, RMSNorm
from stoker.models.layers.position_embeddings import RotaryEmbedding


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (lambda x: x * phi(x), False),
    "approx-gelu": (lambda x: x / (1 + torch.exp(-1.702 * x)), False),
    "relu": (lambda x: x.clamp(min=0), False),
    "squared-relu": (lambda x: x.clamp(min=0) ** 2, False),
    "geglu": (lambda x: x * phi(x), True),
    "swiglu": (lambda x: x / (1 + torch.exp(-x)), True),
    "reglu": (lambda x: x.clamp(min=0), True),
    "fast-geglu": (lambda x: x * phi(x), True),
    "fast-swiglu": (lambda x: x / (1 + torch.exp(-x)), True),
    "fast-reglu": (lambda x: x.clamp(min=0), True),
}


def assert_mlp(keys: GPTKeys, formula: Callable[[Tensor], Tensor], gated: bool) -> None:
    part = mlp_slice(keys)
    mlp = MLP(
        6, part.ffn_hidden_size, nonlinearity=part.nonlinearity, gated=part.gated, bias=part.bias, dropout=part.dropout
    ).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    projected = x @ mlp.up.weight.t() + mlp.up.bias
    assert projected.shape[-1] == (22 if gated else 11)
    inner = formula(projected[..., :11]) * projected[..., 11:] if gated else formula(projected)
    assert torch.allclose(mlp(x), inner @ mlp.down.weight.t() + mlp.down.bias, rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", FORMULAS)
def test_activation(activation: str) -> None:
    formula, gated = FORMULAS[activation]
    assert_mlp(GPTKeys.model_validate({"activation": activation, "ffn_hidden_size": 11}), formula, gated)


@pytest.mark.parametrize("activation", ["gelu", "geglu", "fast-geglu"])
def test_openai_gelu(activation: str) -> None:
    keys = GPTKeys.model_validate({"activation": activation, "ffn_hidden_size": 11, "openai_gelu": True})
    assert_mlp(keys, tanh_gelu, activation != "gelu")


def test_every_activation_has_a_formula() -> None:
    assert set(FORMULAS) == set(get_args(Activation))
    assert {mlp_slice(GPTKeys.model_validate({"activation": a})).nonlinearity for a in FORMULAS} <= set(NONLINEARITIES)


def test_ffn_dropout_acts_in_training_only() -> None:
    mlp = MLP(4, 4000, nonlinearity="relu", gated=False, bias=False, dropout=0.5)
    with torch.no_grad():
        mlp.up.weight.fill_(1.0)
        mlp.down.weight.fill_(1.0)
    x = torch.ones(1, 1, 4)
    assert (mlp.eval()(x) == 16000).all()
    tokens = torch.arange(1)
    dropped = mlp.train()(x, dropout=StackDropout.draw(1, tokens).of_layer(0, tokens))
    assert (dropped != 16000).all()
    assert (dropped - 16000).abs().max() < 2000
    with pytest.raises(ValueError, match="`dropout` \\(None\\) must be given"):
        mlp(x)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm(kind: str, zero_centered: bool) -> None:
    norm = (LayerNorm if kind == "layernorm" else RMSNorm)(7, 1e-2, zero_centered=zero_centered).double()
    x = torch.randn(3, 7, dtype=torch.float64) * 3 + 1
    centre = x.mean(-1, keepdim=True) if kind == "layernorm" else torch.zeros(3, 1, dtype=torch.float64)
    normed = (x - centre) / ((x - centre).square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert torch.allclose(norm(x), normed, atol=1e-13)  # starts with a gain of one
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(7))
    gain = norm.weight + 1 if zero_centered else norm.weight
    bias = norm.bias if isinstance(norm, LayerNorm) else 0.0
    assert torch.allclose(norm(x), normed * gain + bias, atol=1e-13)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norm_in_bf16_rounds_once(kind: type[LayerNorm] | type[RMSNorm], zero_centered: bool) -> None:
    norm = kind(64, 1e-5, zero_centered=zero_centered)
    with torch.no_grad():
        norm.weight.uniform_(-0.004, 0.004)  # 1 + weight needs more bits than bf16 has
    norm = norm.bfloat16()
    x = torch.randn(50, 64).bfloat16()
    exact = kind(64, 1e-5, zero_centered=zero_centered)
    exact.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
    assert norm(x).dtype == torch.bfloat16
    expected = exact(x.float()).bfloat16()
    assert (norm(x) == expected).float().mean() > 0.99  # another order of sums may tip a tie
    assert torch.allclose(norm(x), expected, rtol=2**-7, atol=1e-4)


def turned(head: Tensor, position: float, *, base: float, dim: int, interleaved: bool) -> Tensor:
    """Complex multiplication by exp(i * angle), channel pair by channel pair."""
    out = head.clone()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        z = torch.complex(head[a], head[b]) * torch.exp(torch.tensor(1j * position * base ** (-2 * i / dim)))
        out[a], out[b] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "factor", "base"), [(8, 1.0, 10000.0), (4, 1.0, 100.0), (8, 2.5, 10000.0)])
def test_rotary(interleaved: bool, dim: int, factor: float, base: float) -> None:
    heads = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cosine, sine = rotary_table(5, dim, base=base, position_scale=1 / factor, dtype=torch.float64)
    ours = apply_rotary(heads, cosine, sine, interleaved=interleaved)
    for b, p, h in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(3)).tolist():
        expected = turned(heads[b, p, h], p / factor, base=base, dim=dim, interleaved=interleaved)
        assert torch.allclose(ours[b, p, h], expected, atol=1e-6)
    assert torch.equal(ours[..., dim:], heads[..., dim:])


def test_rotary_of_bf16_turns_in_fp32() -> None:
    heads = torch.randn(1, 300, 1, 8).bfloat16()
    table = rotary_table(300, 8)
    ours = apply_rotary(heads, *table)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, apply_rotary(heads.float(), *table).bfloat16())


MOVES: dict[str, Callable[[RotaryEmbedding], RotaryEmbedding]] = {
    "bf16": lambda module: module.bfloat16(),
    "there_and_back": lambda module: module.half().float(),
    "meta": lambda module: module.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("move", MOVES)
def test_rotary_table_survives_casts_and_the_meta_device(move: str) -> None:
    plain = RotaryEmbedding(8, 300, base=10000.0, position_scale=1.0)
    moved = MOVES[move](RotaryEmbedding(8, 300, base=10000.0, position_scale=1.0))
    assert moved.cosine.dtype == torch.float32
    assert torch.equal(moved.cosine, plain.cosine)
    assert torch.equal(moved.sine, plain.sine)
    assert not moved.state_dict()
    assert plain.double()(7)[0].dtype == torch.float64
    assert torch.allclose(plain(7)[0][6, 1], torch.cos(torch.tensor(6 * 0.1, dtype=torch.float64)), atol=1e-15)
