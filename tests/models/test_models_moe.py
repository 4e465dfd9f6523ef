"""The layer with experts: its losses reach the gradients once, and what is counted is counted once and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_builder import build_gpt
from tiers import extra
from torch import Tensor

from stoker.kernels.moe.routing import RoutingResult
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice
from stoker.models.config.gpt import GPTKeys
from stoker.models.gpt import GPT
from stoker.models.layers.compiling import configure_dynamo
from stoker.models.layers.dropout import DropoutMask, LayerDropout
from stoker.models.layers.norm import BaseNorm, BranchInput
from stoker.models.memory import recompute
from stoker.models.moe import router as router_module
from stoker.models.moe.experts import Experts
from stoker.models.moe.moe_layer import MoE, find_moe_layers
from stoker.models.moe.router import STATISTIC_NAMES, Routing
from stoker.models.recompute.analysis import modules_with_rng

EXPERTS, TOKENS, VOCAB = 4, 16, 100
STACK: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
}


def gpt(dtype: torch.dtype = torch.float64, **changes: Any) -> GPT:
    keys = GPTKeys.model_validate(STACK | {"encoder_seq_length": TOKENS} | changes)
    return build_gpt(keys, vocab_size=VOCAB, dtype=dtype)


def texts(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


def train(model: GPT, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss = model.loss(texts(seed), texts(seed + 1), 32.0)
    loss.backward()
    return loss.detach()


def gradients(model: GPT) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def sums_of(layer: MoE) -> dict[str, float]:
    return dict(zip(STATISTIC_NAMES, layer.statistics[EXPERTS:].tolist(), strict=True))


@pytest.mark.parametrize("compiled", [False, *extra(True)])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_losses_added_up(
    monkeypatch: pytest.MonkeyPatch, recompute: bool, compiled: bool
) -> None:
    """The loss that is told is the model's own; the gradient is that of all three, each with its coefficient."""
    keys: dict[str, Any] = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
    ours = gpt(**keys, moe_layer_recompute=recompute, compile=compiled)
    added: list[Tensor] = []
    plain = gpt(**keys)
    for model in (ours, plain):
        for layer in find_moe_layers(model).values():
            layer.loss_share.fill_(0.25)
    told = train(ours)
    monkeypatch.setattr(
        router_module, "attach_auxiliary_loss", lambda tensor, loss, share: added.append(loss * share) or tensor
    )
    loss = plain.loss(texts(0), texts(1), 32.0)
    (loss + torch.stack(added).sum()).backward()
    assert len(added) == 4  # two losses of two layers
    torch.testing.assert_close(told, loss.detach(), rtol=1e-12, atol=0)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(ours)[name], expected, rtol=1e-9, atol=1e-12, msg=name)
    without = gpt()
    train(without)
    name = "decoder.layers.0.mlp.router.weight"
    assert (gradients(ours)[name] - gradients(without)[name]).abs().max() > 1e-3


@pytest.mark.parametrize(("compiled", "forced"), [(False, False), (False, True), *extra((True, False), (True, True))])
def test_recompute_draws_the_same_noise_and_counts_once(compiled: bool, forced: bool) -> None:
    noisy = {
        "moe_router_force_load_balancing": forced,
        "moe_input_jitter_eps": 0.3, "moe_dropout": 0.2, "moe_z_loss_coeff": 0.1, "moe_aux_loss_coeff": 0.1,
        "moe_expert_capacity_factor": 0.8, "compile": compiled,
    }  # fmt: skip
    models = [gpt(**noisy, moe_layer_recompute=recompute) for recompute in (False, True)]
    losses = [train(model) for model in models]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    once, twice = map(gradients, models)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    for first, second in zip(*(find_moe_layers(model).values() for model in models), strict=True):
        assert torch.equal(first.statistics, second.statistics)
        assert sums_of(second)["calls"] == 1
        assert sums_of(second)["assignments"] == 2 * 2 * TOKENS
        assert sums_of(second)["dropped"] > 0


def test_recompute_of_experts_does_not_ask_for_the_state_of_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot hold it."""
    asked: list[bool] = []
    run = recompute.checkpoint
    monkeypatch.setattr(
        recompute,
        "checkpoint",
        lambda *given, **how: asked.append(how["preserve_rng_state"]) or run(*given, **how),
    )
    noises: list[dict[str, Any]] = [{}, {"moe_input_jitter_eps": 0.1}, {"moe_dropout": 0.1}]
    noises += [{"moe_shared_expert_intermediate_size": 8, "ffn_dropout": 0.1}, {"ffn_dropout": 0.1}]
    for noise in noises:
        train(gpt(num_layers=1, moe_layer_recompute=True, **noise))
    assert asked == [False] * 5


@pytest.mark.parametrize(
    ("keys", "together"),
    [
        ({}, True),
        ({"transformer_block_type": "normformer"}, True),
        ({"transformer_block_type": "parallel_ln"}, True),
        ({"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform"}, True),
        ({"transformer_block_type": "post_ln"}, False),
        ({"hidden_dropout": 0.2}, False),
        ({"moe_shared_expert_intermediate_size": 8}, False),
        ({"moe_layer_recompute": True}, False),
    ],
)
def test_the_experts_add_to_the_stream_where_nothing_is_between(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], together: bool
) -> None:
    """And a step is the same as where the layer adds what they give."""
    added: list[bool] = []
    to_stream, run = Experts.add_to_residual, MoE.run_experts
    monkeypatch.setattr(Experts, "add_to_residual", lambda self, *given: added.append(True) or to_stream(self, *given))
    ours = gpt(normalization="rmsnorm", **keys)
    told = train(ours)
    assert bool(added) == together
    apart = gpt(normalization="rmsnorm", **keys)

    def runs_apart(
        self: MoE, hidden: Tensor, routing: Routing, residual: Tensor | None, dropout: LayerDropout | None
    ) -> Tensor:
        output = run(self, hidden, routing, None, dropout)
        return output if residual is None else residual + output

    monkeypatch.setattr(MoE, "run_experts", runs_apart)
    torch.testing.assert_close(told, train(apart), rtol=1e-12, atol=0.0)
    expected = gradients(apart)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("keys", "autocast", "forked"),
    [
        ({}, False, ["attention", "mlp, twice"]),
        ({}, True, ["attention"]),
        ({"moe_layer_recompute": True}, False, ["attention", "mlp"]),
        ({"transformer_block_type": "normformer"}, False, ["attention"]),
        ({"transformer_block_type": "parallel_ln"}, False, ["attention"]),
        ({"transformer_block_type": "parallel_ln", "normalization": "layernorm"}, False, []),
        ({"normalization": "layernorm"}, False, ["attention", "mlp, twice"]),
        ({"transformer_block_type": "post_ln"}, False, []),
        ({"activations_checkpoint_modules": ["norm"]}, False, ["mlp, twice"]),
    ],
)
def test_norms_fork_where_the_stream_is_kept_anyway(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], autocast: bool, forked: list[str]
) -> None:
    model = gpt(torch.float32, num_layers=1, **{"normalization": "rmsnorm", **keys})
    (layer,) = model.decoder.layers
    names = {id(layer.attention_norm): "attention", id(layer.mlp_norm): "mlp"}
    seen: list[str] = []
    fork = BaseNorm.forward_with_residual

    def noted(self: BaseNorm, stream: Tensor, twice: bool, bias: Tensor | None) -> BranchInput:
        assert bias is None  # in eager mode
        seen.append(names[id(self)] + ", twice" * twice)
        return fork(self, stream, twice, bias)

    monkeypatch.setattr(BaseNorm, "forward_with_residual", noted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.loss(texts(), texts(1), 32.0)
    assert seen == forked


def test_recompute_runs_the_experts_again_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    run = MoE.run_experts
    monkeypatch.setattr(MoE, "run_experts", lambda *given: runs.append(True) or run(*given))
    model = gpt(moe_layer_recompute=True)
    train(model)
    assert len(runs) == 4
    model.eval()
    model(texts())
    assert len(runs) == 6


def test_noise_and_counts_belong_to_training() -> None:
    model = gpt(moe_input_jitter_eps=0.5, moe_dropout=0.5, moe_router_enable_expert_bias=True)
    model.eval()
    assert torch.equal(model(texts()), model(texts()))
    for layer in find_moe_layers(model).values():
        assert not layer.statistics.any()
        assert layer.step_counts is not None
        assert not layer.step_counts.any()
    model.train()
    train(model)
    for layer in find_moe_layers(model).values():
        assert layer.step_counts is not None
        assert torch.equal(layer.step_counts, layer.statistics[:EXPERTS])
        assert layer.statistics[:EXPERTS].sum() == 2 * 2 * TOKENS
    with torch.no_grad():
        assert not torch.equal(model(texts()), model(texts()))


@pytest.mark.parametrize("keys", [{}, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}])
def test_forced_load_balancing_is_random_in_value_and_straight_through_in_gradient(keys: dict[str, Any]) -> None:
    router = find_moe_layers(gpt(moe_router_force_load_balancing=True, **keys))["decoder.layers.0.mlp"].router
    count, share = 4096, torch.ones(())
    tokens = torch.ones(count, 32, dtype=torch.float64)  # all alike: the router itself would choose two experts only
    noise = DropoutMask(torch.tensor([3, 4]), torch.arange(count))
    routed = router(tokens, None, share, noise=noise)
    experts, gates = routed.assignment
    shares = routed.statistics[:EXPERTS] / (2 * count / EXPERTS)
    assert ((shares - 1).abs() < 0.05).all()
    logits = noise.noise(EXPERTS, torch.float64).requires_grad_()
    chosen = logits.topk(2).values
    expected = chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True) if keys else chosen.softmax(-1)
    torch.testing.assert_close(gates, expected, rtol=1e-12, atol=0)
    weights = torch.randn_like(gates)
    (gates * weights).sum().backward()
    (expected * weights).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(router.weight.grad, logits.grad.T @ tokens, rtol=1e-9, atol=1e-12)
    other = router(tokens, None, share, noise=noise._replace(key=torch.tensor([5, 4])))  # of another micro batch
    assert not torch.equal(other.assignment.experts, experts)
    router.eval()
    assert len(router(tokens, None, share).assignment.experts.unique()) == 2


def test_neither_jitter_nor_dropout_of_experts_draws_from_the_generator() -> None:
    """Which is what decides whether a layer may be compiled with a torch whose compiled random numbers are wrong."""
    for noise in ({}, {"moe_input_jitter_eps": 0.1}, {"moe_router_force_load_balancing": True}, {"moe_dropout": 0.1}):
        keys = GPTKeys.model_validate(STACK | {"attention_dropout": 0.0} | noise)
        family = family_slice(keys, vocab_size=10, batch_spec=BatchSpec(seq_length=8))
        assert modules_with_rng(family, {}) == (frozenset(),)


def test_casts_keep_counts_wide_and_the_bias() -> None:
    model = gpt(torch.bfloat16, moe_router_enable_expert_bias=True)
    layer = find_moe_layers(model)["decoder.layers.1.mlp"]
    assert layer.expert_bias is not None
    assert not layer.expert_bias.any()
    layer.expert_bias.copy_(torch.tensor([0.001, 1.001, 2.001, 3.001]))
    kept = layer.expert_bias.clone()
    model.to(torch.float32)
    layer.to(torch.bfloat16)
    assert torch.equal(layer.expert_bias, kept)
    assert {layer.statistics.dtype, layer.loss_share.dtype, layer.expert_bias.dtype} == {torch.float32}
    assert layer.loss_share == 1.0
    saved = [name for name in model.state_dict() if "mlp" in name and name not in dict(model.named_parameters())]
    assert saved == [f"decoder.layers.{n}.mlp.expert_bias" for n in range(2)]


def test_the_expert_bias_moves_the_choice_and_no_gate() -> None:
    model = gpt(moe_router_enable_expert_bias=True, moe_router_topk=1, moe_router_pre_softmax=True)
    router = find_moe_layers(model)["decoder.layers.0.mlp"].router
    tokens, share = torch.randn(9, 32, dtype=torch.float64), torch.ones(())
    bias = torch.tensor([0.0, 0.0, 100.0, 0.0])
    free, pushed = router(tokens, torch.zeros(4), share), router(tokens, bias, share)
    assert set(pushed.assignment.experts.flatten().tolist()) == {2}
    assert len(set(free.assignment.experts.flatten().tolist())) > 1
    probabilities = (tokens @ router.weight.T).softmax(dim=1)
    torch.testing.assert_close(pushed.assignment.gates[:, 0], probabilities[:, 2])


def test_a_token_above_capacity_gets_nothing_but_the_shared_expert() -> None:
    model = gpt(
        moe_expert_capacity_factor=0.5, moe_token_drop_policy="position", moe_shared_expert_intermediate_size=24
    )
    layer = find_moe_layers(model)["decoder.layers.0.mlp"]
    hidden = torch.randn(1, 1, 32, dtype=torch.float64).expand(2, 6, 32)  # all tokens go to the same two experts
    assert layer.shared is not None
    alone = layer(hidden) - layer.shared(hidden)
    kept = alone.flatten(0, 1).abs().sum(dim=1) > 1e-9
    assert kept.tolist() == [True] * 3 + [False] * 9  # ceil(12 * 2 / 4 * 0.5) = 3 of 12
    assert sums_of(layer)["dropped"] == 2 * 9


def test_layers_without_experts_stay_dense_and_names_tell_which() -> None:
    model = gpt(num_layers=4, moe_layer_freq=[0, 1, 0, 1])
    assert list(find_moe_layers(model)) == ["decoder.layers.1.mlp", "decoder.layers.3.mlp"]
    names = {name for name, _ in model.named_parameters()}
    assert {"decoder.layers.0.mlp.up.weight", "decoder.layers.1.mlp.experts.up"} < names


def test_initial_weights_of_experts() -> None:
    """Those of an MLP: biases 0, the output narrower by the root of twice the layers, every expert its own."""
    model = gpt(torch.float32, hidden_size=64, ffn_hidden_size=256, init_method_std=0.02)
    layer = find_moe_layers(model)["decoder.layers.1.mlp"]
    up, down = layer.experts.up, layer.experts.down
    assert up.std().item() == pytest.approx(0.02, rel=0.05)
    assert down.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert layer.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert layer.experts.up_bias is not None
    assert not layer.experts.up_bias.any()
    assert not torch.equal(up[0], up[1])


def test_router_arithmetic_is_wide_in_a_narrow_model() -> None:
    model = gpt(torch.bfloat16)
    layer = find_moe_layers(model)["decoder.layers.0.mlp"]
    tokens = torch.randn(32, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        choice: RoutingResult = layer.router(tokens, None, torch.ones(())).assignment
    logits = tokens.float() @ layer.router.weight.float().T
    expected = logits.topk(2, dim=1)
    assert choice.gates.dtype == torch.float32
    assert torch.equal(choice.experts, expected.indices)
    torch.testing.assert_close(choice.gates, expected.values.softmax(dim=1))


def test_a_router_compiled_under_autocast_keeps_its_gradient_wide() -> None:
    configure_dynamo()
    router = find_moe_layers(gpt(torch.float32))["decoder.layers.0.mlp"].router
    tokens = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    found = []
    # a graph of the whole region, as inductor makes it, but run by plain operations
    for forward in (router, torch.compile(router, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            gates = forward(tokens, None, torch.ones(())).assignment.gates
        (gradient,) = torch.autograd.grad(gates[:, 0].sum(), router.weight)
        found.append(gradient)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
