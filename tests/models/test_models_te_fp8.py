"""Linear layers through a fake of TransformerEngine: what is called, delayed scales, ranks, and exact resume."""

from __future__ import annotations

import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import fake_transformer_engine as fake
import pytest
import torch
from fork_server import ForkServer
from parallel_models import batch_of, build
from safetensors.torch import load_file
from tiers import extra
from tiny_run import final_hashes, tiny_config

from stoker.kernels.fp8.delayed_scaling import LINEAR, DelayedScaling
from stoker.kernels.fp8.linear import fp8_linear
from stoker.kernels.fp8.recipe import Fp8Recipe
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
    compile_module: Any = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_module, backend="aot_eager"))
    found = []
    for changes in ({}, {"compile": True}):
        model = build(TE | {"fp8_recipe": "tensorwise"} | changes)
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


TP_CASES: list[tuple[Any, ...]] = [
    (TE, True),
    (TE | {"fp8_recipe": "tensorwise", "bias": True}, False),
    *extra((TE | {"bias": True}, False), (TE | {"fp8_recipe": "tensorwise"} | LORA, True)),
]


def test_tensor_parallel_ranks_together_are_one_process(forks: ForkServer, tmp_path: Path) -> None:
    """Gathered and whole inputs, and biases."""
    found = forks.call("fake_transformer_engine", "compare", str(tmp_path), 2, TP_CASES)
    for case, differences in zip(TP_CASES, found, strict=True):
        exact = {name: value for name, value in differences.items() if name != "parts"}
        assert all(value < 1e-12 for value in exact.values()), (case, differences)


def test_train_2n_equals_train_n_resume_train_n(te: None, tmp_path: Path) -> None:
    """Scales and amaxes are in the checkpoint, in safetensors."""
    whole, halves, plain = (tmp_path / name for name in ("whole", "halves", "plain"))
    run_training(tiny_config(whole, trainer__max_steps=4, **RUN))
    run_training(tiny_config(halves, trainer__max_steps=2, **RUN))
    run_training(tiny_config(halves, trainer__max_steps=4, **RUN))
    assert final_hashes(whole, 4) == final_hashes(halves, 4)
    saved = [load_file(each / "checkpoints" / "step-4" / "scales.safetensors") for each in (whole, halves)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(each, saved[1][name]) for name, each in saved[0].items())
    assert {name.rpartition(".")[2] for name in saved[0]} == {"scale", "amax_history"}
    assert any(float((each != 1).sum()) for name, each in saved[0].items() if name.endswith(".scale"))
    run_training(tiny_config(plain, trainer__max_steps=2, **{**RUN, "model__fp8": False}))
    run_training(tiny_config(plain, trainer__max_steps=4, **RUN))
    assert "holds no scales of delayed scaling; they start from 1" in (plain / "run.log").read_text()
