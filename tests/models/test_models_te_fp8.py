"""Linear layers through a fake of TransformerEngine: what is called, delayed scales, ranks, and exact resume."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import fake_transformer_engine as fake
import pytest
import torch
from fork_server import ForkServer
from parallel_models import batch_of, build
from safetensors.torch import load_file
from tiers import extra
from tiny_run import assert_resume_is_exact, tiny_config

from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.reference import reference_backend
from stoker.kernels.fp8.delayed_scaling import LINEAR, DelayedScaling
from stoker.kernels.fp8.linear import fp8_linear
from stoker.kernels.fp8.recipe import Fp8Recipe
from stoker.kernels.fp8.te_attention import ATTENTION, TEFp8Attention
from stoker.kernels.fp8.te_linear import te_cast_weight, te_linear
from stoker.models.fp8 import build_delayed_scaling, cast_fp8_weights, fp8_modules
from stoker.models.parallel.fp8 import TEProduct
from stoker.trainer.train import run_training

CPU = torch.device("cpu")
TE: dict[str, Any] = {
    "fp8": True, "transformer_engine": True, "hidden_size": 64, "ffn_hidden_size": 64, "bias": False,
    "init_method_std": 0.1, "activation": "swiglu", "num_query_groups": 2, "normalization": "rmsnorm",
}  # fmt: skip
RUN: dict[str, Any] = {
    "model__fp8": True, "model__transformer_engine": True, "model__hidden_dropout": 0.0,
    "model__attention_dropout": 0.0,
}  # fmt: skip
FP8_ATTENTION = {"fp8_dot_product_attention": True}
ATTENTION_RUN: dict[str, Any] = {"model__fp8_dot_product_attention": True}
LORA = {"peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 4, "target_modules": ["all"]}}}
FULL = {
    "activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}  # fmt: skip


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.quantizers.clear()
    fake.install(monkeypatch.setattr, monkeypatch.setitem)


def test_nothing_of_transformer_engine_is_imported_without_it() -> None:
    build(TE | {"transformer_engine": None})
    assert "transformer_engine" not in sys.modules


@pytest.mark.parametrize("changes", [{}, {"wgrad": False}, {"backward": "e4m3", "margin": 2}])
@pytest.mark.parametrize("kept", [False, True])
def test_tensorwise_layers_are_those_of_own_kernels(te: None, changes: dict[str, Any], kept: bool) -> None:
    """23 tokens, which are padded; both round the quotients of the values and the same scale."""
    recipe, generator = Fp8Recipe(**changes), torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((1, 23, 32), (48, 32), (48,)))
    upstream = torch.randn(1, 23, 48, generator=generator)

    def run(linear: Any, **options: Any) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, w, b)]
        output = linear(*leaves, recipe, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    cast = te_cast_weight(w, recipe, None, None) if kept else None
    for found, wanted in zip(run(te_linear, cast=cast), run(fp8_linear), strict=True):
        assert found.shape == wanted.shape
        # a quotient may round to the other side of the middle between two fp8 numbers
        assert float((found - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize(("operand", "frozen"), [(0, "input"), (1, "weight")])
def test_a_frozen_operand_has_no_gradient(te: None, operand: int, frozen: str) -> None:
    tensors = [torch.randn(16, 32), torch.randn(48, 32)]
    tensors[1 - operand].requires_grad_()
    te_linear(tensors[0], tensors[1], None, Fp8Recipe()).sum().backward()
    assert tensors[operand].grad is None
    assert tensors[1 - operand].grad is not None


def test_blocks_of_weights_and_tiles_of_the_rest(te: None) -> None:
    tensors = [torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)]
    te_linear(tensors[0], tensors[1], None, Fp8Recipe(scaling="blockwise")).sum().backward()
    assert [each.options["block_scaling_dim"] for each in fake.quantizers] == [1, 2, 1, 2]
    assert [each.dtype for each in fake.quantizers] == ["kFloat8E4M3", "kFloat8E4M3", "kFloat8E5M2", "kFloat8E4M3"]
    assert [each.columnwise for each in fake.quantizers] == [True, False, True, True]


def states(amaxes: list[float], **changes: Any) -> list[float]:
    """Return the scale of an input after each step, of which these are the amaxes."""
    state = DelayedScaling({"a": LINEAR}, Fp8Recipe(scaling="delayed", **changes), CPU)
    found: list[float] = []
    for step, amax in enumerate(amaxes):
        state.scales("a").amax[0] = max(float(state.scales("a").amax[0]), amax)
        state.update(step)
        found.append(float(state.scale[0]))
    return found


def test_scales_follow_from_the_amaxes_of_former_steps() -> None:
    assert states([4, 1, 2, 0.5]) == [112, 112, 112, 112]
    assert states([4, 1, 2, 0.5], amax_history_len=2) == [112, 112, 224, 224]
    assert states([4, 1, 2, 0.5], amax_history_len=1) == [112, 448, 224, 896]
    assert states([4, 1, 2, 0.5], amax_compute_algo="most_recent") == [112, 448, 224, 896]
    assert states([4, 1, 2, 0.5], interval=2, amax_history_len=1) == [1, 112, 112, 224]
    assert states([4], margin=2) == [28]
    assert states([4, float("inf"), 0], amax_history_len=1) == [112, 112, 112], "nothing follows from a skipped step"


def test_delayed_scaling_is_updated_once_a_step_and_not_by_recompute(te: None) -> None:
    """Micro batches and a repeated forward pass use the scales of the step, and their amaxes count once."""
    plain, repeated = build(TE), build(TE | FULL)
    found = []
    for model in (plain, repeated):
        state = build_delayed_scaling(model, CPU)
        assert state is not None
        for step in range(2):
            for seed in (1, 2):
                model.batch_loss(batch_of("gpt", seed), 27.0).backward()
            assert bool((state.history[0] > 0).all())
            state.update(step)
        assert bool((state.history[0] == 0).all())
        assert bool((state.history[-2:] > 0).all())
        assert not bool(state.history[:-2].any())
        found.append([state.scale, *(each.grad for each in model.parameters())])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_a_compiled_layer_gives_it_the_inputs_themselves(te: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own kernels would cast what the norm is computed from."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for changes in ({}, {"compile": True}):
        model = build(TE | {"fp8_recipe": "tensorwise", "num_layers": 1} | changes)
        model.batch_loss(batch_of("gpt"), 27.0).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("changes", [{}, LORA])
def test_weights_are_cast_with_the_scales_of_the_step(te: None, changes: dict[str, Any]) -> None:
    """Frozen ones too: their scale is 1 until the first update, which leaves few bits of small weights."""
    model = build(TE | {"init_method_std": 0.01} | changes)
    state = build_delayed_scaling(model, CPU)
    assert state is not None
    layers: list[Any] = list(fp8_modules(model).values())
    assert len(layers) == len(state.tensors()) // 2 == 2 * 4
    casts = []
    for step in range(2):
        cast_fp8_weights(layers)
        casts.append(layers[0].fp8.te_cast.values.clone())
        model.batch_loss(batch_of("gpt"), 27.0).backward()
        state.update(step)
    weight = layers[0].weight.detach()
    coarse, fine = (float((each - weight).norm() / weight.norm()) for each in casts)
    assert fine < 0.04 < coarse


def test_experts_and_recipes_without_it_multiply_by_own_kernels(te: None) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2}
    layers: dict[str, Any] = fp8_modules(build(TE | experts))
    kinds = {name: type(layer.fp8) for name, layer in layers.items() if not name.endswith("experts")}
    assert set(kinds.values()) == {TEProduct}
    own = [layer.fp8[0] for name, layer in layers.items() if name.endswith("experts")]
    assert {product.recipe.scaling for product in own} == {"tensorwise"}
    rowwise: Any = fp8_modules(build(TE | {"fp8_recipe": "rowwise"})).values()
    assert not any(isinstance(layer.fp8, TEProduct) for layer in rowwise)


@pytest.mark.parametrize("changes", [{}, {"backward": "e4m3", "margin": 1}], ids=str)
@pytest.mark.parametrize(("causal", "groups", "keys"), [(True, 2, 24), (False, 4, 40)])
def test_attention_casts_six_tensors(te: None, changes: dict[str, Any], causal: bool, groups: int, keys: int) -> None:
    """With scales of 1 gradients underflow, first that of the output, so that those within follow steps later."""
    recipe = Fp8Recipe(scaling="delayed", amax_history_len=2, **changes)
    state = DelayedScaling({"a": ATTENTION}, recipe, CPU)
    attention = TEFp8Attention(recipe, scales=state.scales("a"))
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 24, 4, 16), (2, keys, groups, 16), (2, keys, groups, 16)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    upstream = 1e-6 * torch.randn(shapes[0], generator=generator, dtype=torch.float64)

    def run(function: Any) -> list[torch.Tensor]:
        q, k, v = leaves
        output = function(AttentionInputs(q, k, v, causal=causal, softmax_scale=0.3))
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    exact, errors = run(reference_backend), []
    for step in range(5):
        results = run(attention)
        assert step or not any(gradient.any() for gradient in results[1:])
        pairs = zip(results, exact, strict=True)
        errors.append([float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs])
        state.update(step)
    amax = state.history[-1].clone()
    assert errors[0][0] < 0.1
    # a rounding to e4m3 is 0.026 off (root mean square), to e5m2 0.05, and up to six of them follow each other
    assert max(errors[-1]) < (0.1 if recipe.backward == "e4m3" else 0.16)
    assert amax[0] == pytest.approx(max(float(each.detach().abs().max()) for each in leaves))
    assert amax[1] <= 1
    assert amax[3] == pytest.approx(float(upstream.abs().max()))
    assert amax[5] == pytest.approx(max(float(each.abs().max()) for each in exact[1:]), rel=0.1)
    limits = torch.tensor([448.0] * 3 + [57344.0 if recipe.backward == "e5m2" else 448.0] * 3) / 2**recipe.margin
    assert torch.allclose(state.scale, limits / amax, rtol=0.1)
    run(attention)
    q, k, v = ((each.detach() / 2).requires_grad_() for each in leaves)
    after = state.history[0].clone()
    attention(AttentionInputs(q, k, v, causal=causal, softmax_scale=0.3)).backward(upstream / 2)
    assert torch.equal(state.history[0], after), "the largest of all micro batches"


@pytest.mark.parametrize(
    ("options", "says"), [({"dropout_p": 0.1}, "`dropout_p` must not"), ({"causal": True}, "as many keys")]
)
def test_attention_in_fp8_has_no_options(options: dict[str, Any], says: str) -> None:
    q, k, v = (torch.zeros(1, length, 2, 16) for length in (16, 32, 32))
    attention = TEFp8Attention(Fp8Recipe(scaling="delayed"))
    with pytest.raises(ValueError, match=says):
        attention(AttentionInputs(q, k, v, **options))
    with pytest.raises(RuntimeError, match="no state"):
        attention(AttentionInputs(q, k, v))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_attention_of_training_is_in_fp8(te: None, recipe: str) -> None:
    """But for first and last layers; validation is not. The state is named after the attention."""
    ends = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0, "num_layers": 3}
    model = build(TE | FP8_ATTENTION | ends | {"fp8_recipe": recipe})
    layers: list[Any] = [layer.attention for layer in model.decoder.layers]
    assert [type(each.backends["training"]) is TEFp8Attention for each in layers] == [False, True, True]
    assert layers[1].backends["training"] is not layers[2].backends["training"]
    assert not any(isinstance(each.backends["evaluation"], TEFp8Attention) for each in layers)
    state = build_delayed_scaling(model, CPU)
    assert state is not None
    found = {name: tensor.shape for name, tensor in state.tensors().items() if name.endswith("attention.scale")}
    assert found == dict.fromkeys(("decoder.layers.1.attention.scale", "decoder.layers.2.attention.scale"), (6,))
    assert len(state.tensors()) == 2 * (2 + (2 * 4 if recipe == "delayed" else 0))


TP_CASES: list[tuple[Any, ...]] = [
    (TE, True),
    (TE | FP8_ATTENTION, False),
    (TE | {"fp8_recipe": "tensorwise", "bias": True}, False),
    *extra((TE | {"bias": True}, False), (TE | {"fp8_recipe": "tensorwise"} | LORA, True)),
]


def test_tensor_parallel_ranks_together_are_one_process(forks: ForkServer, tmp_path: Path) -> None:
    """Gathered and whole inputs, and biases."""
    found = forks.call("fake_transformer_engine", "compare", str(tmp_path), 2, TP_CASES)
    for case, differences in zip(TP_CASES, found, strict=True):
        exact = {name: value for name, value in differences.items() if name != "parts"}
        assert all(value < 1e-12 for value in exact.values()), (case, differences)


@pytest.mark.parametrize(
    "changes",
    [{}, ATTENTION_RUN, ATTENTION_RUN | {"model__fp8_recipe": "tensorwise"}],
    ids=["linear", "all", "attention"],
)
def test_train_2n_equals_train_n_resume_train_n(te: None, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Scales and amaxes are in the checkpoint, in safetensors."""
    settings = RUN | changes
    whole, halves = assert_resume_is_exact(tmp_path, 4, **settings)
    plain = tmp_path / "plain"
    saved = [load_file(each / "checkpoints" / "step-4" / "scales.safetensors") for each in (whole, halves)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(each, saved[1][name]) for name, each in saved[0].items())
    owners = {"decoder.layers.0.attention"} if changes else set[str]()
    if "model__fp8_recipe" not in changes:
        owners |= {f"decoder.layers.0.{name}" for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")}
    assert set(saved[0]) == {f"{name}.{kind}" for name in owners for kind in ("scale", "amax_history")}
    assert any(float((each != 1).sum()) for name, each in saved[0].items() if name.endswith(".scale"))
    run_training(tiny_config(plain, trainer__max_steps=2, **{**RUN, "model__fp8": False}))
    run_training(tiny_config(plain, trainer__max_steps=4, **settings))
    assert "holds no scales of delayed scaling; they start from 1" in (plain / "run.log").read_text()
