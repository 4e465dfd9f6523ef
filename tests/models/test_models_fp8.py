"""Models whose linear layers multiply in fp8, emulated in fp64: split over ranks, compiled, recomputed, with LoRA.

In fp64 the values before each cast agree to rounding over all layouts, so the casts do too, except of values within
1e-15 of the middle between two fp8 numbers: whole models agree as without fp8.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import CompiledGraphs
from fork_server import ForkServer
from parallel_models import batch_of, build
from tiers import extra

from stoker.kernels.fp8.operands import dequantize
from stoker.models.fp8 import cast_fp8_weights, fp8_modules, keep_fp8_weights, weights_in_fp8

FP8: dict[str, Any] = {"fp8": True, "hidden_size": 64, "ffn_hidden_size": 64, "bias": False, "init_method_std": 0.1}
LLAMA = FP8 | {"activation": "swiglu", "num_query_groups": 2, "normalization": "rmsnorm"}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
BIASED = FP8 | {"num_query_groups": 2, "bias": True}
T5 = FP8 | {"family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8}
LORA = {"peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 4, "target_modules": ["all"]}}}
RECOMPUTE = {"activations_checkpoint_modules": ["norm", "mlp_activation", "core_attention"]}
FULL = {
    "activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}  # fmt: skip


def passes(changes: dict[str, Any], model: Any = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the loss of a model, and its gradients."""
    model = build(changes) if model is None else model
    model.zero_grad()
    loss = model.batch_loss(batch_of(changes.get("family", "gpt")), 27.0)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def distance(changes: dict[str, Any], others: dict[str, Any]) -> float:
    """Return the largest difference of two models' gradients, relative to the largest norm."""
    (_, mine), (_, theirs) = passes(changes), passes(others)
    scale = max(float(each.norm()) for each in theirs.values())
    return max(float((mine[name] - each).norm()) / scale for name, each in theirs.items())


TP_CASES: list[tuple[Any, ...]] = [
    (LLAMA, True),
    *extra(
        (BIASED, False),
        (LLAMA | EXPERTS, True),
        (BIASED | {"fp8_wgrad": False}, True),
        (LLAMA | FULL, True),
        (T5, True),
        (FP8 | {"family": "bert", "fp8_e4m3": True}, True),
        (LLAMA | LORA, True),
        (LLAMA | LORA, False),
        (LLAMA | {"compile": True}, True),
    ),
]


def test_tensor_parallel_ranks_together_are_one_process(forks: ForkServer, tmp_path: Path) -> None:
    found = forks.call("parallel_models", "compare", str(tmp_path), 2, TP_CASES)
    for case, differences in zip(TP_CASES, found, strict=True):
        exact = {name: value for name, value in differences.items() if name != "parts"}
        assert all(value < 1e-12 for value in exact.values()), (case, differences)


@pytest.mark.parametrize("size", [2])
def test_context_parallel_ranks_together_are_one_process(size: int, forks: ForkServer, tmp_path: Path) -> None:
    cases = [(LLAMA, "", "a2a", 1, 1), *extra((T5, "", "a2a", 1, 1), (LLAMA, "", "p2p", 1, 1))]
    found = forks.call("parallel_context", "compare", str(tmp_path), size, cases)
    assert all(value < 1e-12 for differences in found for value in differences.values()), found


@pytest.mark.parametrize(
    "changes",
    [
        RECOMPUTE,
        FULL,
        *extra({"compile": True}, {"compile": True} | RECOMPUTE, {"compile": True} | FULL, LORA | {"compile": True}),
    ],
)
def test_recomputed_and_compiled_layers_have_the_same_gradients(changes: dict[str, Any]) -> None:
    plain = LLAMA | {name: value for name, value in changes.items() if name == "peft"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        assert distance(LLAMA | changes, plain) < 1e-12


@pytest.mark.parametrize(
    ("changes", "casts"),
    [
        (LLAMA, ["rms_norm", "none", "rms_norm", "gated"]),
        *extra(
            (LLAMA | {"bias": True}, ["rms_norm", "none", "rms_norm", "gated"]),
            (BIASED | {"transformer_block_type": "parallel_ln"}, ["layer_norm", "none", "layer_norm", "activation"]),
            (BIASED, ["layer_norm", "none", "layer_norm", "activation"]),
            (LLAMA | RECOMPUTE, ["rms_norm", "none", "rms_norm", "gated"]),
            (LLAMA | {"fp8_wgrad": False}, ["none"] * 4),
        ),
    ],
)
def test_a_compiled_layer_casts_norms_and_activations_without_writing_them(
    changes: dict[str, Any], casts: list[str]
) -> None:
    graphs = CompiledGraphs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=graphs.backend))
        assert distance(changes | {"compile": True}, changes) < 1e-12
    found = graphs.forwards[0].find_nodes(op="call_function", target=torch.ops.stoker.fp8_cast.default)
    tokens = 2 * 16
    assert [node.args[1] for node in found if node.args[0][0].meta["val"].shape[0] == tokens] == casts


@pytest.mark.parametrize("changes", [{}, EXPERTS])
def test_weights_cast_for_a_step_are_those_cast_for_each_pass(changes: dict[str, Any]) -> None:
    model = build(LLAMA | changes)
    _, wanted = passes(LLAMA, model)
    wanted = {name: each.clone() for name, each in wanted.items()}
    layers: list[Any] = list(fp8_modules(model).values())
    assert len(layers) == (2 * 3 if changes else 2 * 4)
    cast_fp8_weights(layers)
    first = layers[0].fp8.cast.rows.data.data_ptr()
    _, found = passes(LLAMA, model)
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    with torch.no_grad():
        layers[0].weight.mul_(-1)
    _, stale = passes(LLAMA, model)
    cast_fp8_weights(layers)
    _, fresh = passes(LLAMA, model)
    assert layers[0].fp8.cast.rows.data.data_ptr() == first, "compiled code and CUDA graphs read this memory"
    name = next(iter(wanted))
    assert torch.equal(stale[name], wanted[name])
    assert not torch.equal(fresh[name], wanted[name])


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        *product((LORA, {"peft": {"peft_scheme": "ia3"}}, {}), ("tensorwise", "rowwise", "blockwise")),
        (LORA | {"compile": True, "num_layers": 1}, "tensorwise"),
        *extra(*product((LORA | {"compile": True}, {"compile": True}), ("tensorwise", "rowwise", "blockwise"))),
    ],
)
def test_weights_kept_in_fp8_train_as_their_casts(changes: dict[str, Any], recipe: str) -> None:
    changes = LLAMA | changes | {"fp8_recipe": recipe}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        casts, kept = build(changes), build(changes)
        cast_fp8_weights(fp8_modules(casts).values())
        keep_fp8_weights(fp8_modules(kept).values())
        (loss, found), (wanted_loss, wanted) = passes(changes, kept), passes(changes, casts)
        assert torch.equal(loss, wanted_loss)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], each) for name, each in wanted.items())
        weights = weights_in_fp8(kept)
        assert list(weights) == [module.weight for module in fp8_modules(kept).values()]
        for weight in weights:  # an element for all, so that no use of it is unnoticed
            assert weight.untyped_storage().nbytes() == weight.itemsize
            assert weight.isnan().all()
            with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
                weight.copy_(torch.ones_like(weight))
        cast_modules: dict[str, Any] = fp8_modules(casts)
        for name, module in cast_modules.items():  # validation multiplies with the values of the casts
            module.weight.data = dequantize(module.fp8.cast.rows, torch.float64)
            assert module.weight.shape == kept.get_submodule(name).weight.shape
        with torch.no_grad():
            validated = [each.eval().batch_loss(batch_of("gpt"), 27.0) for each in (casts, kept)]
        assert torch.allclose(*validated, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_each_recipe_is_near_and_not_equal(recipe: str) -> None:
    """e5m2 has two bits of mantissa, so that a gradient is off by several percent, as of random signs."""
    assert 1e-3 < distance(LLAMA | {"fp8_recipe": recipe}, LLAMA | {"fp8": False}) < 0.3


def test_layers_at_the_ends_and_models_in_evaluation_multiply_as_before() -> None:
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
    model = build(LLAMA | ends)
    assert {name.split(".")[2] for name in fp8_modules(model)} == {"1"}
    plain = build(LLAMA | {"fp8": False})
    assert {name: each.shape for name, each in model.state_dict().items()} == {
        name: each.shape for name, each in plain.state_dict().items()
    }
    with torch.no_grad():
        losses = [each.eval().batch_loss(batch_of("gpt"), 27.0) for each in (model, plain)]
    assert torch.equal(*losses)


def test_widths_that_are_no_multiples_of_16_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`fp8` \(True\) needs matrices .* `up` is 40 x 64; use model.fp8=false"):
        build(FP8 | {"ffn_hidden_size": 40})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_gradients(value: float) -> None:
    """A cast saturates finite values only, so that the norm of the gradients tells of an overflow."""
    model = build(LLAMA)
    with torch.no_grad():
        model.get_submodule("decoder.layers.1.mlp").down.weight[3, 5] = value
    _, gradients = passes(LLAMA, model)
    assert not torch.isfinite(gradients["decoder.layers.0.attention.qkv.weight"]).any()
